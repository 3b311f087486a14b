"""Records of a training with fixed settings and several seeds."""

from __future__ import annotations

import hashlib
import json
import statistics
from dataclasses import dataclass, field
from typing import Any

from bishop_ray.config import Params, StudyConfig
from bishop_ray.tuning.space import flatten


@dataclass(frozen=True)
class FixedConfig(StudyConfig):
    """A training with fixed settings; ``eval_seeds`` is the number of seeds, ``trials`` has no meaning.

    Attributes:
        params: The settings that differ from the defaults.
    """

    params: Params = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Deterministic, and another one for other settings."""
        settings = json.dumps([flatten(self.params), self.max_epochs], sort_keys=True)
        digest = hashlib.sha256(settings.encode()).hexdigest()[:8]
        return f"{self.ref.key}-{self.model}-fixed-{digest}-s{self.seed}"


@dataclass(frozen=True)
class SeedScore:
    """The training with one seed.

    Attributes:
        seed: Of initialisation, row order and dropout.
        validation: Validation score, larger is better; None if the training failed.
        test: Test score.
        epochs: Epochs, or reports of another library.
        seconds: Of the training.
        note: Why it ended.
    """

    seed: int
    validation: float | None
    test: float | None
    epochs: int
    seconds: float
    note: str


@dataclass(frozen=True)
class FixedResult:
    """What a training with fixed settings ended with.

    Attributes:
        dataset: Key of the dataset.
        model: Registry name.
        metric: Of all scores.
        seeds: One entry per seed.
        linear: Test score of a linear model on the same rows.
        constant: Test score of the constant prediction.
        rows: Rows of train, validation, test.
        params: The settings given, flat.
        seconds: Wall time of all runs of the command.
        folder: Holds the trained predictors, ``final/0000-seed-SEED/predictor``.
        parent_run: MLflow run.
        reused: The command had ended before.
    """

    dataset: str
    model: str
    metric: str
    seeds: tuple[SeedScore, ...]
    linear: float
    constant: float
    rows: tuple[int, ...]
    params: dict[str, Any]
    seconds: float
    folder: str
    parent_run: str
    reused: bool = False

    @property
    def failed(self) -> int:
        """Seeds whose training failed."""
        return sum(score.test is None for score in self.seeds)

    def summary(self, part: str) -> tuple[float, float]:
        """Mean and sample deviation (0 for one seed) over the trained seeds, of "validation" or "test"."""
        values = [value for score in self.seeds if (value := getattr(score, part)) is not None]
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
