"""Explanation of a predictor: permutation importance per column, and BiSHop's sparse attention beside it.

Importance is scikit-learn's `permutation_importance`, for every model, on the user's own columns. Attention says where
the network looks and is no importance (Jain and Wallace 2019). Letters: R rows, F columns, K outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.errors import UserError
from bishop_ray.metrics import default_metric, evaluate
from bishop_ray.predictor.predictor import Encoded, Predictor

Floats = NDArray[np.float64]
BISHOP = "bishop"
"""Its name in the registry of models."""


@dataclass(frozen=True)
class Explanation:
    """What predictions depend on.

    Attributes:
        importances: A row per column of the schema, the most important first: ``feature``, ``importance`` (mean over
            the repeats of what `measure` names) and ``sd`` (standard deviation over the repeats, NaN of one).
        measure: "loss of METRIC" with targets: how much the metric gets worse, negative where it gets better by chance;
            else "change of the probabilities" (mean total variation distance, 0 to 1) or "change of the standardised
            prediction" (mean absolute change, in standard deviations of the training target).
        rows: How many were used.
        repeats: Exchanges per column.
        attention: Only of BiSHop: ``feature``, ``weight`` (sum 1, the mean over the rows) and ``inputs`` (how many of
            the network's inputs the column became: a date has many, and the sum of their weights). See
            ``models/bishop/attribution.py`` for what is averaged. None of other models.
    """

    importances: pd.DataFrame
    measure: str
    rows: int
    repeats: int
    attention: pd.DataFrame | None = None


@dataclass(frozen=True)
class _Exchanged:
    """Predictor as an estimator of scikit-learn, for rows that are encoded once.

    Its X (R, F) holds row numbers: column f's value of row i is taken from row X[i, f]. A column is encoded row by row
    and alone, so this is the same as exchanging the values in the table, and nothing is encoded twice.
    """

    predictor: Predictor
    parts: Sequence[Encoded]
    names: Sequence[str]

    def fit(self, *_: object) -> None:
        """Only there because scikit-learn asks for it: the predictor is fitted."""

    def predict(self, rows: NDArray[np.int64]) -> Floats:
        """The (R, K) output as float64.

        Raises:
            UserError: Some row has none that is finite.
        """
        by_name = dict(zip(self.names, rows.T, strict=True))
        output = np.asarray(self.predictor.output_of([part.taken(by_name) for part in self.parts]), np.float64)
        if bad := int((~np.isfinite(output)).any(axis=1).sum()):
            name = self.predictor.model_name
            raise UserError(f"explain: {name} has no finite prediction for {bad} of {len(output)} rows")
        return output


def explain(
    predictor: Predictor,
    frame: pd.DataFrame,
    target: pd.Series | str | Sequence[Any] | None,
    *,
    metric: str,
    repeats: int,
    max_rows: int,
    seed: int,
) -> Explanation:
    """See `Predictor.explain`."""
    for name, value in (("repeats", repeats), ("max_rows", max_rows)):
        if value < 1:
            raise UserError(f"explain: expected {name} of at least 1; found {value}")
    if not len(frame):
        raise UserError("explain: expected rows; found a table without any")
    if metric and target is None:
        raise UserError(f"explain: metric {metric!r} needs the rows' targets; found none")
    values = _targets(frame, target)
    rows = _sample(len(frame), max_rows, seed)
    parts = predictor.encoded(frame.iloc[rows])
    names = [name for name, _ in predictor.schema]
    if values is None:
        y = None
        measure = f"change of the {'probabilities' if predictor.task.is_classification else 'standardised prediction'}"
    else:
        y = predictor.target.encode(values.iloc[rows])
        metric = metric or predictor.metric or default_metric(predictor.task, suite=False)
        measure = f"loss of {metric}"
    found = _importances(_Exchanged(predictor, parts, names), len(rows), y, metric, repeats, seed)
    spread = found.std(axis=1, ddof=1) if repeats > 1 else np.full(len(names), np.nan)
    table = pd.DataFrame({"feature": names, "importance": found.mean(axis=1), "sd": spread})
    attention = column_attention(predictor, parts, names)
    return Explanation(_largest_first(table, "importance"), measure, len(rows), repeats, attention)


def _importances(model: _Exchanged, rows: int, y: NDArray[Any] | None, metric: str, repeats: int, seed: int) -> Floats:
    """(F, repeats): how much worse the metric gets or, without targets, how far the output moves.

    The latter is the mean over rows of, for probabilities, half the sum of all classes' absolute changes (the total
    variation distance), for a number its absolute change.

    Raises:
        UserError: The metric is unknown, does not fit the task or is undefined for these rows.
    """
    task, scale = model.predictor.task, 1.0
    if not task.is_classification:
        scale = model.predictor.target.units
    order = np.tile(np.arange(rows)[:, None], (1, len(model.names)))

    def score(_: object, taken: NDArray[np.int64], truth: NDArray[Any]) -> float:
        return evaluate(metric, task, truth, model.predict(taken), scale=scale)

    def closeness(_: object, taken: NDArray[np.int64], output: Floats) -> float:
        half = 0.5 if task.is_classification else 1.0
        return -half * float(np.abs(model.predict(taken) - output).sum(axis=1).mean())

    try:  # what predicts need not have what explains
        from sklearn.inspection import permutation_importance

        truth, scoring = (model.predict(order), closeness) if y is None else (y, score)
        found = permutation_importance(model, order, truth, scoring=scoring, n_repeats=repeats, random_state=seed)
    except ModuleNotFoundError as error:
        raise UserError(f"explain: needs {error.name}: pip install scikit-learn") from error
    return np.asarray(found.importances, np.float64)


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
    from bishop_ray.models.bishop.attribution import feature_weights
    from bishop_ray.models.bishop.model import BiSHop

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


def _largest_first(table: pd.DataFrame, by: str) -> pd.DataFrame:
    return table.sort_values(by, ascending=False, kind="stable", ignore_index=True)


def _sample(count: int, most: int, seed: int) -> NDArray[np.int64]:
    """All positions, or a sorted sample of them."""
    random = np.random.Generator(np.random.PCG64(seed))
    return np.arange(count) if count <= most else np.sort(random.choice(count, most, replace=False))


def _targets(frame: pd.DataFrame, target: pd.Series | str | Sequence[Any] | None) -> pd.Series | None:
    """(R,) the rows' targets.

    Raises:
        UserError: No such column, or not a value per row.
    """
    if target is None:
        return None
    if isinstance(target, str):
        places = [place for place, name in enumerate(frame.columns) if str(name) == target]
        if len(places) != 1:
            raise UserError(f"explain: expected one target column {target!r} in the table; found {len(places)}")
        return frame.iloc[:, places[0]]
    series = target if isinstance(target, pd.Series) else pd.Series(list(target), index=frame.index)
    if len(series) != len(frame):
        raise UserError(f"explain: expected a target for each of {len(frame)} rows; found {len(series)}")
    if not series.index.equals(frame.index):
        raise UserError("explain: expected a target with the index of the table; found another (see Series.set_axis)")
    return series
