"""Which part of a split each group goes to, so that no group lies in two parts.

Letters: G groups, K classes (1 for regression), P parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.float64]
Places = NDArray[np.int64]

_TRAIN, _PARTS = 0, 3
_DIGITS = 9
"""Costs that agree so far are equal: sums may round differently from machine to machine."""
_SWAPPED = 300
"""Groups up to which pairs are tried for a swap."""


class NoSplit(Exception):
    """The groups cannot be divided; the message says why."""


def assign_groups(counts: NDArray[np.int64], fractions: Sequence[float]) -> Places:
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
        """Places `group`, or moves it."""
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
