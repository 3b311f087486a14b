"""Greedy ensemble selection with cross-fitted scores.

Each metric needs only some additive part of the predictions, and none needs scikit-learn's checks. The results are
those of ``metrics.evaluate`` for the mean prediction; a metric that has no entry here goes through ``evaluate`` itself.
Letters: R rows, K classes, Q numbers per row that a metric needs.

Greedy forward selection with replacement (Caruana, Niculescu-Mizil, Crew and Ksikes, "Ensemble selection from libraries
of models", ICML 2004) over the members' predictions of the validation rows. Deterministic.
Letters: R validation rows, K outputs (1 for regression), M members.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bishop_ray.data.table import TaskType
from bishop_ray.errors import BadTable, UserError
from bishop_ray.metrics import Metric, check_metric, evaluate, in_units, mae, r2, rmse, roc_area
from bishop_ray.predictor.ensemble_predictor import combine

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
    positive = [y == k for k in used]

    def score(total: Floats, _: int) -> float:
        return float(np.mean([roc_area(values, flags) for values, flags in zip(total, positive, strict=True)]))

    return RunningScore(lambda prediction: np.ascontiguousarray(prediction.T[used], dtype=np.float64), score)


logger = logging.getLogger(__name__)
STEPS = 50
TOP_K = 5
FOLDS = 5
Weights = dict[int, float]
"""Position of a member -> its weight, only those that have one; positive, sum 1."""


@dataclass(frozen=True)
class Member:
    """A trained model that an ensemble may take.

    Attributes:
        family: Name of its model in the registry.
        key: What the caller knows it by.
        score: Its validation score, larger is better.
    """

    family: str
    key: str
    score: float


@dataclass(frozen=True)
class CrossFitted:
    """An ensemble on rows that did not choose its weights.

    Attributes:
        score: Larger is better.
        pooled: (R, K) predictions of all folds.
    """

    score: float
    pooled: NDArray[np.float64] = field(repr=False, compare=False)


def select(
    members: Sequence[Member],
    predictions: Sequence[NDArray[np.float32]],
    y: NDArray[Any],
    metric: str,
    task: TaskType,
    scale: float = 1.0,
    *,
    top_k: int = TOP_K,
    steps: int = STEPS,
) -> Weights:
    """The weights of the best ensemble that greedy selection passes through.

    Of every family the `top_k` members with the best score take part. Each step adds the member that gives the mean
    prediction the best score; among equals one that is in the ensemble already, then the earlier one. The result is the
    best of the ensembles after 1, 2, ... `steps` steps; among equals the one with fewer members, then fewer steps.
    Members whose score or predictions are not all finite take no part.

    Args:
        members: M members.
        predictions: Per member (R, K): probabilities, or the standardised target, of one and the same target coder.
        y: (R,) class indices, or the standardised target.
        metric: A name that ``metrics.find_metric`` knows.
        task: The task type.
        scale: As in ``metrics.evaluate``.
        top_k: Members per family.
        steps: Members drawn.

    Raises:
        UserError: No member has finite predictions, or the metric does not fit the task.
        BadTable: The metric is undefined for these rows.
        ValueError: Shapes do not fit, `top_k` or `steps` below 1.
    """
    usable = _usable(members, predictions, y, top_k, steps)
    scores = {i: members[i].score for i in usable}
    scorer = running_score(metric, task, y, scale)
    return _greedy(_best_of_families(members, scores, top_k), predictions, scorer, steps)


def cross_fitted(
    members: Sequence[Member],
    predictions: Sequence[NDArray[np.float32]],
    y: NDArray[Any],
    metric: str,
    task: TaskType,
    scale: float = 1.0,
    *,
    top_k: int = TOP_K,
    steps: int = STEPS,
    folds: int = FOLDS,
    seed: int = 0,
) -> CrossFitted:
    """What an ensemble is worth on rows that did not choose its weights.

    For each fold everything that `select` decides, the best of each family included, is decided on the other folds'
    rows; the score is one `evaluate` over the pooled predictions of all folds. AUC and its kind rank rows, and
    the outputs of two folds' ensembles are not on one scale: they are means over the folds, unless a fold lacks a
    class. Where the metric is undefined on the other folds (AUC where they hold one class), they choose by log loss
    (RMSE).

    Args:
        members: As in `select`.
        predictions: As in `select`.
        y: As in `select`.
        metric: As in `select`.
        task: As in `select`.
        scale: As in `select`.
        top_k: As in `select`.
        steps: As in `select`.
        folds: Parts of the rows; fewer where there are fewer rows.
        seed: Of the assignment of rows to folds, which is stratified for classification.

    Raises:
        UserError: As `select`.
        BadTable: As `select`, or fewer than two rows.
        ValueError: As `select`.
    """
    usable = _usable(members, predictions, y, top_k, steps)
    if len(y) < 2:
        raise BadTable(f"an ensemble needs at least two validation rows; found {len(y)}")
    fold = fold_of_rows(y, task, min(folds, len(y)), seed)
    pooled = np.empty((len(y), predictions[usable[0]].shape[1]), np.float64)
    for number in range(int(fold.max()) + 1):
        inside, outside = np.flatnonzero(fold == number), np.flatnonzero(fold != number)
        seen = {i: predictions[i][outside] for i in usable}
        try:
            scorer = running_score(metric, task, y[outside], scale)
            scores = {i: scorer.score(scorer.part(seen[i]), 1) for i in usable}
        except BadTable:
            scorer = running_score("log_loss" if task.is_classification else "rmse", task, y[outside], scale)
            scores = {i: scorer.score(scorer.part(seen[i]), 1) for i in usable}
        weights = _greedy(_best_of_families(members, scores, top_k), seen, scorer, steps)
        parts = [predictions[i][inside] for i in weights]
        pooled[inside] = combine(parts, list(weights.values()), task.is_classification)
    return CrossFitted(_scored(metric, task, y, pooled, fold, scale), pooled)


def _scored(
    metric: str, task: TaskType, y: NDArray[Any], pooled: NDArray[np.float64], fold: NDArray[np.int64], scale: float
) -> float:
    """Every fold's rows scored: at once, or of a ranking metric fold by fold, see `cross_fitted`."""
    numbers, sizes = np.unique(fold, return_counts=True)
    whole = len(np.unique(y))
    if not check_metric(metric, task).ranks or any(len(np.unique(y[fold == number])) < whole for number in numbers):
        return evaluate(metric, task, y, pooled, scale=scale)
    scores = [evaluate(metric, task, y[fold == number], pooled[fold == number]) for number in numbers]
    return float(np.average(scores, weights=sizes))


def fold_of_rows(y: NDArray[Any], task: TaskType, folds: int, seed: int) -> NDArray[np.int64]:
    """The fold of every row (R,), 0 to folds - 1: sizes differ by one at most, and so do each class's counts."""
    order = np.random.default_rng(seed).permutation(len(y))
    if task.is_classification:
        order = order[np.argsort(y[order], kind="stable")]
    fold = np.empty(len(y), np.int64)
    fold[order] = np.arange(len(y)) % folds
    return fold


def _usable(
    members: Sequence[Member], predictions: Sequence[NDArray[Any]], y: NDArray[Any], top_k: int, steps: int
) -> list[int]:
    """Positions of the members with finite predictions."""
    if top_k < 1 or steps < 1:
        raise ValueError(f"top_k and steps must be at least 1; found {top_k} and {steps}")
    if len(members) != len(predictions):
        raise ValueError(f"expected one prediction per member; found {len(predictions)} for {len(members)} members")
    shapes = {prediction.shape for prediction in predictions}
    if len(shapes) > 1 or any(len(shape) != 2 or shape[0] != len(y) for shape in shapes):
        raise ValueError(f"expected predictions of one shape ({len(y)}, K); found {sorted(shapes)}")
    good = [
        i
        for i, (member, prediction) in enumerate(zip(members, predictions, strict=True))
        if np.isfinite(member.score) and np.isfinite(prediction).all()
    ]
    if not good:
        raise UserError(f"ensemble: none of {len(members)} members has a finite score and finite predictions")
    if len(good) < len(members):
        logger.info("ensemble: left out %d members whose predictions are not finite", len(members) - len(good))
    return good


def _best_of_families(members: Sequence[Member], scores: dict[int, float], top_k: int) -> list[int]:
    """Positions, ascending, of the `top_k` best of each family; the earlier one among equals."""
    families: dict[str, list[int]] = defaultdict(list)
    for i in scores:
        families[members[i].family].append(i)
    best = [sorted(family, key=lambda i: (-scores[i], i))[:top_k] for family in families.values()]
    return sorted(i for family in best for i in family)


def _greedy(
    candidates: Sequence[int],
    predictions: Sequence[NDArray[Any]] | dict[int, NDArray[Any]],
    scorer: RunningScore,
    steps: int,
) -> Weights:
    parts = {i: scorer.part(predictions[i]) for i in candidates}
    total = np.zeros_like(parts[candidates[0]])
    candidate_total = np.empty_like(total)
    chosen: list[int] = []
    best: tuple[float, int, int] | None = None
    for step in range(1, steps + 1):
        ranked = []
        for i, part in parts.items():
            np.add(total, part, out=candidate_total)
            ranked.append((scorer.score(candidate_total, step), i in chosen, -i))
        score, _, negative = max(ranked)
        chosen.append(-negative)
        total += parts[-negative]
        found = (score, -len(set(chosen)), -step)
        best = found if best is None else max(best, found)
    assert best is not None
    counts = Counter(chosen[: -best[2]])
    return {i: count / sum(counts.values()) for i, count in sorted(counts.items())}
