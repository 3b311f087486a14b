"""The weighted mean of several models' outputs, as ensembles predict and as their weights are judged.

Letters: R rows, K outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def combine(outputs: Sequence[NDArray[Any]], weights: Sequence[float], classification: bool) -> NDArray[np.float64]:
    """The mean of outputs, row by row, over the models whose output of that row is finite.

    A model whose row is not finite is left out of that row and the other weights grow in proportion, so that one bad
    model spoils nothing and a row's result does not depend on the rows beside it.

    Args:
        outputs: Per model (R, K).
        weights: Per model, positive.
        classification: Outputs are probabilities: the rows of the mean are brought to sum 1.

    Returns:
        (R, K); NaN where no model has a finite row.
    """
    total = np.zeros(outputs[0].shape, np.float64)
    given = np.zeros((len(total), 1), np.float64)
    for output, weight in zip(outputs, weights, strict=True):
        good = np.isfinite(output).all(axis=1, keepdims=True)
        # Not a product: infinity times zero is NaN.
        total += np.where(good, output, 0.0).astype(np.float64) * weight
        given += good * weight
    if classification:
        given = np.where(given > 0, total.sum(axis=1, keepdims=True), 0.0)
    return np.divide(total, given, out=np.full_like(total, np.nan), where=given > 0)
