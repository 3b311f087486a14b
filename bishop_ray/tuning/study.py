"""One study: search, final evaluation, registration. Run again, it goes on where it was."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import ray
from ray import tune
from ray.tune import Tuner
from ray.tune.stopper import Stopper

from bishop_ray.config import StudyConfig, StudyResult
from bishop_ray.errors import TrainingFailed
from bishop_ray.reports import leaderboard, to_csv
from bishop_ray.tracking import SPOOL, StudyTracker, environment, register_best, settle
from bishop_ray.training.worker import DRIVER_CPUS, TrialSettings, train_driver
from bishop_ray.tuning.evaluate import Evaluation, evaluation_seconds, final_evaluation
from bishop_ray.tuning.prepare import Loaded, Prepared, load, prepare
from bishop_ray.tuning.recorder import (
    Progress,
    StudyRecorder,
    best_of,
    count_states,
    params_of,
    trial_rows,
)
from bishop_ray.tuning.scheduler import make_scheduler
from bishop_ray.tuning.searcher import StudySearcher
from bishop_ray.tuning.space import SearchSpace, flatten, load_space
from bishop_ray.tuning.store import (
    OpenStudy,
    exclusive,
    open_study,
    remove_study,
    sampler_factory,
    stored_identity,
    study_folder,
)

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
            _start_over(config)
        opened = open_study(config, space, prepared.fingerprint)
        if (stored := _finished(config, opened)) is not None:
            return stored
        return _run(config, space, prepared, opened, listener, deadline)


def _start_over(config: StudyConfig) -> None:
    """Ends what an earlier, perhaps killed run left open in MLflow, then removes the study."""
    if identity := stored_identity(config):
        _settle(config, identity, "KILLED", "started over")
    remove_study(config)


def _finished(config: StudyConfig, opened: OpenStudy) -> StudyResult | None:
    """The stored result, if this very command ended before."""
    stored = opened.result
    if not stored or count_states(opened.study).total() < config.trials:
        return None
    if stored["eval_seeds"] != config.eval_seeds:
        return None
    _settle(config, opened.identity, "FINISHED", "finished")
    return StudyResult(**{k: v for k, v in stored.items() if k != "eval_seeds"} | {"reused": True})


def _settle(config: StudyConfig, identity: str, status: str, reason: str) -> None:
    spool = study_folder(config) / SPOOL
    settle(config.tracking_uri, config.ref.experiment, identity, spool, status, reason)


def _run(
    config: StudyConfig,
    space: SearchSpace,
    prepared: Prepared,
    opened: OpenStudy,
    listener: Callable[[Progress], None],
    deadline: float,
) -> StudyResult:
    started = time.time()
    tracker = _tracker(config, space, prepared, opened)
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
        result = _finish(config, prepared, opened, tracker, best, final, opened.add_seconds(time.time() - started))
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


def _tracker(config: StudyConfig, space: SearchSpace, prepared: Prepared, opened: OpenStudy) -> StudyTracker:
    """The study's parent run in MLflow, with everything that decides its result."""
    spec = prepared.data.spec
    params = {
        "trials": config.trials,
        "time_budget_seconds": config.time_budget,
        "max_epochs": config.max_epochs,
        "sampler": config.sampler,
        "scheduler": config.scheduler,
        "seed": config.seed,
        "eval_seeds": config.eval_seeds,
        "split": str(config.split),
        "trainer": config.trainer,
        "workers_per_trial": config.resources.workers,
        "cpus_per_worker": config.resources.cpus,
        "gpus_per_worker": config.resources.gpus,
        "max_concurrent": config.max_concurrent,
        "space": {name: str(value) for name, value in space.entries.items()},
    }
    tags = {
        "dataset": config.ref.key,
        "suite": config.ref.group,
        "model": config.model,
        "task": spec.task.value,
        "metric": config.metric,
        "search_space": space.name,
        "data_hash": prepared.fingerprint,
        "rows": "/".join(map(str, prepared.rows)),
        "columns": f"{spec.n_num} numerical, {spec.n_cat} categorical",
    }
    return StudyTracker(
        config.tracking_uri,
        config.ref.experiment,
        config.name,
        folder=opened.folder,
        study_id=opened.identity,
        params=params,
        tags=tags | environment(),
        texts={"search_space.yaml": space.source},
    )


def _why_none(opened: OpenStudy) -> str:
    reasons = [t.user_attrs.get("reason", "") for t in opened.study.get_trials(deepcopy=False)]
    shown = sorted({reason for reason in reasons if reason})
    return "no trial gave a score: " + ("; ".join(shown[:3]) or "no time was left for the first epoch")


def _finish(
    config: StudyConfig,
    prepared: Prepared,
    opened: OpenStudy,
    tracker: StudyTracker,
    best: tuple[int, float],
    final: Evaluation,
    seconds: float,
) -> StudyResult:
    """Registers the winner, then writes the result to the tracker and the study."""
    scores = {"test_score_mean": final.test_mean, "test_score_std": final.test_std}
    scores |= {f"test_score_{name}": value for name, value in final.references.items()}
    scores["test_score"] = final.test_scores[final.registered]
    run_id = tracker.parent_run_id()
    model = register_best(
        final.predictor,
        config.ref.key,
        alias=config.model,
        val_score=final.val_scores[final.registered],
        example=prepared.example.frame,
        run_id=run_id,
        uri=config.tracking_uri,
        study_id=opened.identity,
        data_key=f"{prepared.fingerprint} {config.split}",
        metric=config.metric,
        metrics=scores,
        tags={"seed": str(final.seeds[final.registered]), "data_hash": prepared.fingerprint},
    )
    result = StudyResult(
        dataset=config.ref.key,
        model=config.model,
        metric=config.metric,
        trials=dict(count_states(opened.study)),
        best_trial=best[0],
        val_score=best[1],
        test_mean=final.test_mean,
        test_std=final.test_std,
        test_scores=list(final.test_scores),
        linear=final.references["linear"],
        mean=final.references["mean"],
        registered=model.name,
        version=str(model.version),
        seconds=seconds,
        rows=list(prepared.rows),
        params=flatten(params_of(opened.study, best[0])),
        parent_run=run_id,
        champion=model.champion,
    )
    tracker.log_final(
        {**scores, "best_val_score": best[1], **{f"trials_{k}": float(v) for k, v in result.trials.items()}},
        tags={
            "best_trial": str(best[0]),
            "registered_model": f"{model.name} v{model.version}",
            "test_openings": str(opened.test_openings),
        },
        texts={"leaderboard.csv": to_csv(leaderboard([result]))},
        tables={"leaderboard.json": trial_rows(opened.study)},
    )
    opened.save_result({**asdict(result), "eval_seeds": config.eval_seeds})
    return result
