"""Training of estimators: chunks of rounds reported and scored as epochs are.

The tables are read where they lie; what a library makes of them (binned data, joined matrices of numbers and codes) is
its own, one per trial, and not shared between trials.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from bishop_ray.data.table import Table, TaskType
from bishop_ray.errors import TrainingFailed
from bishop_ray.metrics import check_metric, evaluate
from bishop_ray.models.base import Array, Estimator
from bishop_ray.training.results import RoundResult


def fit_estimator(
    model: Estimator,
    train: Table,
    val: Table,
    metric: str,
    on_epoch: Callable[[RoundResult], bool],
    *,
    target_scale: float = 1.0,
) -> RoundResult:
    """Trains `model` in place and leaves it with the number of rounds that scored best on the validation rows.

    Compared are the ends of all chunks and the round where the library's own early stopping (by loss) ends up; among
    equal scores the first.

    Args:
        model: Fresh; threads, device and seed are set.
        train: Training rows.
        val: Validation rows; never trained on.
        metric: The selection metric.
        on_epoch: Called after each chunk and once at the end, then with a stop reason; True asks for a stop.
        target_scale: Units of the target per unit of `y`.

    Returns:
        The last report.

    Raises:
        UserError: The metric does not fit the task.
        TrainingFailed: The library refuses the data or settings, or predicts numbers that are not finite.
    """
    task = model.spec.task
    check_metric(metric, task)
    scale = 1.0 if task.is_classification else target_scale
    reports: list[RoundResult] = []
    began = time.perf_counter()

    def note(rounds: int, prediction: Array) -> RoundResult:
        nonlocal began
        if not np.isfinite(prediction).all():
            raise TrainingFailed(f"round {rounds}: non-finite prediction of validation rows")
        score = evaluate(metric, task, val.y, prediction, scale=scale)
        epoch, now = len(reports) + 1, time.perf_counter()
        result = RoundResult(epoch, rounds, _loss(task, val, prediction), score, score, epoch, rounds, now - began)
        if reports and (last := reports[-1]).best_val_score >= score:
            result = replace(
                result,
                best_val_score=last.best_val_score,
                best_epoch=last.best_epoch,
                best_rounds=last.best_rounds,
            )
        reports.append(result)
        began = now
        return result

    stopped = False

    def on_round(rounds: int, prediction: Array) -> bool:
        nonlocal stopped
        stopped = on_epoch(note(rounds, prediction)) or stopped
        return stopped

    model.fit(train, val, on_round)
    last = note(model.rounds, model.predict(val.x_num, val.x_cat))
    model.rounds = last.best_rounds
    last = replace(last, stop_reason="stopped" if stopped else "finished")
    on_epoch(last)
    return last


def _loss(task: TaskType, val: Table, prediction: Array) -> float:
    if task.is_classification:
        chosen = prediction[np.arange(len(val)), val.y].astype(np.float64)
        return float(-np.log(np.clip(chosen, 1e-15, 1.0)).mean())
    return float(((prediction[:, 0].astype(np.float64) - val.y) ** 2).mean())
