"""A copy of one of the paper's nine tables, cleaned up and checked against its record, or refused.

Known copies differ in names, order, separators, header line, customer numbers and blank cells; all that is undone here,
so that the same rows give the same study wherever they came from.
"""

from __future__ import annotations

import csv
import io
import logging
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pandas as pd

from bishop_ray.data.columns import category_codes, to_numbers
from bishop_ray.data.files import decode_text, read_frame
from bishop_ray.data.paper_datasets import PaperSet, paper_set
from bishop_ray.data.refs import DatasetRef
from bishop_ray.data.schema import make_raw
from bishop_ray.data.table import RawDataset
from bishop_ray.errors import BadTable

logger = logging.getLogger(__name__)
_INDEX = ("unnamed:0", "index", "id")
"""What a data frame's own row numbers are called in files."""
_ANONYMOUS = re.compile(r"(v|x|attribute|a)\d+|class|target")


def load_paper_file(ref: DatasetRef) -> RawDataset:
    """The dataset of a file named by `suites.paper_ref`.

    Raises:
        BadTable: The file cannot be read, or is another table; the message says what differs.
    """
    return clean_paper(ref.name, _read(Path(ref.locator), paper_set(ref.name)), ref.locator)


def clean_paper(name: str, frame: pd.DataFrame, where: str) -> RawDataset:
    """One of the nine tables from any known copy of it, its columns in the original's order.

    Numbers become float64, categories and labels text, whatever they arrive as.

    Args:
        name: One of `paper_sets.PAPER_SETS`.
        frame: The copy, (R, columns).
        where: What messages call it.

    Raises:
        BadTable: It is another table: columns, rows, classes or values differ; the message says which.
    """
    record = paper_set(name)
    frame = _named(record, frame, where)
    if record.complete:
        blank = frame[record.complete].map(_is_blank).astype(bool)
        frame = frame[~blank].reset_index(drop=True)
    columns: dict[str, Any] = {c: _numbers(record, frame[c], where) for c in record.numerical}
    columns |= {c: _texts(frame[c], record.missing) for c in record.categorical}
    columns[record.target] = _labels(record, _texts(frame[record.target], ""))
    clean = pd.DataFrame({c: columns[c] for c in record.columns})
    _check(name, record, clean, where)
    return make_raw(name, clean, record.target, record.task, record.categorical, where)


def _read(file: Path, record: PaperSet) -> pd.DataFrame:
    """The file's cells: text files with any of the separators ``, ; tab``, with a header line or without."""
    if file.name.lower().endswith(".parquet"):
        return read_frame(file)
    text = decode_text(file)
    first = text.partition("\n")[0]
    separator = max(",;\t", key=first.count)
    header = [_fold(cell) for cell in next(csv.reader(io.StringIO(first), delimiter=separator), [])]
    named = bool(set(header) & set(_known(record))) or all(_ANONYMOUS.fullmatch(cell) for cell in header)
    try:
        return pd.read_csv(
            io.StringIO(text), sep=separator, header=0 if named else None, index_col=False, low_memory=False
        )
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise BadTable(f"{file}: cannot be read: {' '.join(str(error).split())}") from None


def _fold(name: object) -> str:
    """A column name without what copies of one table write differently; ``%3B`` is how OpenML writes ``;``."""
    return re.sub(r"[\s_.\-]", "", unquote(str(name)).lower())


def _known(record: PaperSet) -> dict[str, str]:
    """Folded name -> the record's own, of every name that a copy may use."""
    aliases = {_fold(other): name for other, name in record.aliases.items()}
    return aliases | {_fold(name): name for name in record.columns}


def _named(record: PaperSet, frame: pd.DataFrame, where: str) -> pd.DataFrame:
    """The record's columns under its names: by name, or by position where a copy has no names of its own."""
    known, dropped = _known(record), {*map(_fold, record.drop), *_INDEX}
    folded = [_fold(name) for name in frame.columns]
    hits = {known[name] for name in folded if name in known}
    nameless = all(isinstance(name, int) for name in frame.columns) or all(_ANONYMOUS.fullmatch(n) for n in folded)
    if nameless and not hits - {record.target} and len(folded) == len(record.columns):
        return frame.set_axis(list(record.columns), axis=1)
    missing = [name for name in record.columns if name not in hits]
    strange = [
        str(c) for c, name in zip(frame.columns, folded, strict=True) if name not in known and name not in dropped
    ]
    twice = len([name for name in folded if name in known]) > len(hits)
    if missing or strange or twice:
        found = [f"no {', '.join(map(repr, missing[:5]))}"] if missing else []
        found += [f"unknown {', '.join(map(repr, strange[:5]))}"] if strange else []
        found += ["a column twice"] if twice else []
        raise BadTable(
            f"{where}: expected {len(record.numerical)} numerical, {len(record.categorical)} categorical columns and "
            f"the target {record.target!r}; found {len(folded)} columns, {' and '.join(found)}"
        )
    kept = [name in known for name in folded]
    return frame.loc[:, kept].set_axis([known[name] for name in folded if name in known], axis=1)


def _is_blank(value: object) -> bool:
    return pd.isna(value) or not str(value).strip()  # type: ignore[call-overload]


def _numbers(record: PaperSet, column: pd.Series, where: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    try:
        values = to_numbers(column)
    except BadTable as error:
        raise BadTable(f"{where}: {error}") from None
    if not np.isfinite(values).all():
        raise BadTable(
            f"{where}: column {column.name!r}: expected numbers; found {int((~np.isfinite(values)).sum())} gaps"
        )
    return values


def _texts(column: pd.Series, missing: str) -> list[str]:
    """Category cells as text without blanks around; an empty one is `missing`."""
    codes, texts = category_codes(column)
    stripped = np.array([*(text.strip() or missing for text in texts), missing], dtype=object)
    return list(stripped[codes])


def _labels(record: PaperSet, labels: list[str]) -> list[str]:
    """The record's labels: as they are, without the dot of ``>50K.``, or, under other names, told by their counts."""
    labels = [label.removesuffix(".") for label in labels]
    counts = dict(pd.Series(labels).value_counts())
    if set(counts) == set(record.classes):
        return labels
    # 1 and 2, 0 and 1, b'0': no two classes of a table have the same number of rows
    names = {rows: label for label, rows in record.classes.items()}
    renamed = {label: names.get(int(rows), label) for label, rows in counts.items()}
    return [renamed[label] for label in labels] if set(renamed.values()) == set(record.classes) else labels


def _check(name: str, record: PaperSet, clean: pd.DataFrame, where: str) -> None:
    """Nothing, if rows, classes and a mean are the table's own; a known part of it is noted."""
    counts = {str(label): int(rows) for label, rows in clean[record.target].value_counts().items()}
    if record.part is not None and counts == record.part:
        logger.warning("%s: a known part of %s: %d of its %d rows", where, name, len(clean), record.rows)
        return
    wrong = []
    if len(clean) != record.rows:
        wrong.append(f"{len(clean):,} rows instead of {record.rows:,}")
    if counts != record.classes:
        wrong.append(f"classes of {_words(counts)} rows instead of {_words(record.classes)}")
    if record.mean is not None:
        column, mean = record.mean
        if not np.isclose(found := float(clean[column].mean()), mean, rtol=1e-5):
            wrong.append(f"a mean {column} of {found:.6g} instead of {mean:.6g}")
    for column in record.categorical:
        if gaps := int((clean[column] == "").sum()):
            wrong.append(f"{gaps:,} empty cells in {column!r}")
    if wrong:
        raise BadTable(f"{where}: not the paper's {name}: found {'; '.join(wrong)} (the original: {record.url})")


def _words(counts: dict[str, int]) -> str:
    shown = [f"{label!r} {rows:,}" for label, rows in sorted(counts.items())]
    return ", ".join(shown[:6]) + (", ..." if len(shown) > 6 else "")
