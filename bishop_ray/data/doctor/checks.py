"""Checks of columns, their names and the target."""

from __future__ import annotations

import datetime
import numbers
import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from bishop_ray.data.columns import category_codes, is_number
from bishop_ray.data.doctor.findings import DROPPED, NOTED, REFUSED, Coded, Finding, listed, shown
from bishop_ray.data.table import RawDataset, Split

FEWEST_IDS = 20
"""Rows below which different values say nothing."""
MANY_LEVELS = 1000
"""Categories from which a column has many; or a tenth of the rows, from a hundred on."""
_NEARLY = 0.95
_ID_NAME = re.compile(
    r"(^|[^A-Za-z])(?i:id|ids|uuid|guid|key|index|idx|rowid|row|nr|no|number)($|[^A-Za-z])|[a-z]I[dD]$"
)
_TIME = r"(?:[T ]\d{1,2}:\d{2}.*)?"
_MONTH = r"(?P<word>jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DATES = tuple(
    re.compile(pattern + _TIME, re.IGNORECASE)
    for pattern in (
        r"(?P<year>\d{4})[-/.](?P<a>\d{1,2})[-/.](?P<b>\d{1,2})",
        r"(?P<a>\d{1,2})[-/.](?P<b>\d{1,2})[-/.](?P<year>\d{4}|\d{2})",
        rf"(?P<a>\d{{1,2}})[ -]{_MONTH}[ ,-]+(?P<year>\d{{4}}|\d{{2}})",
        rf"{_MONTH} (?P<a>\d{{1,2}}),? (?P<year>\d{{4}})",
    )
)
_SAMPLE = 200
"""Different texts that are tried as dates."""


def column_findings(series: pd.Series, column: Coded, treated: str) -> list[Finding]:
    """What is found in one feature column.

    Args:
        series: As it came, (R,).
        column: The same, read.
        treated: The action with it: what will be done.
    """
    if not column.distinct:
        return []
    name = shown(column.name)
    found: list[Finding] = []
    what = "a number" if column.kind == "number" else "a category"
    if dates := _dates(column):
        found.append(Finding("date-like", name, dates, treated))
    elif ids := _ids(column):
        use = "" if treated == DROPPED else f"; models get it as {what}: leave it out if it only names"
        found.append(Finding("id-like", name, ids + use, treated))
    elif column.kind == "category" and _has_many(column):
        detail = f"{column.distinct:,} categories in {len(column.known):,} rows; the rare ones share codes"
        found.append(Finding("many categories", name, detail, treated))
    if mixed := _mixed(series, column):
        found.append(Finding("mixed types", name, f"{mixed}; models get it as {what}", treated))
    if column.infinite:
        detail = f"{column.infinite:,} infinite values, which count as missing"
        found.append(Finding("infinite", name, detail, treated))
    return found


def constants(columns: Sequence[Coded], dropped: Sequence[str], action: str) -> list[Finding]:
    """One line for all columns without information, however many."""
    out = set(dropped)
    empty = [c.name for c in columns if not c.distinct]
    single = [c.name for c in columns if c.distinct == 1 and c.name in out]
    rare = [c.name for c in columns if c.distinct > 1 and c.name in out]
    found = []
    for kind, names, detail in (
        ("all missing", empty, "no value at all"),
        ("constant", single, "one value in all rows"),
        ("constant", rare, "one value in all training rows, others are rare"),
    ):
        if names:
            count = f"{len(names):,} columns: " if len(names) > 1 else ""
            found.append(Finding(kind, listed(names), count + detail, action))
    return found


def _ids(column: Coded) -> str:
    """Why the column only tells rows apart, or ""."""
    known, rows = column.known, len(column.known)
    if rows < FEWEST_IDS or column.distinct < _NEARLY * rows or column.kind == "moment":
        return ""
    words = f"{column.distinct:,} different values in {rows:,} rows"
    if column.kind == "category":
        return words
    if not (known == np.floor(known)).all():
        return ""
    steps = np.diff(known)
    ordered = bool((steps > 0).all() or (steps < 0).all())
    dense = bool(known.max() - known.min() <= 2 * rows)
    named = _ID_NAME.search(column.name) is not None
    # Measurements in whole numbers repeat: a thousand that never do are numbers of something.
    every = column.distinct == rows and (ordered or rows >= MANY_LEVELS)
    return words + (", in order" if ordered else "") if every or dense or named else ""


def _dates(column: Coded) -> str:
    """What kind of points in time the column holds, or ""."""
    if column.kind == "moment":
        return "points in time"
    if column.kind == "category":
        texts = [text.strip() for text in column.texts[:: max(1, len(column.texts) // _SAMPLE)]]
        good = sum(_is_date(text) for text in texts)
        return f"text that looks like dates, e.g. {texts[0][:40]!r}" if good >= _NEARLY * len(texts) else ""
    known = column.known
    if column.distinct < 3 or not (known == np.floor(known)).all() or known.min() < 19000101 or known.max() > 21001231:
        return ""
    sample = pd.unique(known)[:_SAMPLE].astype(np.int64)
    read = pd.to_datetime(pd.Series(sample).astype(str), format="%Y%m%d", errors="coerce")
    return f"whole numbers that look like dates, e.g. {sample[0]}" if read.notna().all() else ""


def _is_date(text: str) -> bool:
    """Whether the text names a day: a month of twelve beside a day of at most 31, in either order."""
    match = next((m for pattern in _DATES if (m := pattern.fullmatch(text))), None)
    if match is None:
        return False
    parts = match.groupdict()
    small, large = sorted((int(parts["a"]), 1 if parts.get("word") else int(parts["b"])))
    return 1 <= small <= 12 and large <= 31


def _has_many(column: Coded) -> bool:
    return column.distinct >= MANY_LEVELS or (column.distinct >= 100 and column.distinct * 10 >= len(column.known))


def _mixed(series: pd.Series, column: Coded) -> str:
    """Which types share the column, or "": Python's in an object column; numbers and words in a column of text."""
    if series.dtype == np.dtype(object):
        kinds = Counter(_kind(value) for value in series.dropna())
        if len(kinds) > 1:
            return ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
    if column.kind != "category" or isinstance(series.dtype, pd.CategoricalDtype) or series.dtype == bool:
        return ""
    is_number = pd.to_numeric(pd.Series(column.texts, dtype="str"), errors="coerce").notna().to_numpy()
    counts = np.bincount(column.known.astype(np.int64), minlength=column.distinct)
    numeric, words = int(counts[is_number].sum()), int(counts[~is_number].sum())
    if not words or numeric < words:
        return ""
    example = column.texts[int(np.argmin(is_number))]
    return f"{numeric:,} numbers and {words:,} other texts such as {example[:40]!r}"


def _kind(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "truth values"
    if isinstance(value, numbers.Number):
        return "numbers"
    if isinstance(value, str):
        return "texts"
    return "dates" if isinstance(value, datetime.date) else "other objects"


_UNNAMED = re.compile(r"Unnamed: \d+(_level_\d+)?")
"""What pandas makes of an empty cell in a header line."""
_SPECIAL = set('[]{}":,<>')
"""Characters that some libraries and formats refuse in a name; ours never see names."""


def name_findings(columns: Sequence[Hashable]) -> list[Finding]:
    """Duplicate, empty, odd and look-alike names, one finding per kind.

    Args:
        columns: Names of all columns, the target's among them; of any type, as a data frame has them.
    """
    names = [str(column) for column in columns]
    found: list[Finding] = []
    for name in dict.fromkeys(n for n in names if names.count(n) > 1) if len(set(names)) < len(names) else ():
        found.append(Finding("duplicate name", shown(name), f"{names.count(name)} columns have this name", REFUSED))
    empty = [n for n in dict.fromkeys(names) if not n.strip() or _UNNAMED.fullmatch(n)]
    odd = {n: why for n in dict.fromkeys(names) if n not in empty and (why := _odd(n))}
    other = [n for n, column in zip(names, columns, strict=True) if not isinstance(column, str)]
    unicode = [n for n in dict.fromkeys(names) if not n.isascii()]
    if empty:
        found.append(Finding("empty name", listed(empty), "no name in the header; an index that was saved?", NOTED))
    for why in dict.fromkeys(odd.values()):
        found.append(Finding("odd name", listed(n for n in odd if odd[n] == why), why, NOTED))
    if other:
        found.append(Finding("odd name", listed(other), "the name is no text; it is read as its text", NOTED))
    if unicode:
        found.append(Finding("unicode name", listed(unicode), _unicode(unicode), NOTED))
    return found + _similar(list(dict.fromkeys(names)))


def _odd(name: str) -> str:
    if name != name.strip():
        return "blanks around the name, which belong to it"
    if not name.isprintable():
        return "characters that cannot be seen"
    return "characters with a meaning in JSON or CSV" if _SPECIAL & set(name) else ""


def _unicode(names: Sequence[str]) -> str:
    loose = [name for name in names if unicodedata.normalize("NFC", name) != name]
    if loose:
        return f"letters outside ASCII; {listed(loose)}: not composed (NFC), so that equal-looking text is not equal"
    return "letters outside ASCII"


def _similar(names: Sequence[str]) -> list[Finding]:
    """Names that differ in case, blanks or the way their letters are composed only."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(unicodedata.normalize("NFKC", name).casefold().strip(), []).append(name)
    return [
        Finding("similar names", ", ".join(map(repr, group[:5])), "they differ, but hardly look so", NOTED)
        for group in groups.values()
        if len(group) > 1
    ]


FEW_ROWS = 200
"""Rows below which a score is little more than a hint."""
RARE, IMBALANCED = 10, 0.95
"""Rows of a class below which it is rare; share of the largest class from which the others hardly count."""


def missing_target(given: pd.Series, kept: int) -> list[Finding]:
    """Rows that go since their target is missing, blank or, for a regression, infinite.

    Args:
        given: The target column as it came.
        kept: Rows that stayed.
    """
    gone = len(given) - kept
    detail = f"{gone:,} of {len(given):,} rows have no target that can be learnt"
    return [Finding("missing target", str(given.name), detail, DROPPED)] if gone else []


def class_counts(target: pd.Series) -> tuple[tuple[str, int], ...]:
    """Label as text and rows of every class, the largest first."""
    codes, labels = category_codes(target)
    counts = np.bincount(codes, minlength=len(labels))
    return tuple((labels[code], int(counts[code])) for code in np.argsort(-counts, kind="stable"))


def target_findings(raw: RawDataset, classes: tuple[tuple[str, int], ...], asked: bool) -> list[Finding]:
    """Rare classes, one class that is nearly all, classes that look like numbers.

    Args:
        raw: The table.
        classes: `class_counts`; empty for a regression.
        asked: The user named the task type.
    """
    name, found = str(raw.target.name), []
    rare = [f"{label} ({count})" for label, count in reversed(classes) if count < RARE]
    if rare:
        detail = f"{len(rare)} of {len(classes)} classes have fewer than {RARE} rows: {listed(rare)}"
        found.append(Finding("rare class", name, detail, NOTED))
    if classes and classes[0][1] >= IMBALANCED * len(raw):
        detail = f"{classes[0][1] / len(raw):.1%} of the rows are {classes[0][0]!r}: accuracy says little, auc more"
        found.append(Finding("imbalance", name, detail, NOTED))
    if len(classes) > 2 and not asked and is_number(raw.target):
        detail = f"{len(classes)} different numbers, read as classes; --task-type regression reads them as numbers"
        found.append(Finding("task type", name, detail, NOTED))
    return found


def few_rows(raw: RawDataset, parts: Split[np.ndarray]) -> list[Finding]:
    """A table that is too small for scores to mean much."""
    if len(raw) >= FEW_ROWS:
        return []
    detail = f"{len(raw)} rows; scores of {len(parts.validation)} validation and {len(parts.test)} test rows are rough"
    return [Finding("few rows", "", detail, NOTED)]
