"""Records of studies, trials and tables in a report."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.data.table import TaskType
from bishop_ray.tracking.query import MetricPoint

COMPLETE, EARLY, FAILED, OPEN = "complete", "stopped early", "failed", "open"


@dataclass(frozen=True)
class Trial:
    """One trial.

    Attributes:
        number: Its number.
        state: `COMPLETE`, `EARLY`, `FAILED` or `OPEN`.
        reason: Why it ended.
        params: As logged, flat.
        score: Best validation score, larger is better; NaN without one.
        start: Milliseconds since 1970.
        end: The same.
        seconds: It took.
        peak_mb: Peak of its process's resident memory in MB, NaN where it was not recorded.
        course: ``val_score`` by epoch.
        run_id: In MLflow, "" where only the study knows it.
    """

    number: int
    state: str
    reason: str
    params: Mapping[str, str]
    score: float
    start: int
    end: int
    seconds: float
    peak_mb: float
    course: Sequence[MetricPoint]
    run_id: str

    @property
    def epochs(self) -> int:
        """The last epoch it reported, 0 for none."""
        return max((point.step for point in self.course), default=0)


@dataclass(frozen=True)
class Predictions:
    """Of one part of the rows: class positions or target (R,), and probabilities (R, K) or predictions (R, 1)."""

    y: NDArray[np.float64]
    output: NDArray[np.float64]


@dataclass(frozen=True)
class Study:
    """One study.

    Attributes:
        name: Its name.
        run_id: Its run in MLflow.
        experiment: The experiment's name.
        dataset: Key of the dataset.
        model: Registry name.
        task: Task type.
        metric: Selection metric.
        params: Of its run.
        metrics: Of its run.
        tags: Of its run.
        start: Milliseconds since 1970.
        end: The same, 0 while it runs.
        trials: By number.
        classes: Names of the output columns.
        validation: The winner's predictions, None where they were not kept.
        test: The same.
        layers: ``alpha/NAME`` and ``nonzero/NAME`` of the winner's layers by epoch.
    """

    name: str
    run_id: str
    experiment: str
    dataset: str
    model: str
    task: TaskType
    metric: str
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    start: int
    end: int
    trials: tuple[Trial, ...]
    classes: tuple[str, ...] = ()
    validation: Predictions | None = None
    test: Predictions | None = None
    layers: Mapping[str, Sequence[MetricPoint]] = field(default_factory=dict)

    @property
    def seed(self) -> str:
        """Of split and search."""
        return self.params.get("seed", "")

    @property
    def scores(self) -> tuple[float, ...]:
        """Test score per training of the winner; empty where the study has not been evaluated."""
        if stored := self.tags.get("test_scores"):
            return tuple(float(score) for score in json.loads(stored))
        return (self.metrics["test_score"],) if "test_score" in self.metrics else ()

    @property
    def test_mean(self) -> float:
        """Mean test score, NaN without one."""
        return statistics.fmean(self.scores) if self.scores else math.nan

    @property
    def validation_score(self) -> float:
        """The winner's best validation score in the search, NaN without one."""
        return float(self.metrics.get("best_val_score", math.nan))

    @property
    def winner(self) -> Trial | None:
        """The trial that was evaluated, or the best one so far."""
        chosen = self.tags.get("best_trial", "")
        by_number = {trial.number: trial for trial in self.trials}
        if chosen.isdigit() and int(chosen) in by_number:
            return by_number[int(chosen)]
        scored = [trial for trial in self.trials if math.isfinite(trial.score)]
        return max(scored, key=lambda t: (t.score, -t.number), default=None)

    def count(self, state: str) -> int:
        """Trials in a state."""
        return sum(trial.state == state for trial in self.trials)


@dataclass(frozen=True)
class AblationRecords:
    """One training of an ablation.

    Attributes:
        ablation: Which one: "components", "hopfield", "rotation", "depth", "sparsity", "convergence".
        dataset: Key of the dataset.
        model: Registry name.
        setting: What was changed.
        metric: Metric of the scores.
        seed: Of the training.
        validation: Validation score in the metric's own sign.
        test: Test score in the metric's own sign.
        base: The setting that the others are compared with, "" where it was not recorded.
        courses: ``epoch/...`` metric -> values by epoch; empty when read from a CSV file.

    A training that failed has NaN for both scores.
    """

    ablation: str
    dataset: str
    model: str
    setting: str
    metric: str
    seed: str
    validation: float
    test: float
    base: str = ""
    courses: Mapping[str, Sequence[MetricPoint]] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, ...]:
        """What tells it from all other trainings."""
        return self.ablation, self.dataset, self.model, self.metric, self.setting, self.seed

    @property
    def failed(self) -> bool:
        """Whether it ended without a score."""
        return math.isnan(self.test)


@dataclass(frozen=True)
class ReportTable:
    """A table of the report.

    Attributes:
        name: Stem of its CSV file.
        title: Above it.
        frame: Full precision; missing values are shown as a dash.
        notes: Below it: what the columns are, what differs from the paper.
        digits: Column -> decimals shown; others as they are.
    """

    name: str
    title: str
    frame: pd.DataFrame
    notes: tuple[str, ...] = ()
    digits: Mapping[str, int] = field(default_factory=dict)
