"""Registration of a model: version, gate, its own alias, and who is champion."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bishop_ray.errors import UserError
from bishop_ray.registry.aliases import CHALLENGER, CHAMPION, all_versions, holder, move_alias
from bishop_ray.registry.artifact import save_pyfunc
from bishop_ray.registry.compare import judge_new, score_of
from bishop_ray.registry.gate import check_version, get_ready
from bishop_ray.registry.gate_cases import FOLDER, Evidence
from bishop_ray.tracking.client import (
    as_user_error,
    check_names,
    from_mlflow,
    one_at_a_time,
    open_client,
    patient,
    public_uri,
    quoted,
    tracking_uri,
)
from bishop_ray.tracking.environment import environment
from bishop_ray.tracking.naming import short_tags

if TYPE_CHECKING:
    import pandas as pd
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

    from bishop_ray.predictor import Predictor


logger = logging.getLogger(__name__)
REFUSED = "refused"


def settle_aliases(
    client: MlflowClient, uri: str, version: ModelVersion, alias: str, evidence: Evidence, scratch: Path
) -> str:
    """The gate, then the aliases, once per version; an earlier call that was cut off is completed.

    Args:
        client: Of the registry.
        uri: Its address.
        version: The version.
        alias: The model's own alias.
        evidence: What the version was registered with.
        scratch: Folder for a copy of its files.

    Returns:
        Why the version is champion or not: "yes: ..." or "no: ..."; "refused: ..." where the gate stayed shut.
    """
    name = version.name
    if version.tags.get("bishop.aliases") == "moved":  # registered before: later versions keep what they took over
        return version.tags.get("bishop.champion", "")
    number = str(version.version)
    result = check_version(uri, name, number, scratch)
    client.set_model_version_tag(name, number, "bishop.gate", result.tag)
    if result.failure:
        logger.warning("%s version %s is registered without an alias: %s", name, number, result.failure)
        return f"{REFUSED}: {result.failure}"
    move_alias(client, name, alias, number, f"registered as {alias}")
    verdict = _move_champion(client, uri, version, evidence)
    client.set_model_version_tag(name, number, "bishop.champion", verdict)
    client.set_model_version_tag(name, number, "bishop.aliases", "moved")
    return verdict


def _move_champion(client: MlflowClient, uri: str, version: ModelVersion, evidence: Evidence) -> str:
    """Points `champion` or `challenger` to the version, or neither; why."""
    name, number = version.name, str(version.version)
    present = holder(client, name, CHAMPION)
    if present in ("", number):  # the second: an earlier call was cut off right after the move
        move_alias(client, name, CHAMPION, number, words := "the first version" if not present else "yes: moved before")
        return words
    verdict = judge_new(version, client.get_model_version(name, present), evidence.validation, uri)
    if verdict.wins:
        move_alias(client, name, CHAMPION, number, verdict.reason)
    elif verdict.promising and _leads(version, holder(client, name, CHALLENGER), client):
        move_alias(client, name, CHALLENGER, number, verdict.reason)
    return verdict.tag


def _leads(version: ModelVersion, challenger: str, client: MlflowClient) -> bool:
    """Whether no challenger is there that was selected on the same data with a score as good."""
    if challenger in ("", str(version.version)):
        return True
    other = client.get_model_version(version.name, challenger)
    same = all(other.tags.get(key) == version.tags.get(key) for key in ("bishop.data", "bishop.metric"))
    scores = score_of(version), score_of(other)
    return not same or scores[0] is None or scores[1] is None or scores[0] > scores[1]


@dataclass(frozen=True)
class RegisteredModel:
    """A version in the registry.

    Attributes:
        name: Registered name, e.g. ``CR-abalone``.
        version: Its number.
        uri: What ``mlflow.pyfunc.load_model`` takes.
        champion: It carries the alias `champion`.
        created: False when this very model had been registered before.
        size_bytes: Of the predictor's files.
        verdict: Why it is champion or not: "yes: ..." or "no: ..."; "refused: ..." where it got no alias at all.
    """

    name: str
    version: int
    uri: str
    champion: bool
    created: bool
    size_bytes: int = field(default=0, compare=False)
    verdict: str = field(default="", compare=False)


def register_best(
    predictor: Predictor,
    name: str,
    *,
    alias: str,
    val_score: float,
    example: pd.DataFrame,
    run_id: str,
    evidence: Evidence | None = None,
    uri: str = "",
    study_id: str = "",
    search: str = "",
    data_key: str = "",
    metric: str = "",
    metrics: Mapping[str, float] | None = None,
    tags: Mapping[str, str] | None = None,
) -> RegisteredModel:
    """Registers a study's winner under `name` and moves the aliases, last of all.

    First the version's files, as they lie in the registry, must load in a fresh process and answer as they do here
    (``gate.py``). If they do not, it stays without any alias, with the reason in its tag ``bishop.gate``. Then the
    alias of the model's name moves to it; `champion` too when there is none, or as ``contest.judge_new`` says; and
    where its score is better but not beyond chance, `challenger`. Registering the same predictor of the same study
    again makes no second version. When anything fails, no alias has moved and nothing half-written is left.

    Args:
        predictor: The fitted predictor.
        name: Registered name: the dataset's key.
        alias: The model's name.
        val_score: Validation score, larger is better.
        example: A few feature rows, stored as input example.
        evidence: What the version is checked by and compared with; without, only `example` and the score.
        run_id: The study's parent run.
        uri: MLflow address, see `tracking_uri`.
        study_id: The study's identity, for "the same study".
        search: Identity of the search over several models that the study belongs to; by default the study's.
        data_key: Says which data and split the score was taken on; scores of different ones are not compared.
        metric: Name of the selection metric.
        metrics: Further numbers (test scores), kept as tags of the version.
        tags: Further tags of the version.

    Raises:
        UserError: A name or alias that MLflow does not accept, a run that is not there, a store that is not writable.
        SourceUnavailable: The server does not answer.
    """
    from bishop_ray.predictor import fingerprint
    from bishop_ray.registry.gate_cases import write_sample

    check_names(name, alias)
    if not math.isfinite(val_score):
        raise UserError(f"register {name!r}: expected a finite validation score; found {val_score}")
    uri = tracking_uri(uri)
    evidence = evidence or Evidence(example)
    with patient(), one_at_a_time(uri), tempfile.TemporaryDirectory(prefix="bishop-register-") as scratch:
        folder = predictor.save(Path(scratch) / "predictor")
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        identity = {"bishop.study_id": study_id or run_id, "bishop.fingerprint": fingerprint(folder)}
        facts = {
            "bishop.metric": metric,
            "bishop.data": data_key,
            "bishop.search": search or study_id or run_id,
            "bishop.validation": evidence.validation.key if evidence.validation else "",
            "bishop.size_bytes": str(size),
            "val_score": repr(float(val_score)),
        }
        numbers = {key: repr(float(value)) for key, value in (metrics or {}).items()}
        all_tags = short_tags({**environment(), **numbers, **(tags or {}), **_contract(predictor), **facts, **identity})
        try:
            client = open_client(uri)
            _create_name(client, name)
            version = _same_version(client, name, identity)
            created = version is None
            if version is None:
                get_ready()
                _remove_leftovers(client, run_id, identity)
                write_sample(folder.with_name(FOLDER), predictor, evidence)
                version = _create_version(client, name, run_id, predictor, folder, example, all_tags)
            verdict = settle_aliases(client, uri, version, alias, evidence, Path(scratch))
            champion = holder(client, name, CHAMPION) == str(version.version)
        except Exception as error:
            if not from_mlflow(error):
                raise
            if getattr(error, "error_code", "") in ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST"):
                raise UserError(f"MLflow refused to register {name!r}: {str(error).splitlines()[0]}") from error
            raise as_user_error(error, uri) from error
    number = int(version.version)
    return RegisteredModel(name, number, f"models:/{name}/{number}", champion, created, size, verdict)


def _contract(predictor: Predictor) -> dict[str, str]:
    """What the model is and what its callers rely on: columns, kinds, levels, target and labels as a hash."""
    target = predictor.target
    parts = [predictor.schema, sorted(predictor.levels.items()), target.name, target.task.value, target.classes]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    return {"bishop.model": predictor.model_name, "task": target.task.value, "bishop.contract": digest}


def _create_name(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _same_version(client: MlflowClient, name: str, identity: Mapping[str, str]) -> ModelVersion | None:
    """The version that an earlier call for the same study and the same predictor made."""
    for version in all_versions(client, name):
        if all(version.tags.get(key) == value for key, value in identity.items()):
            return version
    return None


def _remove_leftovers(client: MlflowClient, run_id: str, identity: Mapping[str, str]) -> None:
    """Deletes logged models of this very registration that never became a version (a process killed halfway)."""
    experiment = client.get_run(run_id).info.experiment_id
    wanted = " AND ".join(f"tags.`{key}` = {quoted(value)}" for key, value in identity.items())
    for model in client.search_logged_models([experiment], filter_string=wanted):
        client.delete_logged_model(model.model_id)


def _create_version(
    client: MlflowClient,
    name: str,
    run_id: str,
    predictor: Predictor,
    folder: Path,
    example: pd.DataFrame,
    tags: dict[str, str],
) -> ModelVersion:
    """Uploads the predictor and makes a version of it; deletes what it made when anything fails."""
    from mlflow.entities import LoggedModelOutput

    params = {key: str(value)[:500] for key, value in predictor.hparams.items()}
    experiment = client.get_run(run_id).info.experiment_id
    model = client.create_logged_model(experiment, predictor.model_name, run_id, tags=tags, params=params)
    try:
        local = folder.with_name("model")
        parts = {"predictor": folder, FOLDER: folder.with_name(FOLDER)}
        save_pyfunc(predictor, parts, local, example, model.model_id, run_id)
        client.log_model_artifacts(model.model_id, str(local))
        client.finalize_logged_model(model.model_id, "READY")
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
        return client.create_model_version(
            name, source=model.artifact_location, run_id=run_id, tags=tags, model_id=model.model_id
        )
    except BaseException as error:
        with contextlib.suppress(Exception):  # the first failure is the one to tell
            client.finalize_logged_model(model.model_id, "FAILED")
            client.delete_logged_model(model.model_id)
        if isinstance(error, OSError) and error.strerror:
            place = public_uri(str(model.artifact_location))
            raise UserError(f"model {name!r}: its files cannot be written to {place}: {error.strerror}") from error
        raise
