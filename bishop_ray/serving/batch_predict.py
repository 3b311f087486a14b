"""Predictions of files larger than memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from bishop_ray.data.files import Chunk, read_chunks
from bishop_ray.errors import UserError
from bishop_ray.paths import replacing_file
from bishop_ray.predictor import Predictor, answers, label_text, label_texts

PREDICTION = "prediction"


class _Writer(Protocol):
    def write_table(self, table: pa.Table) -> None: ...

    def close(self) -> None: ...


def predict_file(predictor: Predictor, file: Path, output: Path, batch_rows: int, keep: Sequence[str] = ()) -> int:
    """Writes the predictions of a file's rows, in their order; returns how many rows there are.

    Columns: those of `keep`, ``prediction``, and of a classification ``probability LABEL`` for each label.

    Args:
        predictor: The fitted predictor.
        file: .csv, .tsv (also .gz) or .parquet.
        output: .csv or .parquet; replaced at the very end, untouched if anything fails.
        batch_rows: Rows in memory at a time.
        keep: Columns of the file to hand on.

    Raises:
        UserError: The file cannot be read, or its rows cannot be predicted: names file, rows and column. Or the
            output cannot be written.
    """
    names = [PREDICTION, *(f"probability {label}" for label in label_texts(predictor))]
    if clash := [name for name in keep if name in names]:
        raise UserError(f"--keep: expected a name that no column of the output has; found {clash[0]!r}")
    rows = 0
    kind = _arrow_type(predictor)
    with _replacing(output) as part:
        writer: _Writer | None = None
        try:
            for batch in read_chunks(file, batch_rows, predictor.schema, predictor.levels, keep):
                table = _predicted(predictor, file, batch, names, kind)
                if writer is None:
                    is_csv = output.name.lower().endswith(".csv")
                    writer = _Csv(part) if is_csv else pq.ParquetWriter(part, table.schema)
                writer.write_table(table)
                rows += table.num_rows
        finally:
            if writer is not None:
                writer.close()
    return rows


def _predicted(predictor: Predictor, file: Path, batch: Chunk, names: Sequence[str], kind: pa.DataType) -> pa.Table:
    columns: list[Any] = list(batch.kept.columns)
    try:
        found = answers(predictor, batch.frame) if len(batch.frame) else None
    except UserError as error:
        raise UserError(f"{file}: {batch.where}: {error}") from error
    if found is None:
        columns += [pa.array([], kind), *([pa.array([], pa.float64())] * (len(names) - 1))]
    else:
        predictions = found.predictions.tolist()
        columns.append(pa.array(list(map(label_text, predictions)) if kind == pa.string() else predictions, kind))
        if found.probabilities is not None:
            columns += [pa.array(column) for column in found.probabilities.T]
    return pa.table(columns, names=[*batch.kept.column_names, *names])


def _arrow_type(predictor: Predictor) -> pa.DataType:
    """Of the predictions: the labels' own type; text where labels are of several."""
    kinds = {type(label) for label in predictor.target.classes} or {float}
    plain = {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
    return plain.get(kinds.pop(), pa.string()) if len(kinds) == 1 else pa.string()


class _Csv:
    """Writes tables one after the other under one header."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        self._header = True

    def write_table(self, table: pa.Table) -> None:
        """Adds the rows."""
        frame = table.to_pandas(types_mapper=pd.ArrowDtype)
        frame.to_csv(self._file, header=self._header, index=False, lineterminator="\n")
        self._header = False

    def close(self) -> None:
        """Ends the file."""
        self._file.close()


@contextlib.contextmanager
def _replacing(output: Path) -> Iterator[Path]:
    """A file to write beside `output`, which takes its place if nothing fails."""
    try:
        with replacing_file(output, flushed=True) as part:
            yield part
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error.strerror or error}") from error
