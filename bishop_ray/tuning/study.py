"""One study: search, final evaluation, registration. Run again, it goes on where it was."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from ray import tune
from ray.tune import Tuner
from ray.tune.stopper import Stopper

from bishop_ray.config import StudyConfig, StudyResult
from bishop_ray.errors import TrainingFailed
from bishop_ray.tracking import StudyTracker
from bishop_ray.training.worker import DRIVER_CPUS, TrialSettings, train_driver
from bishop_ray.tuning.chronicle import finish, finished_result, open_tracker, start_over
from bishop_ray.tuning.evaluate import evaluation_seconds, final_evaluation
from bishop_ray.tuning.prepare import Loaded, Prepared, load, prepare
from bishop_ray.tuning.recorder import Progress, StudyRecorder
from bishop_ray.tuning.scheduler import make_scheduler
from bishop_ray.tuning.searcher import StudySearcher
from bishop_ray.tuning.space import SearchSpace, load_space
from bishop_ray.tuning.store import OpenStudy, exclusive, open_study, sampler_factory
from bishop_ray.tuning.trials import best_of, count_states, params_of

FINISH_SECONDS = 8.0
"""Kept of a time budget for loading, scoring and registering the winner."""


class StudyFailed(Exception):
    """A study without a single usable trial; the message says why."""


class _Deadline(Stopper):
    """Ends the search while there is still time for the final evaluation."""

    def __init__(self, ends: Callable[[], float]) -> None:
        self._ends = ends

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        """Whether the search must end now."""
        return time.time() > self._ends()

    def __getstate__(self) -> dict[str, Any]:
        return {}


def run_study(
    config: StudyConfig,
    listener: Callable[[Progress], None] = lambda progress: None,
    deadline: float = 0.0,
    loaded: Loaded | None = None,
) -> StudyResult:
    """Searches, evaluates once, registers.

    Args:
        config: The study; the same one again continues, or returns the stored result when it is finished.
        listener: Called in this thread whenever something happened.
        deadline: Unix time by which all of it must have ended, 0 for none.
        loaded: What `load` answered for this study, if it was called before.

    Raises:
        UserError: Bad input, before anything is written.
        StudyFailed: No trial gave a score.
    """
    space = load_space(config.space, config.model)
    loaded = loaded or load(config)
    config, prepared = replace(config, metric=loaded.config.metric), prepare(loaded)
    with exclusive(config):
        if config.fresh:
            start_over(config)
        opened = open_study(config, space, prepared.fingerprint)
        if (stored := finished_result(config, opened)) is not None:
            return stored
        return _run(config, space, prepared, opened, listener, deadline)


def _run(
    config: StudyConfig,
    space: SearchSpace,
    prepared: Prepared,
    opened: OpenStudy,
    listener: Callable[[Progress], None],
    deadline: float,
) -> StudyResult:
    started = time.time()
    tracker = open_tracker(config, space, prepared, opened)
    status = "FAILED"
    try:
        settings = TrialSettings(
            config.model, config.metric, config.max_epochs, config.seed, config.resources, config.trainer,
            str(opened.folder), ray.put(prepared.data),
        )  # fmt: skip
        best = best_of(opened.study)
        progress = Progress(config.trials, config.metric, count_states(opened.study), best[1] if best else None)
        _search(config, space, opened, settings, tracker, progress, listener, deadline)
        best = best_of(opened.study)
        if best is None:
            raise StudyFailed(_why_none(opened))
        progress.last = f"final evaluation of trial {best[0]} with {config.eval_seeds} seed(s)"
        listener(progress)
        params = params_of(opened.study, best[0])
        try:
            final = final_evaluation(config, settings, prepared, best[0], params, deadline, opened.count_test_opening)
        except TrainingFailed as error:
            raise StudyFailed(str(error)) from error
        result = finish(config, prepared, opened, tracker, best, final, opened.add_seconds(time.time() - started))
        status = "FINISHED"
        return result
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        if status != "FINISHED":
            opened.add_seconds(time.time() - started)
        tracker.close(status)


def _search(
    config: StudyConfig,
    space: SearchSpace,
    opened: OpenStudy,
    settings: TrialSettings,
    tracker: StudyTracker,
    progress: Progress,
    listener: Callable[[Progress], None],
    deadline: float,
) -> None:
    """Runs the trials that are still missing."""
    missing = config.trials - progress.counts.total()
    if missing <= 0:
        return
    searcher = StudySearcher(opened.study, space, config.trials, sampler_factory(config))
    remote = settings.through_ray_train
    scheduler = make_scheduler(config, opened.study)
    recorder = StudyRecorder(opened.study, searcher.asked, scheduler, tracker, progress, listener, settings)
    resources = {"cpu": DRIVER_CPUS} if remote else {"cpu": config.resources.cpus, "gpu": config.resources.gpus}
    stopper = _Deadline(lambda: _search_ends(config, opened, recorder, deadline)) if deadline else None
    attempt = f"tune-{uuid.uuid4().hex[:8]}"
    try:
        Tuner(
            tune.with_resources(tune.with_parameters(train_driver, settings=settings), resources),
            tune_config=tune.TuneConfig(
                search_alg=searcher,
                scheduler=scheduler,
                num_samples=missing,
                max_concurrent_trials=config.max_concurrent,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name=attempt, storage_path=str(opened.folder), callbacks=[recorder], verbose=0, stop=stopper
            ),
        ).fit()
        recorder.end_running()
    finally:
        # Tune's and Train's own state is never read back: the study is the record.
        shutil.rmtree(opened.folder / attempt, ignore_errors=True)
        shutil.rmtree(opened.folder / "train", ignore_errors=True)


def _search_ends(config: StudyConfig, opened: OpenStudy, recorder: StudyRecorder, deadline: float) -> float:
    """The moment after which no trial may run: what the final evaluation of the best trial so far will need is kept."""
    best = best_of(opened.study)
    if best is not None:
        longest = float(opened.study.get_trials(deepcopy=False)[best[0]].user_attrs.get("seconds", 0.0))
    else:
        longest = recorder.longest_running()
    ends = deadline - FINISH_SECONDS - evaluation_seconds(config, recorder.through_ray_train, longest * 1.2)
    if time.time() > ends:
        recorder.stopping = "time budget"
    return ends


def _why_none(opened: OpenStudy) -> str:
    reasons = [t.user_attrs.get("reason", "") for t in opened.study.get_trials(deepcopy=False)]
    shown = sorted({reason for reason in reasons if reason})
    return "no trial gave a score: " + ("; ".join(shown[:3]) or "no time was left for the first epoch")
