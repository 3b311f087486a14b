"""Train, validation and test splits: random, stratified, by group, by time, and the paper's protocols.

Only the raw 64-bit stream of PCG64 decides the order. numpy keeps that stream stable across versions, unlike
`Generator.permutation`; and the table's index plays no part.

Letters: G groups, K classes (1 for regression), P parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.data.refs import DatasetRef
from bishop_ray.data.table import RawDataset, Split
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


Counts = NDArray[np.float64]
_TRAIN, _PARTS = 0, 3
_DIGITS = 9
"""Costs that agree so far are equal: sums may round differently from machine to machine."""
_SWAPPED = 300
"""Groups up to which pairs are tried for a swap."""


class NoSplit(Exception):
    """The groups cannot be divided; the message says why."""


def assign_groups(counts: NDArray[np.int64], fractions: Sequence[float]) -> Rows:
    """The part (G,) of each group: 0 train, 1 validation, 2 test.

    Greedy: in the order given, each group goes where it brings sizes and classes nearest to their shares; then groups
    move, and a few hundred at most change places, as long as that comes nearer. Every part has a group, train has
    every class.

    Args:
        counts: (G, K) rows of each class in each group, in a drawn order.
        fractions: Shares of train, validation and test.

    Raises:
        NoSplit: Fewer than three groups, or no division with every class in train was found.
    """
    if len(counts) < _PARTS:
        raise NoSplit(f"expected at least {_PARTS} groups; found {len(counts)}")
    state = _State(counts, np.asarray(fractions, np.float64))
    for group in range(len(counts)):
        state.put(group, int(np.argmin(state.costs(group))))
    state.fill_parts()
    state.complete_train()
    state.improve()
    return state.places


class _State:
    """A division in the making, and what it costs: squared distances of shares from those wanted.

    Every class counts alike, however rare, and the number of rows as much as all classes together.
    """

    def __init__(self, counts: NDArray[np.int64], fractions: Counts) -> None:
        self.counts = counts
        totals = counts.sum(axis=0)
        known = counts[:, totals > 0] / totals[totals > 0]  # shares of a class
        rows = counts.sum(axis=1, keepdims=True) / totals.sum()
        self.shares = np.hstack([rows * np.sqrt(known.shape[1]), known])  # (G, 1 + K)
        self.wanted = fractions[:, None] * self.shares.sum(axis=0)  # (P, 1 + K)
        self.weight = 1 / fractions
        self.held = np.zeros_like(self.wanted)
        self.places = np.full(len(counts), -1, np.int64)
        self.in_train = np.zeros(counts.shape[1], np.int64)  # groups of train with a class
        self.groups = np.zeros(_PARTS, np.int64)

    def costs(self, group: int) -> Counts:
        """(P,) what it costs to have `group`, which is nowhere now, in each part; rounded."""
        share = self.shares[group]
        added: Counts = (share * (share + 2 * (self.held - self.wanted))).sum(axis=1) * self.weight
        return added.round(_DIGITS)

    def put(self, group: int, part: int) -> None:
        """Rows `group`, or moves it."""
        if (before := int(self.places[group])) >= 0:
            self._count(group, before, -1)
        self._count(group, part, 1)
        self.places[group] = part

    def _count(self, group: int, part: int, sign: int) -> None:
        self.held[part] += sign * self.shares[group]
        self.groups[part] += sign
        if part == _TRAIN:
            self.in_train += sign * (self.counts[group] > 0)

    def move_costs(self, group: int) -> Counts:
        """(P,) what each place of `group` costs beside staying: 0 at its own."""
        place = int(self.places[group])
        self.held[place] -= self.shares[group]
        costs = self.costs(group)
        self.held[place] += self.shares[group]
        found: Counts = (costs - costs[place]).round(_DIGITS)
        return found

    def may_leave(self, group: int) -> bool:
        """Whether its part can do without it: it is not empty then, and train keeps its classes."""
        place = int(self.places[group])
        alone = place == _TRAIN and bool((self.in_train[self.counts[group] > 0] < 2).any())
        return self.groups[place] > 1 and not alone

    def fill_parts(self) -> None:
        """Gives every empty part the group that costs least there."""
        for part in range(_PARTS):
            if not self.groups[part]:
                free = [g for g in range(len(self.places)) if self.groups[self.places[g]] > 1]
                self.put(min(free, key=lambda g: self.move_costs(g)[part]), part)

    def complete_train(self) -> None:
        """Brings a group of every class into train.

        Raises:
            NoSplit: Whatever was tried leaves a class out.
        """
        for kind in np.flatnonzero((self.in_train == 0) & (self.counts.sum(axis=0) > 0)):
            if self.in_train[kind]:
                continue
            holders = np.flatnonzero(self.counts[:, kind] > 0).tolist()
            if free := [g for g in holders if self.groups[self.places[g]] > 1]:
                self.put(min(free, key=lambda g: self.move_costs(g)[_TRAIN]), _TRAIN)
                continue
            group = holders[0]  # the only one of its part: another one must take its place
            part = int(self.places[group])
            self.put(group, _TRAIN)
            others = [g for g in np.flatnonzero(self.places == _TRAIN).tolist() if g != group and self.may_leave(g)]
            if not others:
                raise NoSplit("expected groups of which some can be left for validation and test; found none")
            self.put(min(others, key=lambda g: self.move_costs(g)[part]), part)

    def improve(self) -> None:
        """Moves and swaps groups while that comes nearer, a bounded number of times."""
        for _ in range(_PARTS):
            changed = self._moves()
            if len(self.places) <= _SWAPPED:
                changed |= self._swaps()
            if not changed:
                return

    def _moves(self) -> bool:
        changed = False
        for group in range(len(self.places)):
            costs = self.move_costs(group)
            best = int(np.argmin(costs))
            if costs[best] < 0 and self.may_leave(group):
                self.put(group, best)
                changed = True
        return changed

    def _swaps(self) -> bool:
        changed = False
        for group in range(len(self.places)):
            place = int(self.places[group])
            step = self.shares - self.shares[group]  # (G, 1 + K): what `place` gains
            mine, theirs = self.held[place] - self.wanted[place], (self.held - self.wanted)[self.places]
            costs = (step * (step + 2 * mine)).sum(axis=1) * self.weight[place]
            costs += (step * (step - 2 * theirs)).sum(axis=1) * self.weight[self.places]
            costs = np.round(costs, _DIGITS)
            costs[self.places == place] = 0
            for other in np.argsort(costs, kind="stable")[:5].tolist():
                if costs[other] < 0 and self._swap(group, other):
                    changed = True
                    break
        return changed

    def _swap(self, one: int, other: int) -> bool:
        """Exchanges two groups of different parts, unless train would lose a class."""
        first, second = int(self.places[one]), int(self.places[other])
        self.put(one, second)
        self.put(other, first)
        if (self.in_train[self.counts.sum(axis=0) > 0] > 0).all():
            return True
        self.put(one, first)
        self.put(other, second)
        return False


def by_time(time: NDArray[np.float64], sizes: Sequence[int]) -> list[Rows] | None:
    """Positions of the rows of train, validation and test; None where there are fewer than three different times.

    Rows of one time stay together. So the parts have the sizes asked for only where no time spans a border; otherwise
    the border moves to the nearest end of a time.

    Args:
        time: (R,) finite.
        sizes: Rows of train, validation and test.
    """
    order = np.argsort(time, kind="stable").astype(np.int64)
    ends = np.flatnonzero(np.diff(time[order])) + 1  # a part may end before these positions
    if len(ends) < 2:
        return None
    wanted = sizes[0], sizes[0] + sizes[1]
    first, second = (int(np.argmin(np.abs(ends - border))) for border in wanted)
    if first == second:  # one time spans a whole part: the second-best end for one of the borders
        pairs = [(a, b) for a, b in ((first - 1, first), (first, first + 1)) if a >= 0 and b < len(ends)]
        first, second = min(pairs, key=lambda pair: sum(abs(ends[i] - w) for i, w in zip(pair, wanted, strict=True)))
    return list(np.split(order, [ends[first], ends[second]]))
