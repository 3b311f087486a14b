"""Paired bootstrap of the difference of two models' scores.

Rows are drawn with replacement, the same ones for both models, so that what makes a row hard cancels out (Efron and
Tibshirani, "An introduction to the bootstrap", 1993, chapters 8 and 13). Letters: R rows, K outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bishop_ray.data.table import TaskType
from bishop_ray.errors import BadTable
from bishop_ray.metrics import evaluate, roc_area

RESAMPLES = 1000
FEWEST = 200
"""Of very many rows fewer samples are drawn, but so many: the interval's ends are then still known well enough."""
WORK = 20_000_000
"""Rows drawn in all, about."""
SHARE = 0.05
"""Of the resampled differences left below the interval, and as many above: it holds 90 %, from below 95 %."""


@dataclass(frozen=True)
class Scored:
    """What one model says of R rows, in its own coding of the target.

    Attributes:
        y: (R,) class indices, or the standardised target.
        output: (R, K) probabilities, or (R, 1) of the standardised target.
        scale: Units of the target per unit of `y`.
    """

    y: NDArray[Any]
    output: NDArray[Any]
    scale: float = 1.0

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Difference:
    """How much better the first model is than the second, in scores (larger is better).

    Attributes:
        first: Its score.
        second: The other's.
        low: Lower end of the 90 % interval of `value`; above it the difference lies with 95 % confidence.
        high: Upper end.
        rows: Rows compared on.
    """

    first: float
    second: float
    low: float
    high: float
    rows: int

    @property
    def value(self) -> float:
        """The difference on the rows as they are."""
        return self.first - self.second

    @property
    def better(self) -> bool:
        """Whether the first model is better beyond chance: the whole interval lies above 0."""
        return self.low > 0

    def words(self) -> str:
        """In one line."""
        scores = f"score (larger is better) {self.first:.6g} against {self.second:.6g}"
        return f"{scores}: {self.value:+.4g}, 90 % interval {self.low:+.4g} to {self.high:+.4g}, on {self.rows} rows"


def paired_bootstrap(
    metric: str, task: TaskType, first: Scored, second: Scored, *, resamples: int = RESAMPLES, seed: int = 0
) -> Difference:
    """The difference of two models' scores on the same R rows, with its interval; the same each time.

    Samples in which the metric is undefined (AUC where one class was drawn) are left out.

    Args:
        metric: A name of ``metrics.METRICS``.
        task: The task type.
        first: Of the model that may be better.
        second: Of the other, row by row the same rows.
        resamples: Samples drawn; fewer of more rows than some 20,000 (`WORK`).
        seed: Of the samples.

    Raises:
        BadTable: The metric is undefined for these rows, or for most samples of them.
        UserError: The metric does not fit the task.
        ValueError: Different rows, none, or predictions that are not finite.
    """
    if len(first) != len(second):
        raise ValueError(f"expected predictions of the same rows; found {len(first)} and {len(second)}")
    sides = (first, second)
    scores = [evaluate(metric, task, side.y, side.output, scale=side.scale) for side in sides]
    statistics = [_statistic(metric, task, side) for side in sides]
    count = min(resamples, max(FEWEST, WORK // len(first)))
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        rows = generator.integers(0, len(first), len(first))
        try:
            found.append(statistics[0](rows) - statistics[1](rows))
        except BadTable:
            continue
    if len(found) < count / 2:
        raise BadTable(f"{metric} is undefined for most samples of these {len(first)} rows")
    low, high = np.quantile(found, [SHARE, 1 - SHARE])
    return Difference(scores[0], scores[1], float(low), float(high), len(first))


def _statistic(metric: str, task: TaskType, side: Scored) -> Callable[[NDArray[np.int64]], float]:
    """The score of the rows at some positions."""
    if metric == "auc" and task.is_classification:
        return _auc(side)
    return lambda rows: evaluate(metric, task, side.y[rows], side.output[rows], scale=side.scale)


def _auc(side: Scored) -> Callable[[NDArray[np.int64]], float]:
    """`metrics.auc` of drawn rows; as 32-bit ranks, found once, values are sorted faster."""
    classes = [1] if side.output.shape[1] == 2 else list(range(side.output.shape[1]))
    ranks = {k: np.unique(side.output[:, k], return_inverse=True)[1].reshape(-1).astype(np.int32) for k in classes}

    def score(rows: NDArray[np.int64]) -> float:
        y = side.y[rows]
        if len(present := np.unique(y)) < 2:
            raise BadTable("auc needs rows of at least two classes")
        areas = [roc_area(ranks[k][rows], y == k) for k in classes if len(classes) == 1 or k in present]
        return float(np.mean(areas))

    return score
