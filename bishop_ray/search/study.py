"""Optuna studies on disk: opening, identity, settings, and questions to their trials."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import optuna
from filelock import FileLock, Timeout
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import TrialState

from bishop_ray.config import Params, StudyConfig
from bishop_ray.data.refs import NO_ROLES
from bishop_ray.data.split import SplitProtocol
from bishop_ray.errors import UserError
from bishop_ray.search.journal import JOURNAL, mend, open_journal
from bishop_ray.search.space import OUTSIDE, SearchSpace, unflatten
from bishop_ray.tracking import STOPPED_TAG, public_uri
from bishop_ray.training.job import PREDICTOR, model_folder

RECORD = "bishop.config"
"""Tag of a study's own run."""
_LOCAL = ("storage", "tracking_uri", "study_db", "fresh", "doctor")
"""What says where a study runs or how it is begun: no business of who repeats a trial, and an address may be secret."""


def config_text(config: StudyConfig) -> str:
    """The settings as JSON, without addresses; a file's place is among them."""
    names = [field.name for field in fields(StudyConfig) if field.name not in _LOCAL]
    return json.dumps({name: value for name, value in asdict(config).items() if name in names})


def read_config(text: str) -> StudyConfig:
    """The inverse of `config_text`; what it leaves out has its default.

    Raises:
        UserError: The text is none of `config_text`, or of a version that knows more settings.
    """
    try:
        values = json.loads(text)
        found = _build(StudyConfig, values)
    except UserError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"tag {RECORD}: damaged ({type(error).__name__})") from None
    assert isinstance(found, StudyConfig)
    return found


def _build(kind: type, values: dict[str, Any]) -> Any:
    hints = get_type_hints(kind, localns={"SplitProtocol": SplitProtocol})
    if unknown := values.keys() - {field.name for field in fields(kind)}:
        raise UserError(f"tag {RECORD}: written by a newer version: this one knows no {min(unknown)!r}")
    return kind(**{name: _value(hints[name], value) for name, value in values.items()})


def _value(hint: Any, value: Any) -> Any:
    """What JSON made of a value, as its field has it."""
    nested = next((option for option in (hint, *get_args(hint)) if is_dataclass(option)), None)
    if isinstance(nested, type) and isinstance(value, dict):
        return _build(nested, value)
    return tuple(value) if isinstance(value, list) else value


PARAMS = "params"
"""User attribute of a trial: its whole point, flat, as JSON."""
STOPPED = "stopped"
"""User attribute of a trial that the scheduler stopped: the fields of `RungStop`. Other trials have none, or empty."""


def stopped_tags(stop: Mapping[str, Any]) -> dict[str, str]:
    """The attribute `STOPPED` as tags of the trial's run: ``bishop.stopped.rung`` and so on."""
    return {f"{STOPPED_TAG}{name}": str(value) for name, value in stop.items()}


def best_of(study: optuna.Study) -> tuple[int, float] | None:
    """Number and score of the best trial, early-stopped ones included; ties go to the earlier trial."""
    scored = [
        (value, -t.number)
        for t in study.get_trials(deepcopy=False)
        if t.state in (TrialState.COMPLETE, TrialState.PRUNED)
        and (value := t.value if t.value is not None else last_value(t)) is not None
        and math.isfinite(value)
    ]
    return (-max(scored)[1], max(scored)[0]) if scored else None


KEPT = 5
"""Trials of a study whose models stay on disk."""


def kept_models(study: optuna.Study, folder: Path | str) -> list[tuple[int, float, Path]]:
    """Number, validation score and folder of the best trials that saved a model, best first; ties: the earlier trial.

    Args:
        study: The Optuna study.
        folder: The study's folder.
    """
    scored = [
        (-t.value, t.number, model_folder(folder, t.number))
        for t in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if t.value is not None and math.isfinite(t.value)
    ]
    saved = [row for row in sorted(scored) if (row[2] / PREDICTOR).is_dir()]
    return [(number, -negated, path) for negated, number, path in saved[:KEPT]]


def last_value(trial: optuna.trial.FrozenTrial) -> float | None:
    """The last reported score of a trial (scores are best-so-far, so it is its best)."""
    values = trial.intermediate_values
    return values[max(values)] if values else None


def count_states(study: optuna.Study) -> Counter[str]:
    """Trials by state, in the words of `Progress`."""
    names = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
    return Counter(names[t.state] for t in study.get_trials(deepcopy=False) if t.state in names)


def seconds_of(study: optuna.Study) -> float:
    """What all trials took together."""
    return float(sum(t.user_attrs.get("seconds", 0.0) for t in study.get_trials(deepcopy=False)))


def params_of(study: optuna.Study, number: int) -> Params:
    """The full parameters of a trial, as its searcher stored them."""
    return unflatten(json.loads(study.get_trials(deepcopy=False)[number].user_attrs[PARAMS]))


def trial_rows(study: optuna.Study) -> list[dict[str, Any]]:
    """The study's trials, best first, for the leaderboard table in MLflow."""
    rows = [
        {
            "trial": t.number,
            "state": t.state.name.lower(),
            "best_val_score": t.value if t.value is not None else last_value(t),
            "epochs": max(t.intermediate_values, default=0),
            "seconds": t.user_attrs.get("seconds", 0.0),
            "reason": t.user_attrs.get("reason", ""),
            **t.params,
            **json.loads(t.user_attrs.get(OUTSIDE, "{}")),
        }
        for t in study.get_trials(deepcopy=False)
        if t.state.is_finished()
    ]
    return sorted(
        rows, key=lambda row: -math.inf if row["best_val_score"] is None else row["best_val_score"], reverse=True
    )


FORMAT = 1
"""Of what a study's attributes mean; raised when an older version would misread them."""
_FORMAT = "format"
_FACTS, _ID, _RESULT, _OPENINGS, _SECONDS = "facts", "id", "result", "test_openings", "seconds"


@dataclass(frozen=True)
class OpenStudy:
    """A study and its folder.

    Attributes:
        study: The Optuna study, the one record of the search.
        folder: Checkpoints, journal, predictors.
        identity: Unique per start (``--fresh`` makes a new one); MLflow runs carry it.
    """

    study: optuna.Study
    folder: Path
    identity: str

    @property
    def result(self) -> dict[str, Any] | None:
        """What an earlier run of the same command ended with."""
        stored = self.study.user_attrs.get(_RESULT)
        return json.loads(stored) if stored else None

    def count_test_opening(self) -> None:
        """Counts, before it happens, that the test split is opened: once, unless a finished study is extended."""
        self.study.set_user_attr(_OPENINGS, self.test_openings + 1)

    @property
    def test_openings(self) -> int:
        """How often the test split was opened for this study."""
        return int(self.study.user_attrs.get(_OPENINGS, 0))

    def add_seconds(self, seconds: float) -> float:
        """Adds to the wall time of all runs of this study; the sum."""
        total = float(self.study.user_attrs.get(_SECONDS, 0.0)) + seconds
        self.study.set_user_attr(_SECONDS, total)
        return total

    def save_result(self, result: dict[str, Any]) -> None:
        """Marks the study as finished."""
        self.study.set_user_attr(_RESULT, json.dumps(result))


def study_folder(config: StudyConfig) -> Path:
    """Where the study lives: ``STORAGE/studies/NAME``."""
    return Path(config.storage) / "studies" / config.name


@contextlib.contextmanager
def exclusive(config: StudyConfig) -> Iterator[None]:
    """As `locked`, for the study of `config`."""
    with locked(study_folder(config)):
        yield


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps a second process out of the study in `folder` while this one works on it.

    Raises:
        UserError: Another process has it, or the storage folder cannot be written.
    """
    path = folder.with_name(folder.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"study {folder.name} is being run by another process (lock {path})") from None
    except OSError as error:
        raise UserError(f"--storage: cannot write {path.parent}: {error.strerror or error}") from None
    try:
        mend(folder / JOURNAL)
        yield
    finally:
        lock.release()


def stored_identity(config: StudyConfig) -> str:
    """The identity of the study on disk, "" when there is none."""
    if not config.study_db and not (study_folder(config) / JOURNAL).is_file():
        return ""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = _storage(config)
    names = [study.study_name for study in storage.get_all_studies()]
    return str(known_study(config).user_attrs.get(_ID, "")) if config.name in names else ""


def known_study(config: StudyConfig) -> optuna.Study:
    """The study of the configuration, which exists."""
    return optuna.load_study(study_name=config.name, storage=_storage(config))


def read_study(folder: Path) -> optuna.Study:
    """The study of the folder named after it, to be read only.

    Raises:
        UserError: There is none, or its journal is damaged.
    """
    path = folder / JOURNAL
    if not path.is_file():  # Optuna would make an empty one
        raise UserError(f"{path}: missing; expected the journal of study {folder.name}")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        return optuna.load_study(study_name=folder.name, storage=open_journal(path))
    except Exception as error:  # a damaged line may break the replay anywhere
        raise UserError(f"{path}: damaged ({type(error).__name__}: {error})") from error


def settings_of(study: optuna.Study) -> dict[str, Any]:
    """What must not change while the study goes on: data, split, metric, ..."""
    found: dict[str, Any] = json.loads(study.user_attrs.get(_FACTS, "{}"))
    return found


def remove_study(config: StudyConfig) -> None:
    """Deletes the study's folder, and its entry in a database, for a fresh start."""
    if config.study_db and stored_identity(config):
        optuna.delete_study(study_name=config.name, storage=_storage(config))
    shutil.rmtree(study_folder(config), ignore_errors=True)


def _storage(config: StudyConfig) -> BaseStorage:
    """The journal in the study's folder, or the database that the user names where a folder cannot be appended to."""
    if not config.study_db:
        return open_journal(study_folder(config) / JOURNAL)
    return open_database(config.study_db)


def open_database(url: str) -> RDBStorage:
    """The database of ``--study-db``; Optuna makes its tables when they are missing.

    Raises:
        UserError: It cannot be opened, or its driver is not installed; the message shows no password.
    """
    try:
        return RDBStorage(url, engine_kwargs={"pool_pre_ping": True})
    except ImportError as error:
        raise UserError(f"--study-db: its driver is not installed ({error})") from None
    except Exception as error:  # SQLAlchemy's, the driver's or Optuna's
        shown, text = public_uri(url), f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"--study-db: cannot open {shown}: {text.replace(url, shown)}") from None


def open_study(
    config: StudyConfig,
    space: SearchSpace,
    data_hash: str,
    further: Callable[[], Sequence[dict[str, Any]]] = tuple,
) -> OpenStudy:
    """Creates the study of `config`, or opens it again.

    Args:
        config: The study.
        space: What it searches.
        data_hash: Of its table.
        further: Answers points to be tried after the space's first ones; called when the study is new.

    Raises:
        UserError: The study exists with other settings (`_facts`); says what differs. Or the storage folder cannot be
            written.
    """
    folder = study_folder(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        storage = _storage(config)
    except OSError as error:
        raise UserError(f"--storage: cannot write {folder}: {error.strerror or error}") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(storage=storage, study_name=config.name, direction="maximize", load_if_exists=True)
    facts = _facts(config, space, data_hash)
    stored = study.user_attrs.get(_FACTS)
    if (format := int(study.user_attrs.get(_FORMAT, FORMAT))) > FORMAT:
        raise UserError(
            f"study {config.name} was written by a newer version (format {format}; this version knows {FORMAT}): "
            "use that version, or --fresh to start over"
        )
    if stored:
        _go_on(study, json.loads(stored), facts)
    else:
        for point, outside in space.queue():
            attrs = {OUTSIDE: json.dumps(outside)} if outside else None
            study.enqueue_trial(point, user_attrs=attrs, skip_if_exists=True)
        for point in further():
            study.enqueue_trial(point, user_attrs={"warm_start": config.warm_start}, skip_if_exists=True)
        study.set_user_attr(_FORMAT, FORMAT)
        study.set_user_attr(_ID, uuid.uuid4().hex[:12])
        study.set_user_attr(_FACTS, json.dumps(facts))
    return OpenStudy(study, folder, str(study.user_attrs[_ID]))


def _facts(config: StudyConfig, space: SearchSpace, data_hash: str) -> dict[str, Any]:
    """The settings that must not change while the study goes on."""
    # Here: whoever only reads a study needs no Ray, which takes seconds to import.
    from bishop_ray.search.scheduler import stopping_rule

    return {
        "data": data_hash,
        "search space": f"{space.name} {space.fingerprint()}",
        "metric": config.metric,
        "max-epochs": config.max_epochs,
        "sampler": config.sampler,
        "scheduler": config.scheduler,
        "split": str(config.split),
        "order of validation rows": "drawn",
        "precision": config.precision,
        "warm start": config.warm_start,
        **stopping_rule(config.scheduler, config.max_epochs),
    } | config.ref.roles.facts()


def _go_on(study: optuna.Study, stored: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuses a study that was begun with other settings; one that kept no rule of its scheduler keeps it from now on.

    Raises:
        UserError: Settings differ.
    """
    from bishop_ray.search.scheduler import unrecorded_rule  # as in `_facts`

    # Studies that were begun before there was a choice, or with another order, do not name it.
    before = {"precision": "auto", "order of validation rows": "of the table", "warm start": "none"}
    before |= NO_ROLES.facts()
    rule = unrecorded_rule(stored.get("scheduler", ""), stored.get("max-epochs", 0))
    _same(study.study_name, before | rule | stored, now)
    if not rule.keys() <= stored.keys():
        study.set_user_attr(_FACTS, json.dumps(rule | stored))


def _same(name: str, stored: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [f"{key} was {stored.get(key)}, is {value}" for key, value in now.items() if stored.get(key) != value]
    if changed:
        raise UserError(
            f"study {name} exists with other settings: {'; '.join(changed)}; "
            "use --fresh to start over or another --seed"
        )


RESULT = "result.json"
