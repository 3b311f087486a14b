"""Findings of a table's examination and the report that holds them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.data.columns import category_codes, to_numbers
from bishop_ray.data.datetimes import is_moment
from bishop_ray.data.table import RawDataset

DROPPED, ENCODED, REFUSED, NOTED, WARNED = "dropped", "encoded", "refused", "noted", "warned"
"""What will be done: rows or columns left out; a column handed to models all the same; the table not trained on;
nothing, it is only said; nothing either, but scores will mislead until a person has looked."""
_MOST_NAMES = 5
_LONGEST = 40


@dataclass(frozen=True)
class Finding:
    """One thing to know of a table.

    Attributes:
        kind: What it is, e.g. "constant", "leak".
        column: The column, or several of them in one text; "" for the table as a whole.
        detail: What was found, in words and numbers.
        action: One of `DROPPED`, `ENCODED`, `REFUSED`, `NOTED`, `WARNED`.
    """

    kind: str
    column: str
    detail: str
    action: str

    def line(self) -> str:
        """The finding as one line."""
        return f"{self.kind}: {self.column + ': ' if self.column else ''}{self.detail}"


@dataclass(frozen=True)
class ColumnFacts:
    """A feature column in numbers.

    Attributes:
        name: Its name.
        dtype: As it came.
        read_as: "number", "moment", "category" (`Preprocessor.schema`), "dropped"; "" when the table is refused.
        distinct: Different known values.
        missing: Rows without a value.
        infinite: Rows with an infinite one.
    """

    name: str
    dtype: str
    read_as: str
    distinct: int
    missing: int
    infinite: int


@dataclass(frozen=True)
class TableReport:
    """What is known of a table.

    Attributes:
        name: The table's name.
        target: Its target column.
        task: "binary", "multiclass", "regression", or "" when it could not be told.
        rows: Rows that can be trained and scored on: those with a target.
        classes: Label and count of each class, the largest first; empty for a regression.
        columns: Facts of the feature columns, as far as the examination got.
        findings: What was found.
        refused: The line with which a search ends at once, or "".
    """

    name: str
    target: str
    task: str = ""
    rows: int = 0
    classes: tuple[tuple[str, int], ...] = ()
    columns: tuple[ColumnFacts, ...] = ()
    findings: tuple[Finding, ...] = ()
    refused: str = ""

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that a person must look at."""
        return tuple(finding for finding in self.findings if finding.action == WARNED)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def shown(name: str) -> str:
    """A name as a line can carry it: quoted when it is blank, padded or has control characters; cut when long."""
    text = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 3]}..."
    return text if text.isprintable() and text and text == text.strip() else repr(text)


def listed(names: Iterable[str]) -> str:
    """Several names as one text, the first few of many."""
    every = list(names)
    more = f" and {len(every) - _MOST_NAMES:,} more" if len(every) > _MOST_NAMES else ""
    return ", ".join(shown(name) for name in every[:_MOST_NAMES]) + more


def shortened(findings: Sequence[Finding], most: int = _MOST_NAMES) -> list[Finding]:
    """At most `most` findings of a kind, then one that counts the rest: no flood for a wide table."""
    kept: list[Finding] = []
    for kind in dict.fromkeys(finding.kind for finding in findings):
        same = [finding for finding in findings if finding.kind == kind]
        kept += same if len(same) <= most + 1 else same[:most]
        if len(same) > most + 1:
            rest = listed(finding.column for finding in same[most:])
            kept.append(Finding(kind, rest, f"{len(same) - most:,} more columns like these", same[most].action))
    return kept


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
