"""What a predictor says of the rows of a file whose target is known."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bishop_ray.data.batches import Batch, read_batches, target_values
from bishop_ray.errors import BadTable
from bishop_ray.predictor import Predictor, label_texts
from bishop_ray.training.paired import Scored

logger = logging.getLogger(__name__)

BATCH = 10_000


def score_file(predictor: Predictor, file: Path) -> Scored:
    """Target and predictions of a file's R rows; rows without a target are left out, and counted in a note.

    Args:
        predictor: Its columns and its target are looked for.
        file: .csv, .tsv (also .gz) or .parquet.

    Raises:
        BadTable: The file cannot be read, lacks a column, has a label that the predictor does not know, or no rows.
    """
    target = predictor.target
    labels = frozenset(label_texts(predictor))
    parts, outputs, lost = [], [], 0
    for batch in _batches(predictor, file):
        values = target_values(file, batch.kept.column(target.name).to_pandas(), labels)
        known = values.notna().to_numpy()
        lost += int((~known).sum())
        if known.any():
            parts.append(target.encode(values[known].rename(target.name)))
            outputs.append(predictor.output(batch.frame[known]))
    if not parts:
        raise BadTable(f"--holdout {file}: expected rows with a value of the target {target.name!r}; found none")
    if lost:
        logger.warning("%s: left out %d rows without a target (%r)", file, lost, target.name)
    return Scored(np.concatenate(parts), np.concatenate(outputs), target.units)


def _batches(predictor: Predictor, file: Path) -> Iterator[Batch]:
    try:
        yield from read_batches(file, BATCH, predictor.schema, predictor.levels, [predictor.target.name])
    except BadTable as error:
        raise BadTable(f"--holdout: {str(error).removeprefix('--keep: ')}") from None
