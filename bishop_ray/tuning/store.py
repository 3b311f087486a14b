"""The study on disk: one Optuna journal per study, and the facts that must not change while it goes on."""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock, Timeout
from optuna.storages import BaseStorage, RDBStorage

from bishop_ray.config import StudyConfig
from bishop_ray.data.roles import NO_ROLES
from bishop_ray.errors import UserError
from bishop_ray.tracking import public_uri
from bishop_ray.tuning.journal import JOURNAL, mend, open_journal
from bishop_ray.tuning.space import OUTSIDE, SearchSpace

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
    if config.name not in names:
        return ""
    study = optuna.load_study(study_name=config.name, storage=storage)
    return str(study.user_attrs.get(_ID, ""))


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
        UserError: The study exists with another space, metric, number of epochs or data; says what differs. Or the
            storage folder cannot be written.
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
        # Studies that were begun before there was a choice, or with another order, do not name it.
        before = {"precision": "auto", "order of validation rows": "of the table", "warm start": "none"}
        before |= NO_ROLES.facts()
        _same(config.name, before | json.loads(stored), facts)
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
    } | config.ref.roles.facts()


def _same(name: str, stored: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [f"{key} was {stored.get(key)}, is {value}" for key, value in now.items() if stored.get(key) != value]
    if changed:
        raise UserError(
            f"study {name} exists with other settings: {'; '.join(changed)}; "
            "use --fresh to start over or another --seed"
        )
