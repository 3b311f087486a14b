"""Checks for leakage: columns that give the target away, rows that repeat across splits.

A column determines the target when what was learnt from it on some rows holds on others. So an id, which "determines"
everything on the rows it was seen on, is none; the number of a row in a table sorted by its target is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.data.columns import category_codes
from bishop_ray.data.doctor.findings import NOTED, WARNED, Coded, Finding, shown

CLASS_ERROR = 0.01
"""A column determines classes when its mistakes are at most this share of those of the commonest class."""
RANK_ERROR = 0.005
"""It determines a number when it leaves at most this share of the variance of the target's ranks unexplained.

Both are far from honest columns: of 56 public tables, the best of the honest ones leave 0.08 of a class target
(analcatdata_supreme), 0.044 of a number (medical_charges); copies of the target (SGEMM's repeated runs) leave 0.001.
Ranks, since a single far value decides a plain correlation.
"""
COPIES = 0.05
"""Share of the different scored rows with an exact copy among the training rows from which a person should look."""
_FEWEST = 20
"""Scored rows (of classes: those that a guess of the commonest gets wrong) below which nothing is said."""
Rows = NDArray[np.int64]


def leaks(columns: Sequence[Coded], target: pd.Series, classes: bool, learn: Rows, check: Rows) -> list[Finding]:
    """Columns that are the target or determine it.

    Args:
        columns: All features, R rows.
        target: (R,) without missing values.
        classes: The target is a label; else a number.
        learn: Positions of the rows a relation is learnt from.
        check: Positions of the rows it must hold on.
    """
    labels, ranks = _labels(target), np.asarray(target.rank(pct=True), np.float64) if not classes else np.zeros(0)
    hashes = row_hashes(columns)
    fresh = check[~np.isin(hashes[check], hashes[learn])]
    found = []
    for column in columns:
        if not column.distinct:
            continue
        if _equals(column, target, classes):
            found.append(Finding("leak", shown(column.name), "equals the target", WARNED))
            continue
        # Values that hardly repeat say which row it is: a copied row would answer for itself.
        rows = check if column.distinct * 10 <= len(learn) else fresh
        error = _class_error(column, labels, learn, rows) if classes else _rank_error(column, ranks, learn, rows)
        if error <= (CLASS_ERROR if classes else RANK_ERROR):
            found.append(Finding("leak", shown(column.name), _words(classes, error, len(rows)), WARNED))
    return found


def copies(columns: Sequence[Coded], target: pd.Series, learn: Rows, check: Rows) -> list[Finding]:
    """Rows that repeat others: with the same target, on both sides of the split; with different targets.

    A few columns of a few values repeat by themselves: as many copies as independent columns would give are only noted.
    """
    features = row_hashes(columns)
    whole = features ^ pd.util.hash_array(_labels(target), categorize=False)
    repeated, exact = (int(pd.Series(hashes).duplicated().sum()) for hashes in (features, whole))
    found = []
    if exact:
        copied = np.isin(whole[check], whole[learn])
        # each different row counts once: one row that stands for "nothing known" may come hundreds of times
        share = len(np.unique(whole[check][copied])) / max(len(np.unique(whole[check])), 1)
        once = ~pd.Series(whole).duplicated().to_numpy()
        natural = len(learn) * float(np.prod([_coincidence(column.values[once]) for column in columns]))
        bad = copied.sum() >= _FEWEST and share >= COPIES and share > 10 * natural
        detail = (
            f"rows that repeat another one, target included: {exact:,}; scored rows with such a copy among the "
            f"training rows: {copied.sum():,} of {len(check):,}"
        )
        found.append(Finding("duplicate rows", "", detail, WARNED if bad else NOTED))
    if repeated > exact:
        detail = f"rows that repeat the features of another one with a different target: {repeated - exact:,}"
        found.append(Finding("contradicting rows", "", detail, NOTED))
    return found


def row_hashes(columns: Sequence[Coded]) -> NDArray[np.uint64]:
    """(R,) equal for rows with equal features, and else almost surely different."""
    total = np.zeros(len(columns[0].values), np.uint64)
    for column in columns:
        total = total * np.uint64(1_000_003) + pd.util.hash_array(column.values, categorize=False)
    return total


def _labels(target: pd.Series) -> NDArray[np.int64]:
    return pd.factorize(target)[0].astype(np.int64) if target.dtype.kind == "f" else category_codes(target)[0]


def _coincidence(values: NDArray[np.float64]) -> float:
    """The probability that two different rows agree in a column."""
    counts = pd.Series(values).value_counts(dropna=False).to_numpy(np.float64)
    return float((counts * (counts - 1)).sum() / max(len(values) * (len(values) - 1), 1))


def _class_error(column: Coded, y: NDArray[np.int64], learn: Rows, rows: Rows) -> float:
    """Mistakes of the column over mistakes of the commonest class, on all rows or where the column is known."""
    commonest = int(np.bincount(y[learn]).argmax())
    guess = np.full(len(rows), commonest)
    there, asked = ~np.isnan(column.values[learn]), ~np.isnan(column.values[rows])
    if not there.all():
        guess[~asked] = np.bincount(y[learn][~there]).argmax()
    if there.any():
        values, labels = _majorities(column.values[learn][there], y[learn][there])
        place, exact = _nearest(values, column.values[rows][asked])
        guess[asked] = np.where(exact | (column.kind != "category"), labels[place], commonest)
    errors = [1.0]
    for mask in (np.full(len(rows), True), asked):
        mistakes, base = (guess != y[rows])[mask].sum(), (y[rows] != commonest)[mask].sum()
        if base >= _FEWEST and mask.sum() * 2 >= len(rows):
            errors.append(float(mistakes / base))
    return min(errors)


def _rank_error(column: Coded, y: NDArray[np.float64], learn: Rows, rows: Rows) -> float:
    """Unexplained share of the variance of the target's ranks, on all rows or where the column is known."""
    mean = float(y[learn].mean())
    guess = np.full(len(rows), mean)
    there, asked = ~np.isnan(column.values[learn]), ~np.isnan(column.values[rows])
    if not there.all():
        guess[~asked] = y[learn][~there].mean()
    if there.any():
        values, place = np.unique(column.values[learn][there], return_inverse=True)
        means = np.bincount(place, y[learn][there]) / np.bincount(place)
        wanted = column.values[rows][asked]
        if column.kind == "category":
            nearest, exact = _nearest(values, wanted)
            guess[asked] = np.where(exact, means[nearest], mean)
        else:
            guess[asked] = np.interp(wanted, values, means)
    errors = [1.0]
    for mask in (np.full(len(rows), True), asked):
        spread = float(((y[rows][mask] - mean) ** 2).sum())
        if mask.sum() >= _FEWEST and mask.sum() * 2 >= len(rows) and spread > 0:
            errors.append(float(((guess - y[rows])[mask] ** 2).sum()) / spread)
    return min(errors)


def _majorities(values: NDArray[np.float64], y: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Distinct values, ascending, and the commonest class of each."""
    distinct, place = np.unique(values, return_inverse=True)
    width = int(y.max()) + 1
    pairs, counts = np.unique(place.astype(np.int64) * width + y, return_counts=True)
    order = np.lexsort((counts, pairs // width))
    last = np.flatnonzero(np.diff(np.append(pairs[order] // width, len(distinct))))
    return distinct, pairs[order][last] % width


def _nearest(values: NDArray[np.float64], wanted: NDArray[np.float64]) -> tuple[Rows, NDArray[np.bool_]]:
    """Position of the nearest of ascending `values`, and whether it is the very one."""
    right = np.clip(np.searchsorted(values, wanted), 0, len(values) - 1)
    left = np.maximum(right - 1, 0)
    place = np.where(np.abs(wanted - values[left]) < np.abs(wanted - values[right]), left, right)
    return place, values[place] == wanted


def _equals(column: Coded, target: pd.Series, classes: bool) -> bool:
    """Whether the column is the target wherever it is known, which is in half of the rows at least."""
    known = ~np.isnan(column.values)
    if known.sum() * 2 < len(known):
        return False
    if not classes:
        return column.kind == "number" and np.array_equal(column.values[known], target.to_numpy(np.float64)[known])
    codes, labels = category_codes(target)
    if column.kind == "moment" or not 2 <= column.distinct <= len(labels):
        return False
    if column.kind == "category":
        own, texts = column.values[known].astype(np.int64), list(column.texts)
    else:
        own, texts = category_codes(pd.Series(column.values[known]))
    place = {label: code for code, label in enumerate(labels)}
    return bool((np.array([place.get(text, -1) for text in texts], np.int64)[own] == codes[known]).all())


def _words(classes: bool, error: float, rows: int) -> str:
    if not classes:
        return f"gives the order of the target almost exactly (R2 of ranks {1 - error:.4f} on {rows:,} other rows)"
    share = f"with {error:.2%} of the mistakes of a guess" if error else "without a mistake"
    return f"determines the target: learnt on some rows, it gives the class of {rows:,} others {share}"
