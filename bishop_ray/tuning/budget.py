"""How a time budget is shared: by the trials of a search over several models, and by what comes after them."""

from __future__ import annotations

import time
from collections.abc import Callable

from bishop_ray.tuning.race import Race

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

    def limit(self, race: Race, waiting: int, slots: int) -> float:
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
