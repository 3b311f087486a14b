"""Date parsing and calendar features.

A text is a date only where nobody could read it in two ways: ISO 8601 (https://www.iso.org/iso-8601-date-and-time-format.html),
day.month.year, English month names. ``01/02/2024`` is two dates, ``2020`` a number, ``2024-01`` may be a version.
"""

from __future__ import annotations

import datetime
import re
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

PARTS = ("year", "month", "day", "weekday", "hour")
"""What stands beside the elapsed time; weekday 0 is Monday, all in UTC."""
NEARLY_ALL = 0.99
"""Share of dates among a column's known values from which it is a column of dates; the rest is taken as missing."""
_MONTHS = {
    name: number
    for number, names in enumerate(
        (
            "jan january", "feb february", "mar march", "apr april", "may", "jun june", "jul july", "aug august",
            "sep sept september", "oct october", "nov november", "dec december",
        ),
        start=1,
    )
    for name in names.split()
}  # fmt: skip
_DAYS = r"(?:(?:mon|tue|tues|wed|thu|thur|thurs|fri|sat|sun)(?:day|nesday|rsday|urday)?\.?,?\s+)?"
_NAME = r"(?P<name>[a-z]{3,9})\.?"
_TIME = (
    r"(?:(?:t|,?\s+)(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2}(?:[.,]\d{1,9})?))?"
    r"(?:\s?(?P<half>[ap])m)?(?:\s?(?:z|utc|gmt|(?P<sign>[+-])(?P<zh>\d{2}):?(?P<zm>\d{2})?))?)?"
)
_FORMS = tuple(
    re.compile(date + _TIME, re.ASCII)
    for date in (
        r"(?P<year>\d{4})(?P<mark>[-/])(?P<month>\d{2})(?P=mark)(?P<day>\d{2})",
        r"(?P<day>\d{1,2})\.(?P<month>\d{1,2})\.(?P<year>\d{4})",
        _DAYS + rf"(?P<day>\d{{1,2}})(?:\s+|-){_NAME}(?:\s+|-|,\s*)(?P<year>\d{{4}})",
        _DAYS + rf"{_NAME}\s+(?P<day>\d{{1,2}})(?:,\s*|\s+)(?P<year>\d{{4}})",
    )
)
_TWO_WAYS = re.compile(r"\d{1,2}([-/])\d{1,2}\1(\d{4}|\d{2})(?!\d).*", re.ASCII)
_NOTHING = {"", "nan", "nat", "none", "null", "na", "n/a", "<na>"}
_ZERO = re.compile(r"0000-00-00([T ]00:00:00.*)?")
_EPOCH = datetime.date(1970, 1, 1).toordinal()
_LIMIT = 1e15
"""Seconds, some 30 million years: beyond it the calendar's arithmetic would overflow."""


def is_moment(series: pd.Series) -> bool:
    """Whether the dtype is one of points in time: datetime64, with or without time zone, Arrow's dates, periods."""
    dtype = series.dtype
    return bool(pd.api.types.is_datetime64_any_dtype(dtype) or isinstance(dtype, pd.PeriodDtype))


def is_text(series: pd.Series) -> bool:
    """Whether the dtype is one of texts, or of Python objects."""
    dtype = series.dtype
    if isinstance(dtype, pd.ArrowDtype):
        return dtype.kind in "OU"
    return isinstance(dtype, pd.StringDtype) or bool(dtype == np.dtype(object))


def is_blank(value: Any) -> bool:
    """Whether a value, or a text, says that there is no date."""
    if value is None or value is pd.NA or value is pd.NaT:
        return True
    if isinstance(value, str):
        text = value.strip()
        return text.lower() in _NOTHING or bool(_ZERO.fullmatch(text))
    if isinstance(value, np.datetime64):
        return bool(np.isnat(value))
    return isinstance(value, float | np.floating) and bool(np.isnan(value))


def seconds_of(value: Any) -> float:
    """Seconds since 1970-01-01 in UTC of a date, time or text; naive ones count as UTC.

    Raises:
        ValueError: It is none.
    """
    if isinstance(value, str):
        return _of_text(value.strip().lower())
    if isinstance(value, pd.Period):
        value = value.to_timestamp()
    if isinstance(value, datetime.date):  # datetime and Timestamp are dates too
        stamp = pd.Timestamp(value)
        naive = stamp if stamp.tzinfo is None else stamp.tz_convert("UTC").tz_localize(None)
        value = naive.to_datetime64()
    if not isinstance(value, np.datetime64):
        raise ValueError("no date or time")
    return float(seconds_of_array(np.array([value]))[0])


def seconds_of_array(values: NDArray[Any]) -> NDArray[np.float64]:
    """Seconds since 1970 (R,) of datetime64 values of any unit; NaN for missing ones."""
    fine = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
    unit, count = np.datetime_data(values.dtype)
    if unit not in fine or count != 1:
        values, unit = values.astype("datetime64[s]"), "s"
    found = values.astype(np.int64) / fine[unit]
    return np.where(np.isnat(values), np.nan, found)


def column_seconds(series: pd.Series) -> NDArray[np.float64] | None:
    """As `seconds_of_array` for a column of numpy's datetimes, with or without time zone; None for other columns."""
    dtype = series.dtype
    if isinstance(dtype, pd.DatetimeTZDtype):
        series = series.dt.tz_convert("UTC").dt.tz_localize(None)
    elif not (isinstance(dtype, np.dtype) and dtype.kind == "M"):
        return None
    return seconds_of_array(series.to_numpy())


def calendar(seconds: NDArray[np.float64], part: str) -> NDArray[np.float64]:
    """One of `PARTS` of points in time (R,), in UTC; NaN stays NaN."""
    known = np.isfinite(seconds)
    moments = np.floor(np.where(known, np.clip(seconds, -_LIMIT, _LIMIT), 0.0)).astype("datetime64[s]")
    days, months = moments.astype("datetime64[D]"), moments.astype("datetime64[M]")
    if part == "year":
        found = months.astype(np.int64) // 12 + 1970
    elif part == "month":
        found = months.astype(np.int64) % 12 + 1
    elif part == "day":
        found = (days - months.astype("datetime64[D]")).astype(np.int64) + 1
    elif part == "weekday":
        found = (days.astype(np.int64) + 3) % 7  # 1970 began on a Thursday
    elif part == "hour":
        found = moments.astype(np.int64) // 3600 % 24
    else:
        raise ValueError(f"no part of the calendar: {part!r}")
    return np.where(known, found, np.nan)


def as_dates(series: pd.Series) -> tuple[pd.Series, list[Any]] | None:
    """A column of dates or date texts as datetime64, and its values that are none (missing in it); else None.

    Args:
        series: Any dtype. It is a column of dates if nearly all known values are (`NEARLY_ALL`).
    """
    if isinstance(series.dtype, pd.CategoricalDtype):
        series = series.astype(object)
    if not is_text(series):
        return None
    read: dict[Any, float | None] = {}
    found, bad, known = np.full(len(series), np.nan), [], 0
    for row, value in enumerate(series):
        if is_blank(value):
            continue
        if not isinstance(value, str | datetime.date | np.datetime64 | pd.Period):
            return None
        if value not in read:
            read[value] = _try(value)
        known += 1
        seconds = read[value]
        if seconds is None:
            bad.append(value)
            if len(bad) > 10 and len(bad) > (1 - NEARLY_ALL) * len(series):
                return None
        else:
            found[row] = seconds
    if not known or len(bad) > (1 - NEARLY_ALL) * known:
        return None
    micro = np.full(len(found), np.datetime64("NaT", "us"))
    good = np.isfinite(found)
    micro[good] = np.round(found[good] * 1e6).astype(np.int64).astype("datetime64[us]")
    return pd.Series(micro, index=series.index, name=series.name), bad


def reads_two_ways(series: pd.Series) -> str:
    """A value of a text column that is all day/month/year or month/day/year, nobody knows which; or ""."""
    if not is_text(series):
        return ""
    first = ""
    for value in series:
        if not is_blank(value):
            if not isinstance(value, str) or not _TWO_WAYS.fullmatch(value.strip()):
                return ""
            first = first or value
    return first


def _try(value: Any) -> float | None:
    try:
        return seconds_of(value)
    except (ValueError, OverflowError):
        return None


def _of_text(text: str) -> float:
    for form in _FORMS:
        if match := form.fullmatch(text):
            return _of_match(match.groupdict())
    raise ValueError("no date or time")


def _of_match(found: dict[str, str | None]) -> float:
    """Seconds since 1970 of the pieces of a text; ValueError where there is no such day or hour."""
    month = _MONTHS.get(found["name"] or "", 0) if "name" in found else int(found["month"] or 0)
    days = datetime.date(int(found["year"] or 0), month, int(found["day"] or 0)).toordinal() - _EPOCH
    if found["hour"] is None:
        return float(days * 86400)
    hour, minute = int(found["hour"]), int(found["minute"] or 0)
    second = float((found["second"] or "0").replace(",", "."))
    if found["half"]:
        if not 1 <= hour <= 12:
            raise ValueError("no such hour")
        hour = hour % 12 + (12 if found["half"] == "p" else 0)
    # 24:00 ends a day and 23:59:60 a leap second
    if minute > 59 or second >= 61 or hour > 24 or (hour == 24 and (minute or second)):
        raise ValueError("no such time")
    zone = (int(found["zh"] or 0) * 3600 + int(found["zm"] or 0) * 60) * (-1 if found["sign"] == "-" else 1)
    return days * 86400 + hour * 3600 + minute * 60 + second - zone
