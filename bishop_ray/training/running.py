"""Scores of growing sums of predictions, fast enough for the thousands that an ensemble's selection asks for.

Each metric needs only some additive part of the predictions, and none needs scikit-learn's checks. The results are
those of ``metrics.evaluate`` for the mean prediction; a metric that has no entry here goes through ``evaluate`` itself.
Letters: R rows, K classes, Q numbers per row that a metric needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bishop_ray.data.table import TaskType
from bishop_ray.errors import BadTable
from bishop_ray.metrics import Metric, check_metric, evaluate, in_units, mae, r2, rmse

Floats = NDArray[np.float64]
Classes = NDArray[np.int64]


class RunningScore(NamedTuple):
    """A metric over sums of predictions.

    Attributes:
        part: (R, K) of one model -> (Q, R) float64, what is summed.
        score: (sum (Q, R), number of summands) -> score of the mean, larger is better.
    """

    part: Callable[[NDArray[Any]], Floats]
    score: Callable[[Floats, int], float]


def running_score(metric: str, task: TaskType, y: NDArray[Any], scale: float = 1.0) -> RunningScore:
    """The running form of a metric on these rows.

    Args:
        metric: A name that ``metrics.find_metric`` knows.
        task: The task type.
        y: (R,) class indices, or the standardised target.
        scale: As in ``metrics.evaluate``.

    Raises:
        UnknownName: No such metric.
        UserError: The metric does not fit the task.
        BadTable: The metric is undefined for these rows (`auc` of one class), whatever is predicted.
    """
    row = check_metric(metric, task)
    if row.needs == "values":
        return _values(metric, row, y, scale)
    classes = y.astype(np.int64)
    if metric == "auc":
        return _auc(classes, binary=task is TaskType.BINARY)
    if metric == "log_loss":
        return _log_loss(classes)
    if metric in ("accuracy", "balanced_accuracy", "f1"):
        return _labels(metric, classes, binary=task is TaskType.BINARY)
    return _any_classes(metric, task, y)


def _transposed(prediction: NDArray[Any]) -> Floats:
    return np.ascontiguousarray(prediction.T, dtype=np.float64)


def _values(metric: str, row: Metric, y: NDArray[Any], scale: float) -> RunningScore:
    function = {"r2": r2, "rmse": rmse, "mae": mae}.get(metric, row.function)
    sign = 1.0 if row.larger_is_better else -1.0
    true = in_units(row, y, scale)
    return RunningScore(
        lambda prediction: prediction.reshape(1, -1).astype(np.float64),
        lambda total, n: sign * function(true, in_units(row, total[0] / n, scale)),
    )


def _any_classes(metric: str, task: TaskType, y: NDArray[Any]) -> RunningScore:
    """Through `evaluate`: how many classes there are, only predictions tell."""

    def part(prediction: NDArray[Any]) -> Floats:
        evaluate(metric, task, y, prediction)  # undefined on these rows: said before anything is selected
        return _transposed(prediction)

    return RunningScore(part, lambda total, n: evaluate(metric, task, y, total.T / n))


def _log_loss(y: Classes) -> RunningScore:
    rows = np.arange(len(y))

    def part(prediction: NDArray[Any]) -> Floats:
        return np.stack([prediction[rows, y].astype(np.float64), prediction.sum(axis=1, dtype=np.float64)])

    def score(total: Floats, _: int) -> float:
        return float(np.mean(np.log(np.clip(total[0] / total[1], 1e-15, 1.0))))

    return RunningScore(part, score)


def _labels(metric: str, y: Classes, binary: bool) -> RunningScore:
    """Metrics of the likeliest class; a sum has the same one as its mean."""

    def score(total: Floats, _: int) -> float:
        labels = _likeliest(total)
        if metric == "accuracy":
            return float(np.mean(y == labels))
        k = len(total)
        table = np.bincount(y * k + labels, minlength=k * k).reshape(k, k)
        right, true, told = np.diagonal(table), table.sum(axis=1), table.sum(axis=0)
        if metric == "balanced_accuracy":
            return float(np.mean(right[true > 0] / true[true > 0]))
        seen = np.array([False, True]) if binary else true + told > 0
        return float(np.mean(2 * right[seen] / np.maximum((true + told)[seen], 1)))

    return RunningScore(_transposed, score)


def _likeliest(total: Floats) -> Classes:
    """(K, R) -> (R,) index of the largest, the first one among equals; three times as fast as argmax over axis 0."""
    best, labels = total[0], np.zeros(total.shape[1], np.int64)
    for k in range(1, len(total)):
        labels[total[k] > best] = k
        best = np.maximum(best, total[k])
    return labels


def _auc(y: Classes, binary: bool) -> RunningScore:
    present = np.unique(y)
    if len(present) < 2:
        raise BadTable(f"auc needs rows of at least two classes; found {len(y)} rows of {len(present)} class(es)")
    used = np.array([1]) if binary else present
    positive = [(y == k).astype(np.int64) for k in used]

    def score(total: Floats, _: int) -> float:
        return float(np.mean([_area(values, flags) for values, flags in zip(total, positive, strict=True)]))

    return RunningScore(lambda prediction: np.ascontiguousarray(prediction.T[used], dtype=np.float64), score)


def _area(values: Floats, positive: Classes) -> float:
    """Area under the ROC curve of non-negative values (R,): the share of pairs in the right order, ties a half.

    Sorting is all the cost, and sorting numbers is several times faster than sorting positions: the lowest bit of each
    value is given up for its class. Sums of a few dozen float32 probabilities leave that bit of a float64 unused.
    """
    keys = (values + 0.0).view(np.int64)  # non-negative doubles are ordered as their bits are; + 0.0 turns -0.0
    keys = (keys & ~1) | positive
    keys.sort()
    flags = keys & 1
    places = np.flatnonzero(flags)
    negatives = len(flags) - len(places)
    # Negatives before each positive; equal values have their negatives first, so all of these count as before.
    pairs = float(places.sum() - len(places) * (len(places) - 1) // 2)
    new = (keys[1:] >> 1) != (keys[:-1] >> 1)
    if not new.all():
        starts = np.concatenate([[0], np.flatnonzero(new) + 1])
        ones = np.diff(np.searchsorted(places, starts), append=0)
        ones[-1] += len(places)
        sizes = np.diff(starts, append=len(flags))
        pairs -= float((ones * (sizes - ones)).sum()) / 2
    return pairs / (len(places) * negatives)
