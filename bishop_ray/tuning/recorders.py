"""The recorders of several models' studies, as the one callback of a search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.tune import Callback

from bishop_ray.errors import StorageFull
from bishop_ray.tuning.recorder import StudyRecorder


class Recorders(Callback):
    """The recorder of each trial's model.

    Args:
        recorders: By model.

    Attributes:
        full: That no space was left, once it was so. Tune would take the error for one of the trial that it is told of,
            and go on: the search has to look here.
    """

    def __init__(self, recorders: Mapping[str, StudyRecorder]) -> None:
        self._recorders = recorders
        self.full: StorageFull | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Ray pickles callbacks beside its own state, which is never read back.
        return {}

    def _tell(self, event: str, iteration: int, trials: list[Any], trial: Any, *result: Any, **info: Any) -> None:
        try:
            getattr(self._recorders[trial.config["model"]], event)(iteration, trials, trial, *result, **info)
        except StorageFull as error:
            self.full = self.full or error

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial got its resources."""
        self._tell("on_trial_start", iteration, trials, trial, **info)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """One epoch or chunk of rounds ended."""
        self._tell("on_trial_result", iteration, trials, trial, result, **info)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial ended by itself or was stopped."""
        self._tell("on_trial_complete", iteration, trials, trial, **info)
        _forget(trial)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial's process or node died, or it was given up."""
        self._tell("on_trial_error", iteration, trials, trial, **info)
        _forget(trial)


def _forget(trial: Any) -> None:
    """Frees the averages that Tune keeps of every metric of every trial: most of what a driver would grow by."""
    metadata = trial.run_metadata
    metadata.metric_analysis.clear()
    metadata.metric_n_steps.clear()
    metadata.invalidate_cache()
