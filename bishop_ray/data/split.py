"""Train, validation and test rows of a table: the same on every node for the same seed.

Only the raw 64-bit stream of PCG64 decides the order. numpy keeps that stream stable across versions, unlike
`Generator.permutation`; and the table's index plays no part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.data.group_split import NoSplit, assign_groups
from bishop_ray.data.suites import DatasetRef
from bishop_ray.data.table import RawDataset, Split
from bishop_ray.data.time_split import by_time
from bishop_ray.errors import BadTable, UserError

Fractions = tuple[float, float, float]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class SplitProtocol:
    """How a dataset is split.

    Attributes:
        fractions: Shares of train, validation and test; they sum to 1.
        max_rows: Rows kept before the split, drawn by the seed; None for all.
    """

    fractions: Fractions
    max_rows: int | None = None

    def __post_init__(self) -> None:
        if len(self.fractions) != 3 or not all(f > 0 for f in self.fractions) or abs(sum(self.fractions) - 1) > 1e-9:
            raise UserError(
                f"split fractions must be three positive numbers (train, validation, test) that sum to 1; "
                f"found {', '.join(f'{f:g}' for f in self.fractions)}"
            )
        if self.max_rows is not None and self.max_rows < 3:
            raise UserError(f"the row limit must be >= 3; found {self.max_rows}")


DATASETS_I = SplitProtocol((0.7, 0.2, 0.1))
"""Single tables: 70/20/10 (paper, Datasets I; the counts of its tables, not its text)."""

DATASETS_II = SplitProtocol((0.7, 0.09, 0.21), 10_000)
"""OpenML suites: at most 10,000 rows; 70 % train, of the rest 30 % validation and 70 % test (paper, Datasets II)."""


def protocol(ref: DatasetRef, fractions: Fractions | None = None, max_rows: int | None = None) -> SplitProtocol:
    """The paper's protocol for this kind of dataset, with what the user overrides.

    Args:
        ref: OpenML tasks follow Datasets II, everything else Datasets I.
        fractions: Other shares of train, validation and test.
        max_rows: Another row limit; 0 keeps all rows.

    Raises:
        UserError: Fractions or limit that make no sense.
    """
    base = DATASETS_II if ref.kind == "openml" else DATASETS_I
    limit = base.max_rows if max_rows is None else (max_rows or None)
    return SplitProtocol(fractions or base.fractions, limit)


def split_dataset(
    raw: RawDataset, seed: int, fractions: Fractions = DATASETS_I.fractions, max_rows: int | None = None
) -> Split[RawDataset]:
    """Three disjoint parts that cover the (possibly cut) table; see `split_indices`."""
    return split_indices(raw, seed, fractions, max_rows).map(raw.rows)


def split_indices(
    raw: RawDataset, seed: int, fractions: Fractions = DATASETS_I.fractions, max_rows: int | None = None
) -> Split[NDArray[np.int64]]:
    """Row positions of the three parts: train in ascending order, validation and test in a drawn order.

    A table may be sorted by its target. Were the rows that are scored in its order, a model could read it off theirs.

    Classification is stratified, by largest remainders: the parts have the exact sizes, every class its share within
    one row. A class of three rows or more has at least one in each part, as far as the parts' sizes allow; a rarer one
    has at least one in train.

    Where rows have groups, whole groups are divided (`group_split`), so that sizes and shares are as near as these
    allow. Where they have times, train has the earliest and test the latest (`time_split`). A row limit draws rows
    first.

    Args:
        raw: The whole table, R rows.
        seed: Any integer >= 0.
        fractions: Shares of train, validation and test.
        max_rows: Rows kept before the split, or None for all.

    Raises:
        UserError: A seed below 0, or fractions that do not sum to 1.
        BadTable: A part would be empty, there are more classes than training rows, or train would lack a class.
    """
    plan = SplitProtocol(fractions, max_rows)
    if seed < 0:
        raise UserError(f"the seed must be >= 0; found {seed}")
    order = np.argsort(np.random.PCG64(seed).random_raw(len(raw)), kind="stable").astype(np.int64)
    groups = _groups(raw, order)
    kept = np.array([len(group) for group in groups])
    if plan.max_rows is not None and plan.max_rows < len(raw):
        _check_classes(raw, len(groups), plan.max_rows)
        kept = _apportion(kept, plan.max_rows)
    rows = int(kept.sum())
    sizes = [int(rows * fraction + 0.5) for fraction in plan.fractions[:2]]
    sizes.append(rows - sum(sizes))
    if min(sizes) < 1:
        raise BadTable(
            f"{raw.name}: too few rows to split: {rows} rows give train {sizes[0]}, validation {sizes[1]}, "
            f"test {max(sizes[2], 0)}; expected at least 1 in each"
        )
    _check_classes(raw, len(groups), sizes[0])
    if raw.groups is None and raw.time is None:
        train_rows, *scored = _stratified(groups, kept, sizes)
    else:
        chosen = np.concatenate([group[:count] for group, count in zip(groups, kept, strict=True)])
        # in the order drawn, whatever the classes
        train_rows, *scored = _by_role(raw, order[np.isin(order, chosen)], plan.fractions, sizes)
    # A second draw: in the order of the first, a class whose share was reached earlier would tend to come earlier.
    keys = np.random.PCG64(seed).random_raw(2 * len(raw))[len(raw) :]
    return Split(np.sort(train_rows), *(rows[np.argsort(keys[rows], kind="stable")] for rows in scored))


def _stratified(groups: list[Rows], kept: Rows, sizes: list[int]) -> list[Rows]:
    """Train, validation and test rows: of each class its share of the `kept` first ones."""
    train = _apportion(kept, sizes[0], leave=2)
    validation = _apportion(kept - train, sizes[1], leave=1)
    bounds = [np.cumsum([t, v, k - t - v]) for t, v, k in zip(train, validation, kept, strict=True)]
    parts = [[group[a:b] for group, (a, b) in zip(groups, edges, strict=True)] for edges in _edges(bounds)]
    return [np.concatenate(part) for part in parts]


def _by_role(raw: RawDataset, rows: Rows, fractions: Fractions, sizes: list[int]) -> list[Rows]:
    """Train, validation and test rows of `rows` by group or by time.

    Raises:
        BadTable: The groups or times cannot be divided, or train lacks a class.
    """
    codes = pd.factorize(raw.target, sort=False)[0][rows] if raw.task.is_classification else np.zeros(len(rows), int)
    if raw.groups is not None:
        places = pd.factorize(raw.groups[rows])[0]  # groups by their first row in the order drawn
        counts = np.zeros((places.max() + 1, codes.max() + 1), np.int64)
        np.add.at(counts, (places, codes), 1)
        try:
            part = assign_groups(counts, fractions)[places]
        except NoSplit as error:
            raise BadTable(f"{raw.name}: --groups: no split into train, validation and test: {error}") from None
        return [rows[part == number] for number in range(3)]
    assert raw.time is not None
    found = by_time(raw.time[rows], sizes)
    if found is None:
        raise BadTable(
            f"{raw.name}: --time: expected at least three different times for train, validation and test; "
            f"found {len(np.unique(raw.time[rows]))}"
        )
    late = np.setdiff1d(codes[np.concatenate(found[1:])], codes[found[0]])
    if len(late):
        label = raw.target.iloc[rows[np.argmax(codes == late[0])]]
        raise BadTable(
            f"{raw.name}: --time: expected every class of {raw.target.name!r} among the earliest {len(found[0])} rows "
            f"(train); found {label!r} in later rows only"
        )
    return [rows[positions] for positions in found]


def _edges(bounds: list[NDArray[np.int64]]) -> list[list[tuple[int, int]]]:
    """Start and end of each part within each group."""
    return [[(int(b[i - 1]) if i else 0, int(b[i])) for b in bounds] for i in range(3)]


def _groups(raw: RawDataset, order: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Shuffled row positions, one array per class in order of appearance; a single one for regression."""
    if not raw.task.is_classification:
        return [order]
    codes, uniques = pd.factorize(raw.target, sort=False)
    shuffled = codes[order]
    return [order[shuffled == code] for code in range(len(uniques))]


def _apportion(counts: NDArray[np.int64], total: int, leave: int = 0) -> NDArray[np.int64]:
    """`total` rows divided over groups in proportion to `counts` (largest remainder), never more than a group has.

    Every group gets a row and keeps `leave` for the parts that follow, where there are enough: the row is taken from
    the group that is best off.
    """
    exact = counts * (total / max(int(counts.sum()), 1))
    one = np.minimum(counts, 1 if np.count_nonzero(counts) <= total else 0)
    most = np.maximum(counts - leave, one)
    if most.sum() < total:
        most = counts
    given: NDArray[np.int64] = np.clip(np.floor(exact).astype(np.int64), one, most)
    by_remainder = np.argsort(-(exact - given), kind="stable")
    while (missing := total - int(given.sum())) > 0:
        open_groups = by_remainder[given[by_remainder] < most[by_remainder]][:missing]
        given[open_groups] += 1
    while given.sum() > total:
        given[np.argmax(given)] -= 1
    return given


def _check_classes(raw: RawDataset, classes: int, rows: int) -> None:
    if classes > rows:
        raise BadTable(
            f"{raw.name}: target column {raw.target.name!r} has {classes} classes for {rows} training rows; expected "
            f"at least one row of each (is it a number? then set the task type to regression)"
        )
