"""Every column as one array of numbers, read once for all checks of an examination."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.data.columns import category_codes, to_numbers
from bishop_ray.data.moments import is_moment
from bishop_ray.data.table import RawDataset


@dataclass(frozen=True)
class Coded:
    """One column.

    Attributes:
        name: Its name.
        dtype: As it came.
        kind: "number", "moment" or "category".
        values: (R,) float64: numbers, seconds, or codes of categories; NaN for missing and infinite values.
        texts: The categories by code; empty for numbers and moments.
        distinct: Different known values.
        infinite: Rows with an infinite value.
    """

    name: str
    dtype: str
    kind: str
    values: NDArray[np.float64]
    texts: tuple[str, ...]
    distinct: int
    infinite: int

    @property
    def missing(self) -> int:
        """Rows without a value, infinite ones not counted."""
        return int(np.isnan(self.values).sum()) - self.infinite

    @property
    def known(self) -> NDArray[np.float64]:
        """The finite values."""
        return self.values[~np.isnan(self.values)]


def coded(raw: RawDataset) -> list[Coded]:
    """The columns of a dataset, in its order.

    Raises:
        BadTable: A column that was taken for numbers holds something else.
    """
    categories = set(raw.categorical)
    return [_category(raw.frame[n]) if n in categories else _number(raw.frame[n]) for n in raw.frame.columns]


def _category(series: pd.Series) -> Coded:
    codes, texts = category_codes(series)
    values = np.where(codes < 0, np.nan, codes.astype(np.float64))
    return Coded(str(series.name), str(series.dtype), "category", values, tuple(texts), len(texts), 0)


def _number(series: pd.Series) -> Coded:
    moment = is_moment(series)
    values = to_numbers(series, moment)
    infinite = np.isinf(values)
    # one bit pattern for all missing values and for both zeros: rows are compared by hash
    clean = np.where(np.isfinite(values), values, np.nan) + 0.0
    distinct = len(pd.unique(clean)) - bool(np.isnan(clean).any())
    return Coded(
        str(series.name), str(series.dtype), "moment" if moment else "number", clean, (), distinct, int(infinite.sum())
    )
