"""Does attention say what permutation says? Two checks and one word. Letters: F columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]

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
