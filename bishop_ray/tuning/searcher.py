"""Ray Tune asks, the Optuna study answers.

Our own thin searcher over Optuna's ask/tell (https://optuna.readthedocs.io, "Ask-and-Tell Interface"): Ray's
OptunaSearch tells an early-stopped trial as complete and leaves a failed one running for ever. The study is the one
record of a search; this class only asks, ``recorder.py`` tells.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import optuna
from optuna.samplers import BaseSampler
from optuna.trial import Trial, TrialState
from ray.tune.search import Searcher

from bishop_ray.config import Params
from bishop_ray.tuning.space import SearchSpace, flatten, unflatten

PARAMS = "params"


class StudySearcher(Searcher):
    """Hands out the points of a study: interrupted trials first, then new ones, until `total` trials exist.

    Args:
        study: The Optuna study.
        space: What to suggest.
        total: Number of trials the study shall have.
        sampler: Makes the sampler of the n-th trial. A fresh one per trial, seeded by study and trial number, makes
            a resumed study suggest what the undisturbed one would have.
    """

    def __init__(
        self, study: optuna.Study, space: SearchSpace, total: int, sampler: Callable[[int], BaseSampler]
    ) -> None:
        super().__init__(metric=None, mode=None)
        self._study = study
        self._space = space
        self._total = total
        self._sampler = sampler
        trials = study.get_trials(deepcopy=False)
        self._interrupted = [t.number for t in trials if t.state == TrialState.RUNNING]
        self.asked: dict[int, Trial] = {}

    def suggest(self, trial_id: str) -> Any:
        """The next configuration ``{"number", "params"}``, or FINISHED."""
        started = sum(t.state != TrialState.WAITING for t in self._study.get_trials(deepcopy=False))
        if self._interrupted:
            number = self._interrupted.pop(0)
            trial = Trial(self._study, self._study.get_trials(deepcopy=False)[number]._trial_id)
        elif started < self._total:
            self._study.sampler = self._sampler(started)
            trial = self._study.ask()
        else:
            return str(Searcher.FINISHED)
        self.asked[trial.number] = trial
        return {"number": trial.number, "params": self._params(trial)}

    def _params(self, trial: Trial) -> Params:
        if PARAMS in trial.user_attrs:
            return unflatten(json.loads(trial.user_attrs[PARAMS]))
        params = self._space.suggest(trial)
        # Constants are no part of Optuna's parameters: the whole point is kept, so that any trial can be run again.
        trial.set_user_attr(PARAMS, json.dumps(flatten(params)))
        return params

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Nothing: the recorder tells the study, since only it knows why a trial ended."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save: the study is on disk."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore: see `save`."""

    def __getstate__(self) -> dict[str, Any]:
        # Ray pickles the searcher beside its own state, which we never read back; storage handles do not pickle.
        return {}
