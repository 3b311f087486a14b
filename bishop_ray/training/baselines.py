"""Baseline scores: the constant prediction and a linear model on the same rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bishop_ray.data.table import Table, TableSpec
from bishop_ray.metrics import evaluate

RIDGE_PENALTY = 1e-3
"""L2 penalty of the linear regression: small enough to be least squares, large enough for collinear columns."""
LOGISTIC_C = 1.0
"""Inverse L2 penalty of the logistic regression; without one it has no solution on separable classes."""


def reference_scores(
    train: Table, test: Table, spec: TableSpec, metric: str, *, scale: float = 1.0
) -> dict[str, float]:
    """Scores (larger is better) of a constant and of a linear model fitted on `train`.

    Args:
        train: Rows to fit on; the linear model heeds their weights. The constant does not, as no score does.
        test: Rows to score; the caller says which.
        spec: The table's spec.
        metric: A name that ``metrics.find_metric`` knows.
        scale: As in ``metrics.evaluate``.

    Returns:
        ``mean``: training mean, or class frequencies, for every row. ``linear``: ridge (penalty `RIDGE_PENALTY`) or
        multinomial logistic regression (C = `LOGISTIC_C`) on numbers standardised with training statistics and one-hot
        codes.
    """
    predictions = {"mean": _constant(train, test, spec), "linear": _linear(train, test, spec)}
    return {
        name: evaluate(metric, spec.task, test.y, prediction, scale=scale) for name, prediction in predictions.items()
    }


def _constant(train: Table, test: Table, spec: TableSpec) -> NDArray[np.float64]:
    """(R, K): the same row for every test row."""
    if spec.task.is_classification:
        row = np.bincount(train.y.astype(np.int64), minlength=spec.n_out) / len(train)
    else:
        row = np.array([train.y.mean(dtype=np.float64)])
    return np.tile(row, (len(test), 1))


def _linear(train: Table, test: Table, spec: TableSpec) -> NDArray[np.float64]:
    """(R, K) probabilities or (R, 1) values of the linear model."""
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.pipeline import make_pipeline

    if not spec.task.is_classification:
        ridge = make_pipeline(_encoder(spec), Ridge(alpha=RIDGE_PENALTY, tol=1e-8))
        ridge.fit(_features(train), train.y.astype(np.float64), ridge__sample_weight=train.weight)
        return np.asarray(ridge.predict(_features(test)), dtype=np.float64).reshape(-1, 1)
    if len(np.unique(train.y)) == 1:
        return _constant(train, test, spec)
    logistic = make_pipeline(_encoder(spec), LogisticRegression(C=LOGISTIC_C, max_iter=5000))
    logistic.fit(_features(train), train.y, logisticregression__sample_weight=train.weight)
    full = np.zeros((len(test), spec.n_out))
    full[:, logistic.classes_] = logistic.predict_proba(_features(test))
    return full


def _features(rows: Table) -> NDArray[np.float64]:
    """(R, N + C): numbers, then codes (exact in float64)."""
    return np.hstack([rows.x_num.astype(np.float64), rows.x_cat.astype(np.float64)])


def _encoder(spec: TableSpec) -> Any:
    """Standardised numbers, then one-hot codes; sparse where that is smaller."""
    from sklearn.compose import ColumnTransformer
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    codes = OneHotEncoder(categories=[np.arange(cardinality) for cardinality in spec.cat_cardinalities])
    last = spec.n_num + spec.n_cat
    parts = [("num", StandardScaler(), list(range(spec.n_num))), ("cat", codes, list(range(spec.n_num, last)))]
    return ColumnTransformer([part for part in parts if part[2]])
