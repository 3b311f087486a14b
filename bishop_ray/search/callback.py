"""Ray Tune callback that records trials in the Optuna study and in MLflow.

A Tune callback (https://docs.ray.io/en/latest/tune/api/callbacks.html), called in the driver. Optuna's study is the
record that counts; MLflow gets the same facts through the tracker's queue.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import optuna
from optuna.trial import Trial, TrialState
from ray.tune import Callback
from ray.tune.schedulers import TrialScheduler

from bishop_ray._compat.ray import forget_averages, release_group
from bishop_ray.config import NO_LIMIT, Params
from bishop_ray.errors import StorageFull
from bishop_ray.metrics import display
from bishop_ray.search.scheduler import SCORE, RungStop, replay, rung_stop
from bishop_ray.search.study import STOPPED, kept_models, stopped_tags
from bishop_ray.training.job import PREDICTOR, STOP_REASON, TrialSettings, model_folder, trial_folder
from bishop_ray.training.ray_train import RESTARTS
from bishop_ray.training.system import GPU_PEAK, PEAK
from bishop_ray.training.trainable import FAILURE, FULL, last_error


class TrialTracker(Protocol):
    """Takes what happens to trials."""

    def trial_started(self, number: int, params: dict[str, Any]) -> None:
        """A trial begins or goes on."""

    def trial_reported(self, number: int, step: int, metrics: dict[str, float]) -> None:
        """One epoch's numbers."""

    def study_reported(self, step: int, metrics: dict[str, float]) -> None:
        """The study's own curve over finished trials."""

    def trial_finished(
        self, number: int, status: str, reason: str, summary: dict[str, float], tags: dict[str, str]
    ) -> None:
        """A trial ended: FINISHED, KILLED or FAILED."""


@dataclass
class Progress:
    """Where a study stands, for the live table.

    Attributes:
        total: Trials asked for, 0 where nothing limits their number.
        metric: Selection metric.
        counts: Trials by state: running, complete, pruned, failed.
        best: Best validation score so far, or None.
        epochs: Epochs reported in all.
        last: The last event in words.
    """

    total: int
    metric: str
    counts: Counter[str] = field(default_factory=Counter)
    best: float | None = None
    epochs: int = 0
    last: str = ""

    @property
    def finished(self) -> int:
        """Trials that ended, in whatever way."""
        return self.counts["complete"] + self.counts["pruned"] + self.counts["failed"]

    @property
    def share(self) -> str:
        """``3/8``, or ``3`` where nothing limits the number of trials."""
        return f"{self.finished}/{self.total}" if 0 < self.total < NO_LIMIT else str(self.finished)


_CAUSES = ("exit code", "killed", "node", "out of memory", "oom", "preempt")
_BOOKKEEPING = {
    "timestamp", "training_iteration", "time_this_iter_s", "time_total_s", "time_since_restore", "pid", "epoch",
    "iterations_since_restore", "done", "should_checkpoint",
}  # fmt: skip


def curves(result: dict[str, Any]) -> dict[str, float]:
    """One epoch's numbers under the names of MLflow's charts: ``epoch/...`` first, then ``layers/...`` by kind."""
    numbers = {name: float(value) for name, value in result.items() if is_metric(name, value)}
    for once in ("workers", "best_epoch", PEAK, GPU_PEAK):
        numbers.pop(once, None)
    return {
        f"layers/{name}" if "/" in name else f"epoch/{name.removeprefix('epoch_')}": value
        for name, value in numbers.items()
    }


def is_metric(name: str, value: Any) -> bool:
    """Whether a key of a Tune result is a number of ours rather than Tune's bookkeeping."""
    if name in _BOOKKEEPING or name.startswith("config/"):
        return False
    return isinstance(value, int | float) and not isinstance(value, bool)


def error_reason(trial: Any) -> str:
    """What killed a trial's process, or the error it raised, e.g. ``OutOfMemoryError: CUDA out of memory``."""
    path = trial.error_file
    if not path:
        return "its process died"
    with open(path, encoding="utf-8", errors="replace") as file:
        # Of several failures the last one.
        text = file.read().rsplit("Failure # ", 1)[-1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(line.startswith(("The actor ", "The worker ", "The node ")) for line in lines):
        causes = [line for line in lines if any(word in line.lower() for word in _CAUSES)]
        return (causes or lines[1:] or lines)[-1][:300]
    return last_error(lines)


EARLY_STOPPED, TIME_BUDGET = "early-stopped", "time budget"
HANG_SECONDS = 60.0
"""The least that a trial over its time limit may be silent."""


class StudyCallback(Callback):
    """Tells the study, the tracker and the listener what Tune reports.

    Args:
        study: The Optuna study.
        asked: Trial number -> Optuna trial, filled by the searcher.
        scheduler: Hears what an interrupted trial had reported before.
        tracker: The MLflow side.
        progress: Updated in place.
        listener: Called after each change.
        settings: What trials share: where they keep checkpoints, whether they use Ray Train worker groups.
        again: Has a trial begun again that lost its process.
    """

    def __init__(
        self,
        study: optuna.Study,
        asked: dict[int, Trial],
        scheduler: TrialScheduler,
        tracker: TrialTracker,
        progress: Progress,
        listener: Callable[[Progress], None],
        settings: TrialSettings,
        again: Callable[[int], None],
    ) -> None:
        self._study = study
        self._asked = asked
        self._scheduler = scheduler
        self._tracker = tracker
        self._progress = progress
        self._listener = listener
        self._settings = settings
        self._running: dict[int, tuple[float, Any]] = {}
        self._past = {t.number: dict(t.intermediate_values) for t in study.get_trials(deepcopy=False)}
        self._again = again
        self._deaths: Counter[int] = Counter()
        self._spent: defaultdict[int, float] = defaultdict(float)
        self._heard: dict[int, float] = {}
        self._given_up: dict[int, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Ray pickles callbacks beside its own state, which is never read back.
        return {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial got its resources."""
        number = trial.config["number"]
        if number in self._running:
            return
        self._heard[number] = time.monotonic()
        self._running[number] = (time.monotonic(), trial)
        replay(self._scheduler, trial, self._past.get(number, {}))
        self._tracker.trial_started(number, self._settings.all_params(trial.config["params"]))
        self._changed(f"trial {number} started", running=1)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """One epoch ended."""
        if FAILURE in result or SCORE not in result:
            return
        number, epoch = trial.config["number"], int(result["epoch"])
        self._heard[number] = time.monotonic()
        if epoch not in self._past.setdefault(number, {}):
            self._asked[number].report(float(result[SCORE]), epoch)
            self._past[number][epoch] = float(result[SCORE])
        self._tracker.trial_reported(number, epoch, curves(result))
        self._progress.epochs += 1
        if math.isfinite(result[SCORE]):
            before = self._progress.best
            self._progress.best = result[SCORE] if before is None else max(result[SCORE], before)
        self._changed(f"trial {number} epoch {epoch}: {self._shown(result[SCORE])}")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial ended by itself or was stopped."""
        result = trial.last_result or {}
        if FULL in result:
            raise StorageFull(self._settings.folder)  # the trial stays open, and the search ends
        if FAILURE in result:
            self._ended(trial, TrialState.FAIL, str(result[FAILURE]))
        elif result.get(STOP_REASON):
            self._ended(trial, TrialState.COMPLETE, str(result[STOP_REASON]), result)
        else:
            self._stopped(trial, EARLY_STOPPED)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial was given up, or its process or node died: then it goes on in another one, unless that is no use.

        Tune's own restarts forget a trial whose process dies while it is being started.
        """
        number = trial.config["number"]
        if reason := self._given_up.pop(number, ""):
            self._ended(trial, TrialState.FAIL, reason)
            return
        reason = error_reason(trial)
        if "preempt" not in reason.lower():
            self._deaths[number] += 1
        if self._deaths[number] > RESTARTS:
            self._ended(trial, TrialState.FAIL, f"its process died {self._deaths[number]} times: {reason}")
            return
        if self._settings.through_ray_train:
            release_group(trial.trial_id)
        began, _ = self._running.pop(number, (time.monotonic(), None))
        self._spent[number] += time.monotonic() - began
        self._again(number)
        words = f"trial {number} lost its process or node and goes on from its checkpoint: {reason}"
        self._changed(words, running=-1)

    def overdue(self) -> list[tuple[Any, str]]:
        """Trials that hang, with the reason: over their limit, and silent for as long again."""
        found = []
        for number, (began, trial) in self._running.items():
            limit, now = float(trial.config["seconds"]), time.monotonic()
            silent = now - self._heard[number]
            grace = max(limit, HANG_SECONDS)
            if limit and number not in self._given_up and min(silent, now - began - limit) > grace:
                self._given_up[number] = (
                    f"hung: over the limit of {limit:.0f} s, and no report for {silent:.0f} s (--trial-time-limit)"
                )
                found.append((trial, self._given_up[number]))
        return found

    def waiting(self, text: str) -> None:
        """Something that lasts keeps a trial from starting."""
        self._changed(text)

    def refuse(self, number: int, params: Params, reason: str) -> None:
        """A trial that can run nowhere has failed before it began; it is seen wherever failed trials are."""
        self._tracker.trial_started(number, self._settings.all_params(params))
        self._progress.counts.update(running=1)
        self._end(number, TrialState.FAIL, reason, {})

    def end_running(self) -> None:
        """Ends what ran when the time budget stopped the whole search: Tune tells no callback of it.

        A trial that had reported nothing stays open in the study, for the next run.
        """
        for number, (_, trial) in list(self._running.items()):
            if self._past.get(number):
                # One that has saved its model had ended, but for Tune's noticing.
                ended = (model_folder(self._settings.folder, number) / PREDICTOR).is_dir()
                reason = (trial.last_result or {}).get(STOP_REASON) if ended else ""
                if reason:
                    self._ended(trial, TrialState.COMPLETE, str(reason), trial.last_result)
                else:
                    self._stopped(trial, TIME_BUDGET)
            elif self._settings.through_ray_train:
                release_group(trial.trial_id)

    def release(self) -> None:
        """Gives back what the worker groups of trials held that are left as they are."""
        if self._settings.through_ray_train:
            for _, trial in self._running.values():
                release_group(trial.trial_id)

    def _stopped(self, trial: Any, otherwise: str) -> None:
        """A trial was stopped: by the scheduler, which says at which rung, or else for the reason that is given."""
        stop = rung_stop(self._scheduler, trial.config["number"])
        self._ended(trial, TrialState.PRUNED, EARLY_STOPPED if stop else otherwise, trial.last_result, stop)

    def _ended(
        self, trial: Any, state: TrialState, reason: str, result: Any = None, stop: RungStop | None = None
    ) -> None:
        if self._settings.through_ray_train:
            release_group(trial.trial_id)
        self._end(trial.config["number"], state, reason, result or {}, stop)

    def _end(
        self, number: int, state: TrialState, reason: str, result: dict[str, Any], stop: RungStop | None = None
    ) -> None:
        # A trial that ended is never resumed: 200 checkpoints would fill a disk.
        shutil.rmtree(trial_folder(self._settings, number), ignore_errors=True)
        seconds = self._spent[number] + time.monotonic() - self._running.pop(number, (time.monotonic(), None))[0]
        asked = self._asked[number]
        asked.set_user_attr("reason", reason)
        asked.set_user_attr("seconds", round(seconds, 3))
        if (stopped := asdict(stop) if stop else {}) or STOPPED in asked.user_attrs:  # of a process killed right here
            asked.set_user_attr(STOPPED, stopped)
        value = float(result[SCORE]) if state == TrialState.COMPLETE else None
        self._study.tell(number, value, state=state)
        self._keep_models()
        status = {TrialState.COMPLETE: "FINISHED", TrialState.PRUNED: "KILLED"}.get(state, "FAILED")
        summary = {"seconds": seconds}
        if SCORE in result:
            summary |= {"best_val_score": float(result[SCORE]), "best_epoch": float(result["best_epoch"])}
            summary |= {"epochs": float(result["epoch"]), "workers": float(result["workers"])}
            summary |= {name: float(result[name]) for name in (PEAK, GPU_PEAK) if name in result}
        self._tracker.trial_finished(number, status, reason, summary, stopped_tags(stopped))
        name = {"FINISHED": "complete", "KILLED": "pruned"}.get(status, "failed")
        if self._progress.best is not None:
            self._tracker.study_reported(self._progress.finished + 1, {"best_val_score": self._progress.best})
        words = f"trial {number} {name} ({reason})" + (f": {self._shown(result[SCORE])}" if SCORE in result else "")
        self._changed(words, **{"running": -1, name: 1})

    def _keep_models(self) -> None:
        """Removes the models of all trials but the best `KEPT`: ensembles need no more, and disks are finite."""
        keep = {folder for _, _, folder in kept_models(self._study, self._settings.folder)}
        running = {model_folder(self._settings.folder, number) for number in self._running}
        for folder in model_folder(self._settings.folder, 0).parent.glob("*"):
            if folder not in keep | running:
                shutil.rmtree(folder, ignore_errors=True)

    @property
    def through_ray_train(self) -> bool:
        """Whether trials run in Ray Train worker groups."""
        return self._settings.through_ray_train

    def longest_running(self) -> float:
        """Seconds since the oldest trial that still runs began, 0 if none does."""
        return time.monotonic() - min((began for began, _ in self._running.values()), default=time.monotonic())

    def _shown(self, score: float) -> str:
        return f"{display(self._progress.metric, score):.4f}"

    def _changed(self, event: str, **counts: int) -> None:
        self._progress.last = event
        self._progress.counts.update(counts)
        self._listener(self._progress)


class StudyCallbacks(Callback):
    """The recorder of each trial's model.

    Args:
        recorders: By model.

    Attributes:
        full: That no space was left, once it was so. Tune would take the error for one of the trial that it is told of,
            and go on: the search has to look here.
    """

    def __init__(self, recorders: Mapping[str, StudyCallback]) -> None:
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
        forget_averages(trial)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial's process or node died, or it was given up."""
        self._tell("on_trial_error", iteration, trials, trial, **info)
        forget_averages(trial)
