"""What a training row counts for: the user's weights, classes made equal, both; never of rows that are scored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bishop_ray.data.columns import category_codes
from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.table import RawDataset, Table
from bishop_ray.errors import BadTable


def counted(train: RawDataset) -> RawDataset:
    """The rows that weigh anything: one of weight 0 is as if it were not there, for every model.

    Raises:
        BadTable: None is left, or none of a class.
    """
    if train.weights is None or train.weights.all():
        return train
    kept = train.rows(np.flatnonzero(train.weights > 0))
    if not len(kept):
        raise BadTable(f"{train.name}: --weights: expected a training row with a weight above 0; found none")
    if train.task.is_classification:
        codes, labels = category_codes(train.target)
        lost = np.setdiff1d(codes, codes[train.weights > 0])
        if len(lost):
            raise BadTable(
                f"{train.name}: --weights: expected a training row with a weight above 0 of every class of "
                f"{train.target.name!r}; found none of {labels[lost[0]]!r}"
            )
    return kept


def encoded(preprocessor: Preprocessor, train: RawDataset, balance: bool) -> Table:
    """Training rows as a `Table` with its weight.

    Args:
        preprocessor: Fitted.
        train: The rows.
        balance: Every class weighs the same: `class_weights` times the rows' own weights.
    """
    table = preprocessor.transform(train)
    if train.weights is None and not balance:
        return table
    weight = np.ones(len(table)) if train.weights is None else train.weights / train.weights.max()
    if balance:
        weight = weight * class_weights(table.y)
    # Mean 1: learning rates, and penalties that stand against sums of weights, keep their meaning.
    return replace(table, weight=(weight / weight.mean()).astype(np.float32))


def class_weights(y: NDArray[Any]) -> NDArray[np.float64]:
    """(R,) of class indices (R,): rows over classes times rows of the own class.

    That is ``class_weight="balanced"`` of scikit-learn (``sklearn.utils.class_weight.compute_class_weight``).
    """
    classes, place, counts = np.unique(y, return_inverse=True, return_counts=True)
    weights: NDArray[np.float64] = (len(y) / (len(classes) * counts))[place]
    return weights
