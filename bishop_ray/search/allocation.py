"""Allocation of trials and time to models: successive halving over models.

1. The default configuration of every model, in the registry's order: cheap and strong ones first.
2. Rounds. In each round every model still in the race gets twice as many new trials as in the round before (2, 4, 8,
   ...), in turn. After a round the better half by best validation score goes on, never fewer than `KEEP`; a model
   without a single score does not, unless none has one.
3. A slot that would idle while the last trials of a round still run begins the next round with the models that lead: a
   slow model's default must not let another one use up the budget.

Models that share a kind of slot (CPU or GPU) race among themselves, so that no kind of slot idles while models of the
other kind are ahead. With a single model this is a plain search.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bishop_ray.paths import write_whole

KEEP = 2
"""Models that are never dropped: the best one and its challenger."""


@dataclass(frozen=True)
class Standing:
    """Where a model stands.

    Attributes:
        name: The model.
        interrupted: Trials of an earlier run that must go on.
        started: Trials begun so far, ended ones included.
        running: Trials that run now.
        best: Best validation score of its trials, -inf without one.
        searchable: Whether a further trial could differ from those begun.
    """

    name: str
    interrupted: int
    started: int
    running: int
    best: float
    searchable: bool


class SuccessiveHalving:
    """The race of the models of one kind of slot.

    Args:
        names: The models, in the order in which their defaults are tried.
        record: File that keeps who went on after which round, so that a resumed search goes on with the same models;
            None for a race of one.
        on_round: Called with the number of a round that begins and the models in it.
    """

    def __init__(
        self,
        names: Sequence[str],
        record: Path | None = None,
        on_round: Callable[[int, Sequence[str]], None] = lambda number, names: None,
    ) -> None:
        self.names = list(names)
        self._on_round = on_round
        self._record = record
        self._survivors: list[list[str]] = [list(names)]
        if record is not None and record.is_file():
            stored = [[n for n in row if n in names] for row in json.loads(record.read_text("utf-8"))]
            # Models that an earlier run did not have get their first trial, no more.
            self._survivors += [row for row in stored if row]

    @property
    def round(self) -> int:
        """0 while defaults are tried, then from 1."""
        return len(self._survivors) - 1

    @property
    def survivors(self) -> list[str]:
        """The models still in the race."""
        return self._survivors[-1]

    def next(self, standings: Iterable[Standing]) -> str | None:
        """The model that gets the free slot, or None when none of them has anything left to try."""
        table = {s.name: s for s in standings if s.name in self.names}
        for name in self.names:
            if table[name].interrupted:
                return name
        while True:
            waiting = [table[name] for name in self._in_round(table)]
            if waiting:
                return min(waiting, key=lambda s: (s.started, self.names.index(s.name))).name
            open_ones = [table[name] for name in self.survivors if table[name].searchable]
            if not open_ones:
                return self._reserve(table)
            if any(self._in_this_round(table[name]) for name in self.survivors):
                return self._ahead(open_ones)
            self._halve(table)

    def waiting(self, standings: Iterable[Standing]) -> int:
        """Models that still have trials to begin in this round; at least 1."""
        return max(1, len(self._in_round({s.name: s for s in standings if s.name in self.names})))

    def _in_round(self, table: dict[str, Standing]) -> list[str]:
        """Who has trials of this round left; whoever has not had a first one comes before all rounds."""
        fresh = [name for name in self.names if not table[name].started and table[name].searchable]
        if fresh or not self.round:
            return fresh
        quota = _quota(self.round)
        return [name for name in self.survivors if table[name].searchable and table[name].started < quota]

    def _reserve(self, table: dict[str, Standing]) -> str | None:
        """The best of those dropped earlier, when nobody in the race can go on."""
        others = [s for s in table.values() if s.searchable]
        return max(others, key=lambda s: (s.best, -self.names.index(s.name))).name if others else None

    def _in_this_round(self, s: Standing) -> bool:
        """Whether trials of this round still run; those begun ahead do not keep it open."""
        return s.running > 0 and s.started - s.running < _quota(self.round)

    def _better_half(self, standings: Iterable[Standing]) -> list[Standing]:
        """Who would go on now, best first."""
        ranked = sorted(standings, key=lambda s: (-s.best, self.names.index(s.name)))
        scored = [s for s in ranked if s.best > -math.inf] or ranked
        return scored[: max(KEEP, math.ceil(len(ranked) / 2))]

    def _ahead(self, open_ones: list[Standing]) -> str:
        """The trial that comes next if the round ended as things stand now."""
        number = self.round
        while True:
            number += 1
            open_ones = self._better_half(open_ones)
            if waiting := [s for s in open_ones if s.started < _quota(number)]:
                return min(waiting, key=lambda s: (s.started, self.names.index(s.name))).name

    def _halve(self, table: dict[str, Standing]) -> None:
        """The better half of the present survivors begins the next round."""
        going_on = {s.name for s in self._better_half(table[n] for n in self.survivors if table[n].searchable)}
        self._survivors.append([name for name in self.names if name in going_on])
        self._on_round(self.round, self.survivors)
        if self._record is not None:
            write_whole(self._record, json.dumps(self._survivors[1:]))


def _quota(number: int) -> int:
    """Trials of a model up to the end of a round: 1, 3, 7, 15, ..."""
    return (2 << number) - 1


REFIT = 1.3
"""Seconds of a refit per second of the training it repeats: more rows, and a process to start."""


class Budget:
    """The time of one run of a search.

    Args:
        deadline: Unix time by which everything must have ended, 0 for none.
        models: How many are searched.
        refit: Seconds that a refit of the best trial so far would take, asked again and again.
    """

    def __init__(self, deadline: float, models: int, refit: Callable[[], float]) -> None:
        self.deadline = deadline
        self.began = time.time()
        # For predictions of the test rows, the ensemble, and a version per model that is registered and checked.
        self._kept = min(20.0 + 3.5 * models, (deadline - self.began) / 3) if deadline else 0.0
        self._earliest = min(deadline - self._kept, (self.began + deadline) / 2)
        self._refit = refit

    @property
    def ends(self) -> float:
        """When trials shall have ended; half of the time at least is theirs."""
        return max(self._earliest, self.deadline - self._kept - self._refit())

    def limit(self, race: SuccessiveHalving, waiting: int, slots: int) -> float:
        """Seconds for the next trial: an equal share of the time left for those that wait; defaults share a half."""
        if not self.deadline:
            return 0.0
        ends = self.ends
        left = ends - time.time()
        if left < 1:
            return -1.0
        share = left
        if race.round == 0:
            share = max(left / 10, self.began + (ends - self.began) / 2 - time.time())
        return min(left, max(2.0, share * slots / waiting))

    def over(self) -> bool:
        """Whether whatever runs must be stopped: trials end by themselves before, unless one epoch takes too long."""
        if not self.deadline or time.time() < self._earliest:  # asked at every step: no study is read before its time
            return False
        return time.time() >= self.ends + min(5.0, self._kept / 4)

    def allows(self, seconds: float) -> bool:
        """Whether that much time is left before what is kept for the end."""
        return not self.deadline or time.time() + seconds < self.deadline - self._kept / 2
