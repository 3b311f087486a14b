"""Ray Tune searcher backed by Optuna studies.

Our own thin searcher over Optuna's ask/tell (https://optuna.readthedocs.io, "Ask-and-Tell Interface"): Ray's
OptunaSearch tells an early-stopped trial as complete and leaves a failed one running for ever. The study is the one
record of a search; the classes here only ask, ``callback.py`` tells.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.samplers import BaseSampler
from optuna.trial import Trial, TrialState
from ray.tune.search import Searcher

from bishop_ray._compat.optuna import take_up
from bishop_ray.config import Params
from bishop_ray.search.allocation import Standing, SuccessiveHalving
from bishop_ray.search.placement import Node, ResourceRequest, TooLarge
from bishop_ray.search.space import OUTSIDE, SearchSpace, flatten, unflatten
from bishop_ray.search.study import PARAMS, best_of

GIVE_UP = 100
"""A model whose points are refused so often in a row is not asked for more: its space has none that fits."""
PATIENCE = 1.0
"""Seconds of refusing points after which the trials that run are looked after."""
REFUSED = object()
Place = Callable[[Params], ResourceRequest | TooLarge]


class TrialSource:
    """Hands out the points of one study: interrupted trials first, then new ones.

    Args:
        study: The Optuna study.
        space: What to suggest.
        sampler: Makes the sampler of the n-th trial. A fresh one per trial, seeded by study and trial number, makes
            a resumed study suggest what the undisturbed one would have.
    """

    def __init__(self, study: optuna.Study, space: SearchSpace, sampler: Callable[[int], BaseSampler]) -> None:
        self._study = study
        self._space = space
        self._sampler = sampler
        trials = study.get_trials(deepcopy=False)
        self.interrupted = [t.number for t in trials if t.state == TrialState.RUNNING]
        self.asked: dict[int, Trial] = {}
        self.refused = 0
        """Points in a row that could run nowhere."""

    @property
    def started(self) -> int:
        """Trials begun so far, in this run or an earlier one."""
        return sum(t.state != TrialState.WAITING for t in self._study.get_trials(deepcopy=False))

    @property
    def searchable(self) -> bool:
        """Whether a further trial could differ: a space without ranges has one point, and some fit nowhere at all."""
        return self.refused < GIVE_UP and (bool(self._space.searched) or self.started < max(1, len(self._space.first)))

    def ask(self) -> tuple[int, Params]:
        """Number and parameters of the next trial."""
        if self.interrupted:
            number = self.interrupted.pop(0)
            self._study.sampler = self._sampler(number)  # its process may have died before all was drawn
            trial = take_up(self._study, number)
        else:
            self._study.sampler = self._sampler(self.started)
            trial = self._study.ask()
        self.asked[trial.number] = trial
        return trial.number, self._params(trial)

    def standing(self, name: str, running: int) -> Standing:
        """Where the study stands in a race."""
        best = best_of(self._study)
        return Standing(
            name, len(self.interrupted), self.started, running, best[1] if best else -math.inf, self.searchable
        )

    def _params(self, trial: Trial) -> Params:
        if PARAMS in trial.user_attrs:
            return unflatten(json.loads(trial.user_attrs[PARAMS]))
        point = flatten(self._space.suggest(trial)) | json.loads(trial.user_attrs.get(OUTSIDE, "{}"))
        # Constants are no part of Optuna's parameters: the whole point is kept, so that any trial can be run again.
        trial.set_user_attr(PARAMS, json.dumps(point))
        return unflatten(point)


@dataclass(frozen=True)
class Suggestion:
    """A trial that was asked for and has its place: number and parameters in the study of `model`."""

    model: str
    number: int
    params: Params
    ask: ResourceRequest


class ModelSearcher(Searcher):
    """One searcher over a study per model.

    A point that needs more than is free now is held back, and no other of its kind of slot is begun before it: small
    trials would else pass it by for ever. Tune itself then never waits for resources with a trial's clock running.

    Args:
        askers: By model.
        races: By kind of slot: who gets a slot of that kind.
        slots: Trials at a time by kind of slot.
        total: Trials that all studies together shall have.
        limit: Seconds a trial may take, asked with the models that wait for the kind's slots in this round and the
            number of those slots; 0 for no limit, negative when no further trial may begin.
        places: By model: what a point asks for; a model without one asks for nothing.
        nodes: What there is to ask for.
        refuse: Hears model, number, parameters and reason of a trial that can run nowhere.
        kills: Whether trials far over their limit are ended.
    """

    def __init__(
        self,
        askers: Mapping[str, TrialSource],
        races: Mapping[str, SuccessiveHalving],
        slots: Mapping[str, int],
        total: int,
        limit: Callable[[SuccessiveHalving, int, int], float],
        places: Mapping[str, Place] | None = None,
        nodes: Sequence[Node] = (),
        refuse: Callable[[str, int, Params, str], None] = lambda model, number, params, reason: None,
        kills: bool = False,
    ) -> None:
        super().__init__(metric=None, mode=None)
        self._askers, self._races, self._slots = askers, races, slots
        self._total, self._limit, self._kills = total, limit, kills
        self._places, self._nodes, self._refuse = places or {}, nodes, refuse
        self._live: dict[str, Suggestion] = {}
        self._held: dict[str, Suggestion] = {}

    def suggest(self, trial_id: str) -> Any:
        """The next configuration, None to be asked again, or FINISHED.

        A configuration is ``{"model", "number", "params", "ends", "seconds", "bundle"}``; ``bundle`` is what the trial
        holds, ``seconds`` the limit behind ``ends`` if a trial that does not keep to it is to be ended.
        """
        began = time.monotonic()
        while not all(self._waits(kind) for kind in self._races):
            found = self._next(trial_id)
            if found is not REFUSED:
                return found
            if time.monotonic() - began > PATIENCE:
                break
        return None  # Tune asks again at every step: no study is read for that

    def _next(self, trial_id: str) -> Any:
        """As `suggest`, or REFUSED for a point that can run nowhere."""
        running = Counter(point.model for point in self._live.values())
        standings = [asker.standing(name, running[name]) for name, asker in self._askers.items()]
        full = sum(s.started for s in standings) >= self._total
        busy = False
        for kind, race in self._races.items():
            if self._waits(kind):
                busy = True
                continue
            mine = [s for s in standings if s.name in race.names]
            held, name = self._held.get(kind), None
            if held is None:
                if full and not any(s.interrupted for s in mine):
                    continue
                if (name := race.next(mine)) is None:
                    continue
            seconds = self._limit(race, race.waiting(mine), self._slots[kind])
            if seconds < 0:
                continue
            if name is not None and (held := self._draw(name)) is None:
                return REFUSED
            assert held is not None
            self._held[kind] = held
            if self._waits(kind):
                busy = True
                continue
            self._live[trial_id] = self._held.pop(kind)
            ends = time.time() + seconds if seconds else 0.0
            bundle = held.ask.bundle()
            times = {"ends": ends, "seconds": seconds if self._kills else 0.0}
            return {"model": held.model, "number": held.number, "params": held.params, "bundle": bundle, **times}
        more = not full or bool(self._held) or any(s.interrupted for s in standings)
        return None if busy and more else str(Searcher.FINISHED)

    def _draw(self, name: str) -> Suggestion | None:
        """The model's next point, or None if it can run nowhere."""
        asker = self._askers[name]
        number, params = asker.ask()
        ask = self._places[name](params) if name in self._places else ResourceRequest()
        if isinstance(ask, TooLarge):
            asker.refused += 1
            self._refuse(name, number, params, ask.reason)
            return None
        asker.refused = 0
        return Suggestion(name, number, params, ask)

    def _waits(self, kind: str) -> bool:
        """Whether the kind has no slot free, or too little room for the point that is held back."""
        names = self._races[kind].names
        if sum(point.model in names for point in self._live.values()) >= self._slots[kind]:
            return True
        held = self._held.get(kind)
        # Where nothing runs, nothing is worth waiting for: Ray has the last word.
        if held is None or not self._live:
            return False
        return not held.ask.fits([point.ask for point in self._live.values()], self._nodes)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """The slot is free; the recorder tells the study, since only it knows why a trial ended."""
        self._live.pop(trial_id, None)

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save: the studies are on disk."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore: see `save`."""

    def __getstate__(self) -> dict[str, Any]:
        # Ray pickles the searcher beside its own state, which we never read back; storage handles do not pickle.
        return {}
