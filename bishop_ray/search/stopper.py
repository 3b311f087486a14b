"""Ray Tune stopper: time budget, hanging trials, trials that wait for resources."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ray.tune.stopper import Stopper

from bishop_ray._compat.ray import available_by_node
from bishop_ray.search.callback import StudyCallback, StudyCallbacks
from bishop_ray.search.scheduler import PerModel
from bishop_ray.signals import DeferredSignals

PENDING_SECONDS = 30.0
"""How long a trial waits for resources until it says so, and again."""


class SearchStopper(Stopper):
    """Asked by Tune many times a second: ends the search when told so, gives up what hangs, says what waits.

    Args:
        scheduler: Knows the trials.
        recorders: By model.
        callback: Hears of trials, and knows when no space is left.
        over: True ends the search.
        held: Ctrl-C that came meanwhile.
    """

    def __init__(
        self,
        scheduler: PerModel,
        recorders: Mapping[str, StudyCallback],
        callback: StudyCallbacks,
        over: Callable[[], bool] | None,
        held: DeferredSignals,
    ) -> None:
        self._scheduler, self._recorders, self._callback, self._over = scheduler, recorders, callback, over
        self._held = held
        self._waiting: dict[str, float] = {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """No trial is stopped for what it reports."""
        return False

    def stop_all(self) -> bool:
        """Whether the search must end now.

        Raises:
            StorageFull: No space was left for the record or for a trial's model.
            KeyboardInterrupt: Ctrl-C came since the last call.
        """
        self._held.release()
        if self._callback.full is not None:
            raise self._callback.full
        for recorder in self._recorders.values():
            for trial, reason in recorder.overdue():
                self._scheduler.give_up(trial, reason)
        self._tell_who_waits()
        return self._over is not None and self._over()

    def _tell_who_waits(self) -> None:
        now, pending = time.monotonic(), self._scheduler.waiting()
        self._waiting = {trial.trial_id: self._waiting.get(trial.trial_id, now) for trial in pending}
        for trial in pending:
            if now - self._waiting[trial.trial_id] > PENDING_SECONDS:
                self._waiting[trial.trial_id] = now
                self._recorders[trial.config["model"]].waiting(why_waiting(trial.config))

    def __getstate__(self) -> dict[str, Any]:
        return {}


def why_waiting(config: dict[str, Any]) -> str:
    """What a trial asks for, and what is free on the node that has most of it."""
    asked = {name: amount for name, amount in config["bundle"].items() if amount}
    free = available_by_node().values()
    best: dict[str, float] = max(
        free, key=lambda node: sum(node.get(n, 0.0) >= amount for n, amount in asked.items()), default={}
    )
    words = [f"{_amount(name, asked[name])} ({_amount(name, best.get(name, 0.0))} free)" for name in asked]
    return f"trial {config['number']} waits for {', '.join(words)}"


def _amount(name: str, value: float) -> str:
    return f"{value / 1e9:.1f} GB memory" if name == "memory" else f"{value:g} {name}"
