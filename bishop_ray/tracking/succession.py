"""What follows a registration: the gate, the model's own alias, and the question who is champion."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from bishop_ray.tracking.aliases import CHALLENGER, CHAMPION, holder, move_alias
from bishop_ray.tracking.contest import judge_new, score_of
from bishop_ray.tracking.evidence import Evidence
from bishop_ray.tracking.gate import check_version

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

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
