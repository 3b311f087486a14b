"""Reader of CSV, TSV and Parquet files, whole or in chunks, and of scikit-learn's embedded tables."""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import importlib
import io
import itertools
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import pandas as pd
import pyarrow
import pyarrow as pa
import pyarrow.parquet as pq

from bishop_ray.data.columns import canonical_text
from bishop_ray.data.refs import DatasetRef
from bishop_ray.data.schema import make_raw
from bishop_ray.data.table import RawDataset
from bishop_ray.errors import BadTable
from bishop_ray.paths import replacing_file


def load_file(ref: DatasetRef) -> RawDataset:
    """The dataset of a reference made by `suites.file_ref`.

    Raises:
        BadTable: The file cannot be read, or no model can be trained on it; the message names the file.
        UnknownName: The target is no column.
    """
    return make_raw(ref.name, read_frame(ref.locator), ref.target, ref.task_type, where=ref.locator)


def read_frame(path: str | Path) -> pd.DataFrame:
    """All rows and columns of a file, by its suffix (`suites.TABLE_SUFFIXES`).

    Raises:
        BadTable: The file cannot be read, or a CSV names a column twice (pandas would rename it).
    """
    file = Path(path)
    try:
        if file.name.lower().endswith(".parquet"):
            with readable(file):
                return pd.read_parquet(file)
        return _read_text(file)
    except csv.Error as error:
        reason = str(error)
    except pd.errors.EmptyDataError:
        raise BadTable(f"{path}: the file is empty; expected a header line and rows") from None
    except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
        reason = str(error)
    raise BadTable(f"{path}: cannot be read: {' '.join(reason.split())}")


def decode_text(file: Path) -> str:
    """The text of a .csv or .tsv file, also a compressed one.

    Raises:
        BadTable: It cannot be read.
    """
    with readable(file):
        data = gzip.decompress(file.read_bytes()) if file.name.lower().endswith(".gz") else file.read_bytes()
        return data.decode("utf-8-sig")


@contextlib.contextmanager
def readable(file: Path) -> Iterator[None]:
    """Whatever goes wrong with a file's bytes is a `BadTable` that names it."""
    try:
        yield
    except (OSError, EOFError, UnicodeError, zlib.error, pyarrow.ArrowException) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadTable(f"{file}: cannot be read: {' '.join(reason.split())}") from None


def _read_text(file: Path) -> pd.DataFrame:
    text = decode_text(file)
    delimiter = "\t" if ".tsv" in Path(file.name.lower()).suffixes else ","
    header = next(csv.reader(io.StringIO(text), delimiter=delimiter), [])
    twice = sorted({column for column in header if column and header.count(column) > 1})
    if twice:
        raise BadTable(f"{file}: column {twice[0]!r} comes {header.count(twice[0])} times; expected unique names")
    with warnings.catch_warnings():
        # rows longer than the header: pandas would shift or cut them with no more than a warning
        warnings.simplefilter("error", pd.errors.ParserWarning)
        return pd.read_csv(io.StringIO(text), sep=delimiter, index_col=False, low_memory=False)


def load_embedded(ref: DatasetRef) -> RawDataset:
    """One of scikit-learn's tables, with readable class names where it has them."""
    loader = getattr(importlib.import_module("sklearn.datasets"), f"load_{ref.locator}")
    bunch = loader(as_frame=True)
    frame, target = bunch.data, bunch.target
    if ref.locator == "diabetes":
        return make_raw(ref.name, frame.assign(target=target), "target", "regression")
    names = bunch.target_names
    labels = pd.Series([names[int(code)] for code in target])
    return make_raw(ref.name, frame.assign(target=labels), "target", "classification")


Schema = Sequence[tuple[str, str]]
_BUFFER = 1 << 20
"""Bytes of a Parquet column that are read at a time; without, a row group is read whole, and a file may be one."""
MISSING = frozenset(
    ("#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA", "NULL",
     "NaN", "None", "n/a", "nan", "null")
)  # fmt: skip
"""Texts that pandas reads as missing (``read_csv``, `na_values`)."""


@dataclass(frozen=True)
class Chunk:
    """Some rows of a file.

    Attributes:
        first: Number of its first row in the file, from 1, the header not counted.
        frame: The columns of the schema.
        kept: The columns to be handed on, as they are in the file: of text files their text.
    """

    first: int
    frame: pd.DataFrame
    kept: pa.Table

    @property
    def where(self) -> str:
        """Its rows in a message."""
        return f"rows {self.first}-{self.first + len(self.frame) - 1}"


def read_chunks(
    file: Path, rows: int, schema: Schema, levels: Mapping[str, Sequence[str]], keep: Sequence[str] = ()
) -> Iterator[Chunk]:
    """The rows of a .csv, .tsv (also .gz) or .parquet file in order; of a file without rows one empty batch.

    In a text file nothing but the text says what a value is, and what pandas makes of a column depends on the rows it
    sees: "01" is the number 1 among numbers, and a text beside "A5". So columns of categories are read as text, and a
    text that training does not know stands for the number or truth value it spells, if training knows that one. Blank
    lines are no rows.

    Args:
        file: The file.
        rows: Of a batch, at most.
        schema: Columns to read and their kinds, see `Predictor.schema`.
        levels: Category texts that training knows, by column.
        keep: Columns to hand on.

    Raises:
        BadTable: The file cannot be read, lacks a column, names one twice, or has rows of another length.
    """
    batches = _parquet_batches if file.name.lower().endswith(".parquet") else _text_batches
    yield from batches(file, rows, schema, levels, keep)


def level_text(text: str, levels: Sequence[str] | frozenset[str]) -> str:
    """The level that a text of a file means, or the text itself when it means none of them."""
    if canonical_text(text) in levels:
        return text
    number = _level_number(text)
    if number and number in levels:
        return number
    truth = text.strip().capitalize()
    return truth if truth in ("True", "False") and truth in levels else text


def target_values(file: Path, values: pd.Series, labels: frozenset[str]) -> pd.Series:
    """(R,) values of the target in `file`, as `Chunk.kept` has them; None where a row has none.

    Args:
        file: In text files a text that pandas reads as missing, as it did for training, is no value.
        values: As they are in the file.
        labels: Texts of the classes, empty for a regression.
    """
    absent = frozenset() if file.name.lower().endswith(".parquet") else MISSING - labels

    def read(value: object) -> object:
        if not (canonical_text(value) or "").strip() or (isinstance(value, str) and value in absent):
            return None
        return level_text(value, labels) if labels and isinstance(value, str) else value

    return pd.Series([read(value) for value in values], dtype=object, name=values.name)


def _level_number(text: str) -> str:
    """The canonical text of the number that a text spells, or ""."""
    with contextlib.suppress(ValueError, OverflowError):
        if "_" not in text:  # Python would read "1_000" as a thousand
            return canonical_text(int(text) if text.strip().lstrip("+-").isdecimal() else float(text)) or ""
    return ""


def _parquet_batches(
    file: Path, rows: int, schema: Schema, levels: Mapping[str, Sequence[str]], keep: Sequence[str]
) -> Iterator[Chunk]:
    wanted = [name for name, _ in schema]
    first = 1
    with readable(file):
        with pq.ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False) as source:
            _check_columns(file, source.schema_arrow.names, wanted, keep)
            empty = source.schema_arrow.empty_table()
            for part in source.iter_batches(rows, columns=list(dict.fromkeys([*wanted, *keep]))):
                table = pa.Table.from_batches([part])
                yield _from_table(first, table, schema, keep)
                first += table.num_rows
        if first == 1:
            yield _from_table(first, empty, schema, keep)


def _from_table(first: int, table: pa.Table, schema: Schema, keep: Sequence[str]) -> Chunk:
    """Integers of a batch with missing values stay integers where they are categories.

    As floats, ids above 2^53 would be other categories in this batch than in the next one.
    """
    numbers = table.select([name for name, kind in schema if kind == "number"]).to_pandas(ignore_metadata=True)
    others = table.select([name for name, kind in schema if kind != "number"])
    frame = pd.concat([numbers, others.to_pandas(ignore_metadata=True, integer_object_nulls=True)], axis=1)
    return Chunk(first, frame, table.select(list(keep)))


def _text_batches(
    file: Path, rows: int, schema: Schema, levels: Mapping[str, Sequence[str]], keep: Sequence[str]
) -> Iterator[Chunk]:
    kinds, known = dict(schema), {name: frozenset(found) for name, found in levels.items()}
    comma = "\t" if ".tsv" in Path(file.name.lower()).suffixes else ","
    names = _header(file, comma)
    _check_columns(file, names, list(kinds), keep)
    types = {name: "str" for name in names if kinds.get(name) != "number"}
    first = 1
    with _fault_named(file), _open(file) as text, _open(file) as again, warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)  # rows longer than the header
        parts = pd.read_csv(text, sep=comma, index_col=False, dtype=types, low_memory=False, chunksize=rows)
        with parts:
            for part, kept in zip(parts, _texts(again, comma, keep, rows), strict=False):
                frame = pd.DataFrame({name: _values(part[name], kinds[name], known.get(name)) for name in kinds})
                yield Chunk(first, frame, kept)
                first += len(part)
    if first == 1:
        nothing = {name: pd.Series([], dtype="float64" if kind == "number" else object) for name, kind in schema}
        yield Chunk(1, pd.DataFrame(nothing), pa.table({name: pa.array([], pa.string()) for name in keep}))


def _texts(text: TextIO, comma: str, keep: Sequence[str], rows: int) -> Iterator[pa.Table]:
    """The columns to hand on, `rows` at a time; read apart, so that they keep their very text, "NA" and "01" too."""
    if not keep:
        yield from itertools.repeat(pa.table({}))
    wanted = list(keep)
    parts = pd.read_csv(
        text, sep=comma, index_col=False, dtype="str", na_filter=False, usecols=wanted, chunksize=rows
    )  # fmt: skip
    with parts:
        for part in parts:
            yield pa.table({name: pa.array(part[name].tolist(), pa.string()) for name in wanted})


def _values(series: pd.Series, kind: str, levels: frozenset[str] | None) -> pd.Series:
    if kind == "number":
        # Truth values among numbers are told by their text, however many rows of a batch hold them.
        mixed = pd.api.types.is_bool_dtype(series.dtype) or pd.api.types.is_object_dtype(series.dtype)
        return series.map(lambda value: str(value) if isinstance(value, bool) else value) if mixed else series
    if levels is None:
        return series.astype(object)
    meant = {text: level_text(text, levels) for text in series.dropna().unique()}
    return series.astype(object).map(meant)


def _header(file: Path, comma: str) -> list[str]:
    """Column names as pandas gives them."""
    with _fault_named(file), _open(file) as text:
        given = next(csv.reader(text, delimiter=comma), [])
    twice = sorted({name for name in given if name and given.count(name) > 1})
    if twice:
        raise BadTable(f"{file}: column {twice[0]!r} comes {given.count(twice[0])} times; expected unique names")
    with _fault_named(file), _open(file) as text:
        return list(pd.read_csv(text, sep=comma, index_col=False, nrows=0).columns)


def _check_columns(file: Path, names: Sequence[str], wanted: Sequence[str], keep: Sequence[str]) -> None:
    for flag, asked in (("", wanted), ("--keep: ", keep)):
        absent = [name for name in asked if name not in names]
        if absent:
            shown = ", ".join(map(repr, absent[:10])) + (f" and {len(absent) - 10} more" if len(absent) > 10 else "")
            expected = "" if flag else "; expected the columns of the training table"
            raise BadTable(f"{flag}{file}: missing column{'s' * (len(absent) > 1)} {shown}{expected}")
    for name in (*wanted, *keep):
        if list(names).count(name) > 1:
            raise BadTable(f"{file}: column {name!r} comes {list(names).count(name)} times; expected unique names")


@contextlib.contextmanager
def _open(file: Path) -> Iterator[TextIO]:
    if file.name.lower().endswith(".gz"):
        with gzip.open(file, "rt", encoding="utf-8-sig", newline="") as text:
            yield text
    else:
        with file.open(encoding="utf-8-sig", newline="") as text:
            yield text


@contextlib.contextmanager
def _fault_named(file: Path) -> Iterator[None]:
    try:
        with readable(file):
            yield
    except pd.errors.EmptyDataError:
        raise BadTable(f"{file}: the file is empty; expected a header line and rows") from None
    except (csv.Error, pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise BadTable(f"{file}: cannot be read: {' '.join(str(error).split())}") from None


def write_table(folder: Path, frame: pd.DataFrame) -> Path:
    """The Parquet file of `folder` that holds the frame's rows, named after them: the same rows are the same file."""
    hashes = pd.util.hash_pandas_object(frame.astype("string"), index=False).to_numpy()
    digest = hashlib.sha256(repr((list(frame.columns), list(map(str, frame.dtypes)))).encode() + hashes.tobytes())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"table-{digest.hexdigest()[:12]}.parquet"
    if not path.is_file():
        with replacing_file(path) as part:
            if not _stored(frame, part):
                _as_texts(frame).to_parquet(part)
    return path


def _stored(frame: pd.DataFrame, file: Path | io.BytesIO) -> bool:
    """Writes the frame as Parquet, if that can hold it."""
    try:
        frame.to_parquet(file)
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError):
        return False
    return True


def _as_texts(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with what Parquet cannot hold, such as numbers and texts in one column, as the texts it is read as."""
    columns = {}
    for name in frame.columns:
        series = frame[name]
        if not _stored(series.to_frame(name), io.BytesIO()):
            series = pd.Series([canonical_text(value) for value in series], dtype=object)
        columns[name] = series
    return pd.DataFrame(columns)
