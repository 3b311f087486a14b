"""Encoding of numeric columns: quantile transform, standardisation, missing values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.data.columns import to_numbers
from bishop_ray.data.datetimes import PARTS, calendar, is_moment

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
        part: Of a column of points in time: one of `moments.PARTS`, or "" for the time elapsed.
    """

    name: str
    moment: bool
    median: float
    center: float
    scale: float
    indicator: bool
    quantiles: tuple[float, ...] = ()
    part: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        plain = asdict(self) | {"quantiles": list(self.quantiles)}
        return plain if self.part else {key: value for key, value in plain.items() if key != "part"}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> NumericColumn:
        """The inverse of `to_dict`."""
        column = cls(**data | {"quantiles": tuple(data.get("quantiles", ()))})
        if column.part not in ("", *PARTS):
            raise ValueError(f"no part of the calendar: {column.part!r}")
        return column


def fit_numbers(series: pd.Series, numeric: str) -> list[NumericColumn]:
    """What is learnt of a column for a kind of `NUMERIC_KINDS`; empty for a column without information.

    A column of points in time gives the time elapsed and those parts of the calendar that vary.
    """
    name, moment = str(series.name), is_moment(series)
    values = to_numbers(series, moment)
    first = _fit(name, values, numeric, moment)
    if first is None:
        return []
    parts = [_fit(name, calendar(values, part), numeric, moment, part) for part in PARTS if moment]
    return [first, *(column for column in parts if column is not None)]


def _fit(name: str, values: NDArray[np.float64], numeric: str, moment: bool, part: str = "") -> NumericColumn | None:
    finite = values[np.isfinite(values)]
    # the column of the time elapsed tells the missing ones for all its parts
    has_missing = len(finite) < len(values) and not part
    if not len(finite) or (finite.min() == finite.max() and not has_missing):
        return None
    median = float(np.median(finite / 2) * 2)  # the sum of two middle values near the float64 limit overflows
    if numeric in ("raw", "native"):
        # float32 seconds since 1970 would be two minutes apart
        center = float(finite.min()) if moment and not part else 0.0
        return NumericColumn(name, moment, median, center, 1.0, has_missing and numeric == "raw", (), part)
    if numeric == "quantile":
        steps = np.linspace(0, 1, max(2, min(MAX_QUANTILES, len(finite))))
        quantiles = np.maximum.accumulate(np.quantile(finite / 2, steps) * 2)
        return NumericColumn(name, moment, median, 0.0, 1.0, has_missing, tuple(map(float, quantiles)), part)
    filled = np.where(np.isfinite(values), values, median)
    # squares of values near the float64 limit overflow: take the deviation of the column brought to size 1
    size = float(np.abs(filled).max()) or 1.0
    center, scale = float((filled / size).mean() * size), float((filled / size).std() * size)
    return NumericColumn(name, moment, median, center, scale if scale > 0 else 1.0, has_missing, (), part)


def values_of(column: NumericColumn, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """What `column` holds, (R,), of the `values` read from its column of a frame."""
    return calendar(values, column.part) if column.part else values


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
