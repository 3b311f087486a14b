"""Scheduler: asynchronous successive halving over epochs, with its memory kept across restarts.

Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning"; Ray Tune's implementation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import optuna
from optuna.trial import TrialState
from ray.tune.experiment import Trial
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler

from bishop_ray._compat.ray import TuneProcesses, next_rung
from bishop_ray.config import StudyConfig
from bishop_ray.errors import UnknownName
from bishop_ray.training.job import STOP_REASON

SCHEDULERS = ("asha", "none")
SCORE = "best_val_score"
EPOCH = "epoch"
REDUCTION = 3
"""Of the trials that reach a rung, about one in so many goes on. A study keeps to the one that it began with."""
GRACE_SHARE, GRACE_LEAST = 10, 2
"""The first rung is at this part of the epochs, and at this epoch at least."""
NO_CONTROLLER: Any = None
"""ASHA never looks at the controller."""


@dataclass(frozen=True)
class RungStop:
    """Why ASHA stopped a trial: at a rung its score was below the cut-off.

    Attributes:
        rung: The rung's index, 0 for the first.
        epoch: The rung's epoch.
        cutoff: The quantile of the scores that other trials had there by then.
        score: The trial's own.
    """

    rung: int
    epoch: int
    cutoff: float
    score: float


class Asha(AsyncHyperBandScheduler):
    """ASHA that stands by a decision to stop.

    Its rungs hear every trial once. An interrupted trial goes on from the checkpoint before its last report and
    repeats that report, which would pass by the rung that has it from `replay`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._stops: dict[str, RungStop | None] = {}

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """A trial joins a bracket, or comes back to it: one that lost its process is a new trial of Tune's."""
        super().on_trial_add(tune_controller, _named(trial))

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """A trial ended."""
        super().on_trial_complete(tune_controller, _named(trial), result)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        """A trial left before it ran."""
        super().on_trial_remove(tune_controller, _named(trial))

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """STOP or CONTINUE; a trial that ends by itself is not stopped, since it still has its model to save."""
        trial = _named(trial)
        if result.get(STOP_REASON):
            super().on_trial_result(tune_controller, trial, result)
            return str(TrialScheduler.CONTINUE)
        if trial.trial_id not in self._stops:
            # Asked first: afterwards the trial's own score is among those that make the cut-off.
            rung = next_rung(self, trial.trial_id, int(result.get(EPOCH, 0)))
            decision: str = super().on_trial_result(tune_controller, trial, result)
            if decision != TrialScheduler.STOP:
                return decision
            self._stops[trial.trial_id] = _rung_stop(rung, float(result[SCORE]))
        return TrialScheduler.STOP

    def rung_stop(self, number: int) -> RungStop | None:
        """Why the trial of this number is to be stopped, None for one that goes on."""
        return self._stops.get(_id_of(number))


def rung_stop(scheduler: TrialScheduler, number: int) -> RungStop | None:
    """Why a scheduler stops a trial: see `Asha.rung_stop`; None from one that stops none."""
    return scheduler.rung_stop(number) if isinstance(scheduler, Asha) else None


def _rung_stop(rung: tuple[int, int, float | None] | None, score: float) -> RungStop | None:
    if rung is None or rung[2] is None:
        return None
    return RungStop(rung[0], rung[1], rung[2], score)


def _id_of(number: int) -> str:
    return f"trial-{number}"


def _named(trial: Any) -> Any:
    """The trial under its number in the study, which stays, in place of Tune's id."""
    config = getattr(trial, "config", None)
    return SimpleNamespace(trial_id=_id_of(config["number"])) if config else trial


class PerModel(FIFOScheduler):
    """Hands each trial to the scheduler of its model: rounds of boosting are not epochs, and models are not compared.

    Args:
        schedulers: By model.
    """

    def __init__(self, schedulers: Mapping[str, TrialScheduler]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._schedulers = schedulers
        self._controller: Any = None

    def abandon(self) -> None:
        """Ends the processes of all trials at once and gives their resources back.

        Tune does so when a search ends, but not when it is interrupted: the slots stay taken for as long as anybody
        holds the exception, as notebooks do, and the next search in the process waits for them for ever.
        """
        if self._controller is not None:
            TuneProcesses(self._controller).end()

    def give_up(self, trial: Any, reason: str) -> None:
        """Fails a trial that does not answer: its process is killed, and it is not tried again."""
        TuneProcesses(self._controller).fail(trial, reason)

    def waiting(self) -> list[Any]:
        """Trials that Ray has no room for."""
        if self._controller is None:
            return []
        pending = [trial for trial in self._controller.get_live_trials() if trial.status == Trial.PENDING]
        starting = TuneProcesses(self._controller).starting(pending)
        return [trial for trial in pending if trial not in starting]

    def _of(self, trial: Any) -> TrialScheduler:
        return self._schedulers[trial.config["model"]]

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        """The first waiting trial whose process is not starting yet: a process that became free goes to it.

        Tune's own choice, the first waiting trial, would take the free process and drop the one that starts: with
        trials shorter than the start of a process, further slots would never come into use. Tune also lets one trial
        wait at a time; meant are those that wait for resources, so that processes start side by side.
        """
        self._controller = tune_controller
        waiting = [trial for trial in tune_controller.get_trials() if trial.status == Trial.PENDING]
        processes = TuneProcesses(tune_controller)
        starting = processes.starting(waiting)
        processes.let_wait(len(starting) + 1)
        return next((trial for trial in waiting if trial not in starting), None)

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """A trial joins its model's bracket."""
        self._of(trial).on_trial_add(tune_controller, trial)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """A trial failed."""
        self._of(trial).on_trial_error(tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """STOP or CONTINUE, as the model's scheduler says."""
        return str(self._of(trial).on_trial_result(tune_controller, trial, result))

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """A trial ended."""
        self._of(trial).on_trial_complete(tune_controller, trial, result)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        """A trial left before it ran."""
        self._of(trial).on_trial_remove(tune_controller, trial)

    def debug_string(self) -> str:
        """For Tune's own tables, which are not shown."""
        return f"{len(self._schedulers)} schedulers"


def _grace_period(max_epochs: int, share: int, least: int) -> int:
    return min(max_epochs, max(least, math.ceil(max_epochs / share)))


def stopping_rule(scheduler: str, max_epochs: int) -> dict[str, int | str]:
    """What decides which trials are stopped, as a study keeps it: reduction factor and epoch of the first rung."""
    if scheduler == "none":
        return {"reduction factor": "none", "grace period": "none"}
    return {"reduction factor": REDUCTION, "grace period": _grace_period(max_epochs, GRACE_SHARE, GRACE_LEAST)}


def unrecorded_rule(scheduler: str, max_epochs: int) -> dict[str, int | str]:
    """As `stopping_rule`, of a study that was begun before studies kept it: the constants of then, whatever is now."""
    if scheduler == "none":
        return stopping_rule(scheduler, max_epochs)
    return {"reduction factor": 3, "grace period": _grace_period(max_epochs, 10, 2)}


def make_scheduler(config: StudyConfig, study: optuna.Study) -> TrialScheduler:
    """The scheduler of a study: ASHA compares the best validation score so far, by epoch (layout.md decision 1).

    The first rung is at a tenth of the epochs (2 at least), so that a slow starter gets some time, and each further
    one at `REDUCTION` times the epoch of the one before. `stopping_rule` has both for the study. What finished
    trials reported in an earlier run fills the rungs again: a resumed study stops the trials it would have stopped.

    Raises:
        UnknownName: No such scheduler.
    """
    if config.scheduler not in SCHEDULERS:
        raise UnknownName("scheduler", config.scheduler, SCHEDULERS)
    if config.scheduler == "none":
        return FIFOScheduler()
    scheduler = Asha(
        time_attr=EPOCH,
        metric=SCORE,
        mode="max",
        # One more than the loop's own limit: a trial that uses all its epochs ends by itself and is complete.
        max_t=config.max_epochs + 1,
        grace_period=_grace_period(config.max_epochs, GRACE_SHARE, GRACE_LEAST),
        reduction_factor=REDUCTION,
    )
    for past in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
        stand_in: Any = SimpleNamespace(trial_id=f"earlier-{past.number}")
        scheduler.on_trial_add(NO_CONTROLLER, stand_in)
        replay(scheduler, stand_in, past.intermediate_values)
    return scheduler


def replay(scheduler: TrialScheduler, trial: Any, values: dict[int, float]) -> None:
    """Tells the scheduler what a trial had reported before this process began."""
    for epoch in sorted(values):
        scheduler.on_trial_result(NO_CONTROLLER, trial, {EPOCH: epoch, SCORE: values[epoch]})
