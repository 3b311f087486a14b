"""What an examination of a table answers: findings, facts of its columns, the whole report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

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
class Report:
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
