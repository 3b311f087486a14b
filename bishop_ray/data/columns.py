"""A pandas column of any dtype as plain numbers or as category texts.

The same value must read the same whatever dtype it arrives in: at fit a CSV, at predict JSON, Parquet or a database.
"""

from __future__ import annotations

import datetime
import numbers as abstract
import re
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.data.datetimes import column_seconds, is_blank, seconds_of
from bishop_ray.errors import BadTable

_WHOLE = re.compile(r"(-?(?:0|[1-9]\d*))\.0+")


def is_number(series: pd.Series) -> bool:
    """Whether the dtype is a number or a duration; booleans are not."""
    dtype = series.dtype
    numeric = pd.api.types.is_numeric_dtype(dtype) and not pd.api.types.is_bool_dtype(dtype)
    return bool(numeric or getattr(dtype, "kind", "") == "m")


def canonical_text(value: Any) -> str | None:
    """The one text of a category value; None for a missing one.

    `1`, `1.0`, `np.int64(1)`, `"1"` and `"1.0"` agree, so do `True` and `"True"`, and a float32 with the float64 of
    the same digits. `"01"` stays itself: zip codes are no numbers.
    """
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    if isinstance(value, bool | np.bool_):
        return "True" if value else "False"
    if isinstance(value, abstract.Integral):
        return str(int(value))
    if isinstance(value, float | np.floating):
        if np.isnan(value):
            return None
        # str() gives the shortest digits of the value's own width: float32 0.1 reads as 0.1.
        number = float(str(value))
        return str(int(number)) if number.is_integer() else repr(number)
    if isinstance(value, datetime.date):
        return value.isoformat()
    text = str(value)
    whole = _WHOLE.fullmatch(text)
    if whole is None:
        return text
    return "0" if whole[1] == "-0" else whole[1]  # not through int(), which refuses thousands of digits


def category_codes(series: pd.Series) -> tuple[NDArray[np.int64], list[str]]:
    """Codes (R,) into a list of distinct canonical texts in order of appearance; -1 for missing values."""
    codes, values = _factorize(series)
    texts: dict[str, int] = {}
    lookup = np.full(len(values) + 1, -1, np.int64)  # the last entry answers code -1
    for position, value in enumerate(values):
        text = canonical_text(value)
        if text is not None:
            lookup[position] = texts.setdefault(text, len(texts))
    return lookup[codes], list(texts)


def _factorize(series: pd.Series) -> tuple[NDArray[np.int64], list[Any]]:
    if isinstance(series.dtype, pd.CategoricalDtype):
        codes = series.cat.codes.to_numpy().astype(np.int64)
        present = np.zeros(len(series.cat.categories) + 1, bool)
        present[codes] = True
        values = [value if seen else None for value, seen in zip(series.cat.categories, present[:-1], strict=True)]
        return codes, values
    if series.dtype != np.dtype(object):
        codes, uniques = pd.factorize(series)
        return codes.astype(np.int64), list(uniques)
    # pandas would merge True with 1 in an object column, and cannot hash lists: by type and text instead.
    positions: dict[tuple[type, str], int] = {}
    values = []
    codes = np.empty(len(series), np.int64)
    for row, value in enumerate(series):
        key = (type(value), str(value))
        if key not in positions:
            positions[key] = len(values)
            values.append(value)
        codes[row] = positions[key]
    return codes, values


def to_numbers(series: pd.Series, moment: bool = False) -> NDArray[np.float64]:
    """The column as float64 (R,): NaN for missing values, infinities as they are, booleans 0/1, durations in seconds.

    Args:
        series: Any dtype; text is read as numbers, blank text is missing.
        moment: The column holds points in time: seconds since 1970-01-01 (UTC); text is read as `moments` has it.

    Raises:
        BadTable: A value that is no number (no point in time); the message names column and value.
    """
    dtype = series.dtype
    if not series.notna().any():
        return np.full(len(series), np.nan)
    if isinstance(dtype, pd.CategoricalDtype):
        return to_numbers(series.astype(object), moment)
    if moment and (seconds := column_seconds(series)) is not None:
        return seconds
    if not moment and pd.api.types.is_timedelta64_dtype(dtype):
        return np.asarray(series.dt.total_seconds().to_numpy(np.float64, na_value=np.nan))
    if not moment and pd.api.types.is_numeric_dtype(dtype) and not pd.api.types.is_complex_dtype(dtype):
        return np.asarray(series.to_numpy(np.float64, na_value=np.nan))
    read = _read_moment if moment else _read_number
    return np.array([read(value, series.name) for value in series], np.float64)


def _is_missing(value: Any) -> bool:
    if value is None or value is pd.NA or value is pd.NaT:
        return True
    return (isinstance(value, float | np.floating) and bool(np.isnan(value))) or (
        isinstance(value, str) and not value.strip()
    )


def _read_number(value: Any, column: object) -> float:
    if _is_missing(value):
        return np.nan
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    try:
        # float() would read "1_000" as a thousand
        if isinstance(value, complex | np.complexfloating) or (isinstance(value, str) and "_" in value):
            raise ValueError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise BadTable(f"column {column!r}: expected a number; found {_short(value)}") from None


def _read_moment(value: Any, column: object) -> float:
    if is_blank(value):
        return np.nan
    try:
        return seconds_of(value)
    except (ValueError, OverflowError):
        pass
    try:
        # ISO 8601 has more forms than a column is taken for dates by: 20240131, 2024-W05-3
        return seconds_of(datetime.datetime.fromisoformat(value))
    except (TypeError, ValueError, OverflowError):
        raise BadTable(f"column {column!r}: expected a date or time; found {_short(value)}") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
