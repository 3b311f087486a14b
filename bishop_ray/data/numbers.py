"""Numerical columns: what is learnt of one, and the four ways to hand it to a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.data.columns import is_moment, to_numbers

NUMERIC_KINDS = ("normal", "quantile", "raw", "native")
"""What a model may declare.

* ``normal``: standardised; missing values filled with the median, told apart by an extra 0/1 column.
* ``quantile``: ranks among the training values, mapped to a normal distribution; missing values as ``normal``.
* ``raw``: as they are; missing values as ``normal``.
* ``native``: as they are; missing and infinite values are NaN, no extra column: for models that read NaN.
"""

MAX_QUANTILES = 1000
_MAX_DEVIATIONS = 1e4
"""Standardised values are cut here: no training row of fewer than 10^8 gets so far, a stray request might."""
_EDGE = 1e-7
"""Ranks are cut this far from 0 and 1, where a normal distribution would be infinite (scikit-learn's constant)."""


@dataclass(frozen=True)
class NumericColumn:
    """What was learnt of one numerical column.

    Attributes:
        name: Column name.
        moment: Holds points in time, read as seconds since 1970.
        median: Of the finite training values; fills the missing ones.
        center: Subtracted (mean; 0 when handed over as it is, the earliest training moment for such points in time).
        scale: Divided by (standard deviation; 1 when handed over as it is or constant).
        indicator: Train had missing values: an extra 0/1 column tells them apart.
        quantiles: Of the training values at equal steps of rank; empty unless handed over as "quantile".
    """

    name: str
    moment: bool
    median: float
    center: float
    scale: float
    indicator: bool
    quantiles: tuple[float, ...] = ()


def fit_number(series: pd.Series, numeric: str) -> NumericColumn | None:
    """What is learnt of a column for a kind of `NUMERIC_KINDS`; None for a column without information."""
    moment = is_moment(series)
    values = to_numbers(series, moment)
    finite = values[np.isfinite(values)]
    has_missing = len(finite) < len(values)
    if not len(finite) or (finite.min() == finite.max() and not has_missing):
        return None
    name = str(series.name)
    median = float(np.median(finite / 2) * 2)  # the sum of two middle values near the float64 limit overflows
    if numeric in ("raw", "native"):
        # float32 seconds since 1970 would be two minutes apart
        center = float(finite.min()) if moment else 0.0
        return NumericColumn(name, moment, median, center, 1.0, has_missing and numeric == "raw")
    if numeric == "quantile":
        steps = np.linspace(0, 1, max(2, min(MAX_QUANTILES, len(finite))))
        quantiles = np.maximum.accumulate(np.quantile(finite / 2, steps) * 2)
        return NumericColumn(name, moment, median, 0.0, 1.0, has_missing, tuple(map(float, quantiles)))
    filled = np.where(np.isfinite(values), values, median)
    # squares of values near the float64 limit overflow: take the deviation of the column brought to size 1
    size = float(np.abs(filled).max()) or 1.0
    center, scale = float((filled / size).mean() * size), float((filled / size).std() * size)
    return NumericColumn(name, moment, median, center, scale if scale > 0 else 1.0, has_missing)


def coded_numbers(values: NDArray[np.float64], column: NumericColumn, numeric: str) -> NDArray[np.float32]:
    """(R,) float64 values of a column -> (R,) float32 as the kind `numeric` has them."""
    finite = np.isfinite(values)
    filled = np.where(finite, values, column.median)
    if numeric == "quantile":
        return _normal_ranks(filled, np.asarray(column.quantiles))
    limit = _MAX_DEVIATIONS if numeric == "normal" else float(np.finfo(np.float32).max)
    with np.errstate(over="ignore"):
        coded = np.clip((filled - column.center) / column.scale, -limit, limit).astype(np.float32)
    return np.where(finite, coded, np.float32(np.nan)) if numeric == "native" else coded


def _normal_ranks(values: NDArray[np.float64], quantiles: NDArray[np.float64]) -> NDArray[np.float32]:
    """Ranks among the training values, as standard normal deviates.

    A value that many training rows share gets the middle of its ranks: the mean of the interpolation from both sides,
    as scikit-learn's QuantileTransformer does; unlike there also where that value is the lowest or the highest one.
    """
    from scipy.special import ndtri

    steps = np.linspace(0, 1, len(quantiles))
    left = np.interp(values, quantiles, steps)
    right = 1 - np.interp(-values, -quantiles[::-1], steps)
    ranks: NDArray[Any] = np.clip((left + right) / 2, _EDGE, 1 - _EDGE)
    return np.asarray(ndtri(ranks), np.float32)
