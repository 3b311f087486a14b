"""BiSHop's attention per column of the user's table, alone or as members of an ensemble."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.predictor.encoded import Encoded
from bishop_ray.predictor.single import Predictor

BISHOP = "bishop"
"""Its name in the registry of models."""


def column_attention(predictor: Predictor, parts: Sequence[Encoded], names: Sequence[str]) -> pd.DataFrame | None:
    """``feature``, ``weight`` and ``inputs``, the largest weight first; None without a BiSHop that has weights.

    A column's weight is the sum of those of the inputs it became, averaged over the rows. Of an ensemble it is the mean
    over its BiSHops in the ratio of their shares, and `inputs` of the one with the largest.

    Args:
        predictor: Whose attention.
        parts: The rows, as ``predictor.encoded`` gives them.
        names: The columns of its schema.
    """
    if BISHOP not in predictor.model_names:
        return None
    # Not before it is needed: where only other models predict, what BiSHop imports may not be installed.
    from bishop_ray.models.bishop import BiSHop
    from bishop_ray.models.bishop.attention import feature_weights

    total, shares = np.zeros(len(names)), 0.0
    inputs: NDArray[np.int64] = np.zeros(len(names), np.int64)
    largest = 0.0
    for model, share, part in predictor.models_of(parts):
        if not isinstance(model, BiSHop) or (weights := feature_weights(model, part.x_num, part.x_cat)) is None:
            continue
        mean, n_cat = weights.mean(axis=0), part.x_cat.shape[1]
        places = [[*part.cat.get(name, []), *(n_cat + place for place in part.num.get(name, []))] for name in names]
        total += share * np.array([mean[own].sum() for own in places])
        shares += share
        if share > largest:
            largest, inputs = share, np.array([len(own) for own in places])
    if not shares:
        return None
    table = pd.DataFrame({"feature": list(names), "weight": total / shares, "inputs": inputs})
    return table.sort_values("weight", ascending=False, kind="stable", ignore_index=True)
