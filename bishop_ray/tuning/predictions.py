"""What a study's winner predicts for validation and test rows, kept once beside the study's run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.data.target import TargetCoder

PREDICTIONS = "predictions.csv"
"""Artifact of a study's run."""

CELLS = 200_000
"""Most numbers kept of a part; of a larger one a seeded sample of rows is kept."""

LEAST_ROWS = 1000
"""Kept of a part however many classes there are."""

Part = tuple[NDArray[Any], NDArray[Any]]
"""Encoded target (R,) and output (R, K) of the same rows."""


def predictions_csv(coder: TargetCoder, validation: Part, test: Part) -> str:
    """The table as CSV: part, row, target, then a column per class, or ``prediction``.

    Args:
        coder: Of the training target.
        validation: Encoded target and output of validation rows.
        test: The same of test rows.

    Returns:
        ``part`` is "validation" or "test", ``row`` a position in it. In classification ``target`` is the class's
        position among the columns that follow, which are named by label and hold probabilities; in regression both
        numbers are in the target's own units.
    """
    parts = [_frame(coder, name, part) for name, part in (("validation", validation), ("test", test))]
    text: str = pd.concat(parts, ignore_index=True).to_csv(index=False, float_format="%.8g", lineterminator="\n")
    return text


def _frame(coder: TargetCoder, name: str, part: Part) -> pd.DataFrame:
    y, output = part
    rows = _rows(len(y), coder.n_out)
    head = {"part": np.full(len(rows), name), "row": rows}
    if not coder.task.is_classification:
        values = {"target": coder.inverse(y[rows]), "prediction": coder.inverse(output[rows])}
        return pd.DataFrame(head | values)
    classes = pd.DataFrame(output[rows].astype(np.float64), columns=[f"p({label})" for label in coder.classes])
    return pd.concat([pd.DataFrame(head | {"target": y[rows]}), classes], axis=1)


def _rows(count: int, n_out: int) -> NDArray[np.int64]:
    """All positions, or a sorted sample of them."""
    most = max(LEAST_ROWS, CELLS // n_out)
    if count <= most:
        return np.arange(count, dtype=np.int64)
    return np.sort(np.random.default_rng(0).choice(count, most, replace=False)).astype(np.int64)
