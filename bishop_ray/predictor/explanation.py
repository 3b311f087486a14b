"""What a fitted model's predictions depend on, column by column: `Predictor.explain`.

Permutation importance is the measure, for every model. BiSHop's sparse attention is shown beside it, and never without
the check whether it says the same (Jain and Wallace 2019: attention need not explain). Letters: R rows, F columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.errors import UserError
from bishop_ray.metrics import default_metric
from bishop_ray.predictor.faithfulness import Faithfulness, check_attention
from bishop_ray.predictor.gaze import column_attention
from bishop_ray.predictor.permutation import finite, losses, output_change, random_orders, score_loss
from bishop_ray.predictor.single import Predictor

_CHECK_ROWS = 1000
"""Exchanged rows from which one exchange per set of columns is enough for the deletion test."""


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
            ``models/bishop/attention.py`` for what is averaged. None of other models.
        faithfulness: Whether `attention` says what `importances` says; there whenever `attention` is.
    """

    importances: pd.DataFrame
    measure: str
    rows: int
    repeats: int
    attention: pd.DataFrame | None = None
    faithfulness: Faithfulness | None = None


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
    random = np.random.Generator(np.random.PCG64(seed))
    values = _targets(frame, target)
    rows = _sample(len(frame), max_rows, random)
    frame = frame.iloc[rows]
    parts = predictor.encoded(frame)
    output = finite(predictor, parts)
    change = output_change(predictor.task, output)
    if values is None:
        loss = change
        measure = f"change of the {'probabilities' if predictor.task.is_classification else 'standardised prediction'}"
    else:
        y = predictor.target.encode(values.iloc[rows])
        metric = metric or predictor.metric or default_metric(predictor.task, suite=False)
        loss, measure = score_loss(metric, predictor, y, output), f"loss of {metric}"
    names = [name for name, _ in predictor.schema]
    orders = random_orders(len(rows), repeats, random)
    found = np.stack([losses(predictor, parts, [name], orders, loss) for name in names])  # (F, S)
    importance = found.mean(axis=1)
    spread = found.std(axis=1, ddof=1) if repeats > 1 else np.full(len(names), np.nan)
    table = pd.DataFrame({"feature": names, "importance": importance, "sd": spread})
    attention = column_attention(predictor, parts, names)
    check = None
    if attention is not None:
        few = orders[: max(1, _CHECK_ROWS // len(rows))]

        def moved(columns: Sequence[str]) -> float:
            return float(losses(predictor, parts, columns, few, change).mean())

        weights = attention.set_index("feature")["weight"].loc[names].to_numpy()
        check = check_attention(names, weights, importance, len(rows), moved, random)
    return Explanation(_largest_first(table, "importance"), measure, len(rows), repeats, attention, check)


def _largest_first(table: pd.DataFrame, by: str) -> pd.DataFrame:
    return table.sort_values(by, ascending=False, kind="stable", ignore_index=True)


def _sample(count: int, most: int, random: np.random.Generator) -> NDArray[np.int64]:
    """All positions, or a sorted sample of them."""
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
