"""How sure a test score is: resampled test rows."""

from __future__ import annotations

import math

import numpy as np

from bishop_ray.errors import BadTable
from bishop_ray.metrics import evaluate
from bishop_ray.reporting.records import Study

RESAMPLES = 500
"""Of the bootstrap (Efron and Tibshirani 1993, percentile interval)."""


def interval(study: Study, resamples: int = RESAMPLES) -> tuple[float, float, int]:
    """The 95 % percentile interval of a training's test score, and the rows it is from; NaN, NaN, 0 if unknown.

    Resamples on which the metric is undefined (one class only) are left out. Scores are larger-is-better.
    """
    kept = study.test
    if kept is None or len(kept.y) < 2:
        return math.nan, math.nan, 0
    y = kept.y.astype(np.int64) if study.task.is_classification else kept.y
    random = np.random.default_rng(0)
    scores = []
    for _ in range(resamples):
        rows = random.integers(0, len(y), len(y))
        try:
            scores.append(evaluate(study.metric, study.task, y[rows], kept.output[rows]))
        except BadTable:
            continue
    if not scores:
        return math.nan, math.nan, 0
    low, high = np.quantile(scores, [0.025, 0.975])
    return float(low), float(high), len(y)
