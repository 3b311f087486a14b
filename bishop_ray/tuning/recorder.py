"""What happens to trials, told to the study, to MLflow and to whoever watches.

A Tune callback (https://docs.ray.io/en/latest/tune/api/callbacks.html), called in the driver. Optuna's study is the
record that counts; MLflow gets the same facts through the tracker's queue.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import optuna
from optuna.trial import Trial, TrialState
from ray.tune import Callback
from ray.tune.schedulers import TrialScheduler

from bishop_ray.config import Params
from bishop_ray.errors import StorageFull
from bishop_ray.metrics import display
from bishop_ray.training.groups import RESTARTS, release_group
from bishop_ray.training.memory import GPU_PEAK, PEAK
from bishop_ray.training.trial import PREDICTOR, STOP_REASON, TrialSettings, model_folder, trial_folder
from bishop_ray.training.worker import FAILURE, FULL
from bishop_ray.tuning.progress import Progress, curves, error_reason
from bishop_ray.tuning.scheduler import SCORE, replay
from bishop_ray.tuning.told import TrialTracker
from bishop_ray.tuning.trials import kept_models

EARLY_STOPPED = "early-stopped"
HANG_SECONDS = 60.0
"""The least that a trial over its time limit may be silent."""


class StudyRecorder(Callback):
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
        self.stopping = EARLY_STOPPED
        """Why a trial that is stopped from now on is stopped."""

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
            self._ended(trial, TrialState.PRUNED, self.stopping, result)

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
        """Ends what ran when the whole search was stopped: Tune tells no callback of it.

        A trial that had reported nothing stays open in the study, for the next run.
        """
        for number, (_, trial) in list(self._running.items()):
            if self._past.get(number):
                # One that has saved its model had ended, but for Tune's noticing.
                ended = (model_folder(self._settings.folder, number) / PREDICTOR).is_dir()
                reason = (trial.last_result or {}).get(STOP_REASON) if ended else ""
                state = TrialState.COMPLETE if reason else TrialState.PRUNED
                self._ended(trial, state, str(reason or self.stopping), trial.last_result)
            elif self._settings.through_ray_train:
                release_group(trial.trial_id)

    def release(self) -> None:
        """Gives back what the worker groups of trials held that are left as they are."""
        if self._settings.through_ray_train:
            for _, trial in self._running.values():
                release_group(trial.trial_id)

    def _ended(self, trial: Any, state: TrialState, reason: str, result: dict[str, Any] | None = None) -> None:
        if self._settings.through_ray_train:
            release_group(trial.trial_id)
        self._end(trial.config["number"], state, reason, result or {})

    def _end(self, number: int, state: TrialState, reason: str, result: dict[str, Any]) -> None:
        # A trial that ended is never resumed: 200 checkpoints would fill a disk.
        shutil.rmtree(trial_folder(self._settings, number), ignore_errors=True)
        seconds = self._spent[number] + time.monotonic() - self._running.pop(number, (time.monotonic(), None))[0]
        asked = self._asked[number]
        asked.set_user_attr("reason", reason)
        asked.set_user_attr("seconds", round(seconds, 3))
        value = float(result[SCORE]) if state == TrialState.COMPLETE else None
        self._study.tell(number, value, state=state)
        self._keep_models()
        status = {TrialState.COMPLETE: "FINISHED", TrialState.PRUNED: "KILLED"}.get(state, "FAILED")
        summary = {"seconds": seconds}
        if SCORE in result:
            summary |= {"best_val_score": float(result[SCORE]), "best_epoch": float(result["best_epoch"])}
            summary |= {"epochs": float(result["epoch"]), "workers": float(result["workers"])}
            summary |= {name: float(result[name]) for name in (PEAK, GPU_PEAK) if name in result}
        self._tracker.trial_finished(number, status, reason, summary)
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
