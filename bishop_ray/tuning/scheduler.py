"""ASHA over the epochs of a study, with its memory kept across restarts.

Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning"; Ray Tune's implementation.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import optuna
from optuna.trial import TrialState
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler

from bishop_ray.config import StudyConfig
from bishop_ray.errors import UnknownName

SCHEDULERS = ("asha", "none")
SCORE = "best_val_score"
EPOCH = "epoch"
REDUCTION = 3
NO_CONTROLLER: Any = None
"""ASHA never looks at the controller."""


def make_scheduler(config: StudyConfig, study: optuna.Study) -> TrialScheduler:
    """The scheduler of a study: ASHA compares the best validation score so far, by epoch (layout.md decision 1).

    The first rung is at a tenth of the epochs (2 at least), so that a slow starter gets some time. What finished
    trials reported in an earlier run fills the rungs again: a resumed study stops the trials it would have stopped.

    Raises:
        UnknownName: No such scheduler.
    """
    if config.scheduler not in SCHEDULERS:
        raise UnknownName("scheduler", config.scheduler, SCHEDULERS)
    if config.scheduler == "none":
        return FIFOScheduler()
    scheduler = AsyncHyperBandScheduler(
        time_attr=EPOCH,
        metric=SCORE,
        mode="max",
        # One more than the loop's own limit: a trial that uses all its epochs ends by itself and is complete.
        max_t=config.max_epochs + 1,
        grace_period=min(config.max_epochs, max(2, math.ceil(config.max_epochs / 10))),
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
