"""Tables from CSV, TSV and Parquet files, and the ones scikit-learn ships."""

from __future__ import annotations

import contextlib
import csv
import gzip
import importlib
import io
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pyarrow

from bishop_ray.data.raw import make_raw
from bishop_ray.data.suites import DatasetRef
from bishop_ray.data.table import RawDataset
from bishop_ray.errors import BadTable


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
