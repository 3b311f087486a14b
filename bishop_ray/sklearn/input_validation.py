"""Validation of inputs to the scikit-learn estimators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.utils.validation import check_array, column_or_1d, validate_data

from bishop_ray.data.schema import make_raw
from bishop_ray.data.table import RawDataset


def read_features(estimator: Any, x: Any, reset: bool) -> pd.DataFrame:
    """`x` as a frame; names and number of columns are noted (`reset`) or compared with those of `fit`.

    Frames keep their dtypes: text, categories, dates and missing values are read as everywhere in this package. Arrays
    have columns ``x0, x1, ...``; NaN is a missing value, infinities are allowed.

    Args:
        estimator: The fitted or unfitted estimator.
        x: (R, features), a DataFrame or anything that becomes a two-dimensional array.
        reset: The call comes from `fit`.

    Raises:
        ValueError: As scikit-learn's `validate_data` raises it: sparse, empty, other columns than in `fit`.
    """
    if isinstance(x, pd.DataFrame):
        validate_data(estimator, x, reset=reset, skip_check_array=True)
        if not len(x.columns) or (reset and len(x) < 2):
            check_array(np.zeros(x.shape), ensure_min_samples=2)  # its words for too few rows or columns
        return x.set_axis([str(name) for name in x.columns], axis=1)
    array = validate_data(
        estimator, x, reset=reset, dtype=None, ensure_all_finite=False, ensure_min_samples=2 if reset else 1
    )
    if np.iscomplexobj(array):
        raise ValueError("Complex data not supported")
    return pd.DataFrame(array, columns=[f"x{i}" for i in range(array.shape[1])]).infer_objects()


def read_target(y: Any, rows: int) -> NDArray[Any]:
    """`y` as an array (R,) without missing values.

    Raises:
        ValueError: None, another number of rows, missing or infinite values.
    """
    if y is None:
        raise ValueError("requires y to be passed, but the target y is None")
    values = np.asarray(column_or_1d(y, warn=True))
    if len(values) != rows:
        raise ValueError(f"Found input variables with inconsistent numbers of samples: [{rows}, {len(values)}]")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ValueError("Input y contains NaN or infinity.")
    if values.dtype == np.dtype(object) and pd.isna(values).any():
        raise ValueError("Input y contains NaN.")
    return values


def weighed(
    frame: pd.DataFrame, y: NDArray[Any], sample_weight: Any
) -> tuple[pd.DataFrame, NDArray[Any], NDArray[np.float64] | None]:
    """The rows of a weight above 0, their targets and weights; all rows and no weights where none are given.

    Raises:
        ValueError: Weights of another shape, missing, infinite or below 0; fewer than two rows of non-zero weight.
    """
    if sample_weight is None:
        return frame, y, None
    weights = check_array(
        sample_weight, ensure_2d=False, dtype=np.float64, input_name="sample_weight", ensure_min_samples=0
    )
    if weights.ndim == 0:
        weights = np.full(len(frame), float(weights))
    if weights.shape != (len(frame),):
        raise ValueError(f"sample_weight.shape == {weights.shape}, expected {(len(frame),)}!")
    if (weights < 0).any():
        raise ValueError(f"sample_weight: expected weights >= 0; found {weights.min():g}")
    kept = weights > 0
    if kept.sum() < 2:
        raise ValueError(f"sample_weight: expected two rows or more of non-zero weight; found {kept.sum()}")
    return frame[kept], y[kept], weights[kept]


def with_target(frame: pd.DataFrame, y: NDArray[Any]) -> tuple[pd.DataFrame, str]:
    """The frame with `y` as a further column, and that column's name, which no other one has."""
    target = "target"
    while target in frame.columns:
        target += "_"
    return frame.reset_index(drop=True).assign(**{target: y}), target


def make_parts(
    frame: pd.DataFrame,
    y: NDArray[Any],
    task: str,
    fraction: float,
    rng: np.random.RandomState,
    weights: NDArray[np.float64] | None = None,
) -> tuple[RawDataset, RawDataset]:
    """Rows to train on and rows to choose the best epoch with.

    A class keeps at least one row in train. Where so few rows are left for validation that there would be none, the
    training rows serve for both.

    Args:
        frame: (R, features).
        y: (R,) class indices, or numbers.
        task: "classification" or "regression".
        fraction: Share of the rows of each class (of all rows, in a regression) that is kept for validation.
        rng: Draws the rows.
        weights: (R,) of the rows, above 0, or None.

    Raises:
        UserError: The table cannot be trained on.
    """
    both, target = with_target(frame, y)
    raw = replace(make_raw("table", both, target, task), weights=weights)
    strata = y if task == "classification" else np.zeros(len(y), np.int64)
    held = np.zeros(len(y), bool)
    for value in np.unique(strata):
        rows = rng.permutation(np.flatnonzero(strata == value))
        held[rows[: min(round(fraction * len(rows)), len(rows) - 1)]] = True
    train = raw.rows(np.flatnonzero(~held))
    return train, raw.rows(np.flatnonzero(held)) if held.any() else train
