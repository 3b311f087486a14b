"""The study on disk: one Optuna journal per study, and the facts that must not change while it goes on."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from bishop_ray.config import StudyConfig
from bishop_ray.errors import UnknownName, UserError
from bishop_ray.tuning.space import SearchSpace

SAMPLERS = ("tpe", "random", "gp")
_FACTS, _ID, _RESULT, _OPENINGS = "facts", "id", "result", "test_openings"


@dataclass(frozen=True)
class OpenStudy:
    """A study and its folder.

    Attributes:
        study: The Optuna study, the one record of the search.
        folder: Checkpoints, journal, predictors.
        identity: Unique per start (``--fresh`` makes a new one); MLflow runs carry it.
        resumed: Whether the study existed.
    """

    study: optuna.Study
    folder: Path
    identity: str
    resumed: bool

    @property
    def result(self) -> dict[str, Any] | None:
        """What an earlier run of the same command ended with."""
        stored = self.study.user_attrs.get(_RESULT)
        return json.loads(stored) if stored else None

    def count_test_opening(self) -> int:
        """Counts, before it happens, that the test split is opened: once, unless a finished study is extended."""
        count = int(self.study.user_attrs.get(_OPENINGS, 0)) + 1
        self.study.set_user_attr(_OPENINGS, count)
        return count

    def save_result(self, result: dict[str, Any]) -> None:
        """Marks the study as finished."""
        self.study.set_user_attr(_RESULT, json.dumps(result))


def study_folder(config: StudyConfig) -> Path:
    """Where the study lives: ``STORAGE/studies/NAME``."""
    return Path(config.storage) / "studies" / config.name


def open_study(config: StudyConfig, space: SearchSpace, data_hash: str) -> OpenStudy:
    """Creates the study of `config`, or opens it again.

    Raises:
        UserError: The study exists with another space, metric, number of epochs or data; says what differs. Or the
            storage folder cannot be written.
    """
    folder = study_folder(config)
    if config.fresh and folder.exists():
        shutil.rmtree(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        storage = JournalStorage(JournalFileBackend(str(folder / "optuna.journal")))
    except OSError as error:
        raise UserError(f"--storage: cannot write {folder}: {error.strerror or error}") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(storage=storage, study_name=config.name, direction="maximize", load_if_exists=True)
    facts = _facts(config, space, data_hash)
    stored = study.user_attrs.get(_FACTS)
    if stored:
        _same(config.name, json.loads(stored), facts)
    else:
        for point in space.first:
            study.enqueue_trial(point, skip_if_exists=True)
        study.set_user_attr(_ID, uuid.uuid4().hex[:12])
        study.set_user_attr(_FACTS, json.dumps(facts))
    return OpenStudy(study, folder, str(study.user_attrs[_ID]), resumed=bool(stored))


def _facts(config: StudyConfig, space: SearchSpace, data_hash: str) -> dict[str, Any]:
    return {
        "data": data_hash,
        "search space": f"{space.name} {space.fingerprint()}",
        "metric": config.metric,
        "max-epochs": config.max_epochs,
        "sampler": config.sampler,
        "split": str(config.split),
    }


def _same(name: str, stored: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [f"{key} was {stored.get(key)}, is {value}" for key, value in now.items() if stored.get(key) != value]
    if changed:
        raise UserError(
            f"study {name} exists with other settings: {'; '.join(changed)}; "
            "use --fresh to start over or another --seed"
        )


def sampler_factory(config: StudyConfig) -> Callable[[int], BaseSampler]:
    """Makes the sampler of the n-th trial, seeded by study seed and n.

    Raises:
        UnknownName: No such sampler.
    """
    if config.sampler not in SAMPLERS:
        raise UnknownName("sampler", config.sampler, SAMPLERS)
    # A tenth of the budget at random, 4 to 10 trials: TPE's default of 10 would make a small search a random one.
    startup = min(10, max(4, config.trials // 10))

    def make(number: int) -> BaseSampler:
        seed = config.seed * 100_003 + number
        if config.sampler == "random":
            return RandomSampler(seed=seed)
        if config.sampler == "gp":
            return GPSampler(seed=seed, n_startup_trials=startup)
        return TPESampler(seed=seed, multivariate=True, n_startup_trials=startup)

    return make
