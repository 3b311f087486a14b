"""Explanation of a predictor: permutation importance, and BiSHop's attention.

Columns are the user's own. Every column is exchanged in the same orders, so its result does not depend on the others.
Letters: R rows, F columns, S repeats, K outputs.

Permutation importance is the measure, for every model. BiSHop's sparse attention is shown beside it, and never without
the check whether it says the same (Jain and Wallace 2019: attention need not explain). Letters: R rows, F columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.data.table import TaskType
from bishop_ray.errors import UserError
from bishop_ray.metrics import default_metric, evaluate
from bishop_ray.predictor.predictor import Encoded, Orders, Predictor

Floats = NDArray[np.float64]
Loss = Callable[[Floats], float]
"""(R, K) output after an exchange -> how much worse, or how different, it is."""
_CELLS = 20_000_000
"""Encoded numbers of one call of the model (80 MB); more only if the rows alone are more."""


def random_orders(rows: int, repeats: int, random: np.random.Generator) -> Orders:
    """(S, R) seeded random orders of the rows."""
    return np.stack([random.permutation(rows) for _ in range(repeats)])


def losses(
    predictor: Predictor, parts: Sequence[Encoded], columns: Sequence[str], orders: Orders, loss: Loss
) -> Floats:
    """(S,): the loss after exchanging `columns` together in each order; as many orders per call as memory allows.

    An order that changes no input costs nothing, exactly: a model's rounding may depend on how many rows it is given.
    """
    moving = np.array([any(part.moves(columns, order) for part in parts) for order in orders])
    result = np.zeros(len(orders))
    orders = orders[moving]
    cells = sum(part.x_num.size + part.x_cat.size for part in parts)
    at_once = max(1, _CELLS // max(cells, 1))
    found: list[float] = []
    for start in range(0, len(orders), at_once):
        some = orders[start : start + at_once]
        output = finite(predictor, [part.shuffled(columns, some) for part in parts])
        found += [loss(copy) for copy in output.reshape(len(some), -1, output.shape[1])]
    result[moving] = found
    return result


def finite(predictor: Predictor, parts: Sequence[Encoded]) -> Floats:
    """The (R, K) output as float64.

    Raises:
        UserError: Some row has none that is finite.
    """
    output = np.asarray(predictor.output_of(parts), np.float64)
    if bad := int((~np.isfinite(output)).any(axis=1).sum()):
        raise UserError(f"explain: {predictor.model_name} has no finite prediction for {bad} of {len(output)} rows")
    return output


def score_loss(metric: str, predictor: Predictor, y: NDArray[Any], output: Floats) -> Loss:
    """How much the metric's score (larger is better) falls.

    Raises:
        UserError: The metric is unknown, does not fit the task or is undefined for these rows.
    """
    task = predictor.task
    scale = 1.0 if task.is_classification else predictor.target.units

    def score(found: Floats) -> float:
        return evaluate(metric, task, y, found, scale=scale)

    try:
        best = score(output)
    except ModuleNotFoundError as error:  # what predicts need not have what judges
        raise UserError(f"explain: {metric} needs {error.name}: pip install scikit-learn") from error
    return lambda changed: best - score(changed)


def output_change(task: TaskType, output: Floats) -> Loss:
    """Mean over rows of how far the output moves.

    Of probabilities half the sum of all classes' absolute changes (the total variation distance, in [0, 1]: for two
    classes the change of either); of a number its absolute change, in standard deviations of the training target.
    """
    half = 0.5 if task.is_classification else 1.0
    return lambda changed: half * float(np.abs(changed - output).sum(axis=1).mean())


AGREES, DIFFERS, UNKNOWN = "agrees", "does not agree", "cannot tell"
CORRELATION = 0.5
"""Least rank correlation of "agrees"."""
WINS = 0.8
"""Least share of random sets that the columns with most attention must beat."""
LEAST_COLUMNS = 4
"""With fewer, chance alone reaches both too often."""
DRAWS = 10
"""Random sets of columns."""


@dataclass(frozen=True)
class Faithfulness:
    """Attention against permutation.

    Attributes:
        verdict: "agrees" where `correlation` is at least `CORRELATION` and `wins` at least `WINS`; "cannot tell" with
            fewer than `LEAST_COLUMNS` columns or two rows, or where all columns have the same attention or the same
            importance; else "does not agree".
        correlation: Spearman's rank correlation of the columns' attention and permutation importance; NaN if undefined.
        k: How many columns the deletion test exchanges: a third of them, rounded up.
        top_change: Mean change of the output (as `Explanation.measure` without targets) when the k columns with most
            attention are exchanged among the rows, together.
        random_change: The mean of the same over `DRAWS` other sets of k columns, drawn at random.
        wins: Share of those sets that change the output less; equal ones count half.
    """

    verdict: str
    correlation: float
    k: int
    top_change: float
    random_change: float
    wins: float


def check_attention(
    names: Sequence[str],
    weights: Floats,
    importance: Floats,
    rows: int,
    moved: Callable[[Sequence[str]], float],
    random: np.random.Generator,
) -> Faithfulness:
    """The check.

    Args:
        names: The columns.
        weights: (F,) attention.
        importance: (F,) permutation importance.
        rows: How many both are from.
        moved: How much the output changes when these columns are exchanged together.
        random: Draws the sets.
    """
    correlation = rank_correlation(weights, importance)
    k = math.ceil(len(names) / 3)
    if len(names) < LEAST_COLUMNS or rows < 2:
        return Faithfulness(UNKNOWN, correlation, k, math.nan, math.nan, math.nan)
    top = frozenset(np.argsort(-weights, kind="stable")[:k].tolist())
    known: dict[frozenset[int], float] = {}

    def change(places: frozenset[int]) -> float:
        if places not in known:
            known[places] = moved([names[place] for place in sorted(places)])
        return known[places]

    others: list[float] = []
    while len(others) < DRAWS:
        drawn = frozenset(random.choice(len(names), k, replace=False).tolist())
        if drawn != top:
            others.append(change(drawn))
    best, rest = change(top), np.array(others)
    wins = float(np.mean(best > rest) + 0.5 * np.mean(best == rest))
    verdict = AGREES if correlation >= CORRELATION and wins >= WINS else DIFFERS
    if math.isnan(correlation):
        verdict = UNKNOWN
    return Faithfulness(verdict, correlation, k, best, float(rest.mean()), wins)


def rank_correlation(one: Floats, other: Floats) -> float:
    """Spearman's: Pearson's correlation of the ranks, ties sharing theirs; NaN where either is constant."""
    if len(one) < 2 or np.ptp(one) == 0 or np.ptp(other) == 0:
        return math.nan
    ranks = [pd.Series(values).rank().to_numpy() for values in (one, other)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


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
            ``models/bishop/attribution.py`` for what is averaged. None of other models.
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
