"""Ray Tune asks, the Optuna studies answer.

Our own thin searcher over Optuna's ask/tell (https://optuna.readthedocs.io, "Ask-and-Tell Interface"): Ray's
OptunaSearch tells an early-stopped trial as complete and leaves a failed one running for ever. The study is the one
record of a search; the classes here only ask, ``recorder.py`` tells.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import optuna
from optuna.samplers import BaseSampler
from optuna.trial import Trial, TrialState
from ray.tune.search import Searcher

from bishop_ray.config import Params
from bishop_ray.tuning.race import Race, Standing
from bishop_ray.tuning.space import OUTSIDE, SearchSpace, flatten, unflatten
from bishop_ray.tuning.trials import PARAMS, best_of


class StudyAsker:
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

    @property
    def started(self) -> int:
        """Trials begun so far, in this run or an earlier one."""
        return sum(t.state != TrialState.WAITING for t in self._study.get_trials(deepcopy=False))

    @property
    def searchable(self) -> bool:
        """Whether a further trial could differ: a space without ranges has one point."""
        return bool(self._space.searched) or self.started < max(1, len(self._space.first))

    def ask(self) -> tuple[int, Params]:
        """Number and parameters of the next trial."""
        if self.interrupted:
            number = self.interrupted.pop(0)
            trial = Trial(self._study, self._study.get_trials(deepcopy=False)[number]._trial_id)
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


class RaceSearcher(Searcher):
    """One searcher over a study per model.

    Args:
        askers: By model.
        races: By kind of slot: who gets a slot of that kind.
        slots: Trials at a time by kind of slot.
        total: Trials that all studies together shall have.
        limit: Seconds a trial may take, asked with the models that wait for the kind's slots in this round and the
            number of those slots; 0 for no limit, negative when no further trial may begin.
    """

    def __init__(
        self,
        askers: Mapping[str, StudyAsker],
        races: Mapping[str, Race],
        slots: Mapping[str, int],
        total: int,
        limit: Callable[[Race, int, int], float],
    ) -> None:
        super().__init__(metric=None, mode=None)
        self._askers, self._races, self._slots = askers, races, slots
        self._total, self._limit = total, limit
        self._live: dict[str, str] = {}

    def suggest(self, trial_id: str) -> Any:
        """The next configuration ``{"model", "number", "params", "ends"}``, None to be asked again, or FINISHED."""
        running = Counter(self._live.values())
        if all(sum(running[name] for name in race.names) >= self._slots[kind] for kind, race in self._races.items()):
            return None  # Tune asks again at every step: no study is read for that
        standings = [asker.standing(name, running[name]) for name, asker in self._askers.items()]
        full = sum(s.started for s in standings) >= self._total
        busy = False
        for kind, race in self._races.items():
            if sum(running[name] for name in race.names) >= self._slots[kind]:
                busy = True
                continue
            mine = [s for s in standings if s.name in race.names]
            if full and not any(s.interrupted for s in mine):
                continue
            if (name := race.next(mine)) is None:
                continue
            seconds = self._limit(race, race.waiting(mine), self._slots[kind])
            if seconds < 0:
                continue
            self._live[trial_id] = name
            number, params = self._askers[name].ask()
            ends = time.time() + seconds if seconds else 0.0
            return {"model": name, "number": number, "params": params, "ends": ends}
        more = not full or any(s.interrupted for s in standings)
        return None if busy and more else str(Searcher.FINISHED)

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
