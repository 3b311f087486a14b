"""A study's parent run in MLflow: opened, its result stored, its winner registered."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bishop_ray.config import StudyConfig, StudyResult
from bishop_ray.data.table import TaskType
from bishop_ray.errors import StorageFull
from bishop_ray.metrics.bootstrap import Scored
from bishop_ray.registry import Evidence, Validation, register_best
from bishop_ray.search.dataset import Prepared
from bishop_ray.search.ensemble import AUTOML
from bishop_ray.search.evaluate import PREDICTIONS, Evaluation
from bishop_ray.search.leaderboard import leaderboard, to_csv
from bishop_ray.search.space import SearchSpace, flatten
from bishop_ray.search.study import (
    RECORD,
    OpenStudy,
    config_text,
    count_states,
    params_of,
    remove_study,
    stored_identity,
    study_folder,
    trial_rows,
)
from bishop_ray.search.sync import known_trials
from bishop_ray.tracking import SPOOL, StudyTracker, environment, settle
from bishop_ray.training.system import as_storage_full


def evidence(prepared: Prepared, output: NDArray[Any], trained: NDArray[Any] | None, on_gpu: bool) -> Evidence:
    """The evidence of a model that was selected on the R validation rows.

    Args:
        prepared: The study's data.
        output: (R, K) predictions that its validation score is made of: of a refit those of the model before it, of an
            ensemble those by weights that the row did not choose.
        trained: (R, K) what the process that trained it said of the rows, if that is known.
        on_gpu: That process may have used a GPU.
    """
    data, rows = prepared.data, prepared.validation
    scored = Scored(data.validation.y, output, data.target_scale)
    return Evidence(rows.frame, trained, on_gpu, Validation(rows.fingerprint(), scored))


def start_over(config: StudyConfig) -> None:
    """Ends what an earlier, perhaps killed run left open in MLflow, then removes the study."""
    if identity := stored_identity(config):
        settle_runs(config, identity, "KILLED", "started over")
    remove_study(config)


def finished_result(config: StudyConfig, opened: OpenStudy) -> StudyResult | None:
    """The stored result, if this very command ended before."""
    stored = opened.result
    if not stored or count_states(opened.study).total() < config.trials:
        return None
    if stored["eval_seeds"] != config.eval_seeds or stored.get("refit", False) != config.refit:
        return None
    settle_runs(config, opened.identity, "FINISHED", "finished")
    return StudyResult(**{k: v for k, v in stored.items() if k not in ("eval_seeds", "refit")} | {"reused": True})


def settle_runs(config: StudyConfig, identity: str, status: str, reason: str) -> None:
    """Brings a study's runs in MLflow to their end; without a run nothing happens."""
    spool = study_folder(config) / SPOOL
    settle(config.tracking_uri, config.ref.experiment, identity, spool, status, reason)


def reference_metrics(references: Mapping[str, float]) -> dict[str, float]:
    """Test scores of the linear model and of the constant prediction under names that no score of the winner has."""
    return {"test_score_linear": references["linear"], "test_score_constant": references["mean"]}


def trained_on(config: StudyConfig) -> str:
    """The rows a registered model was trained on."""
    return "train and validation" if config.refit else "train"


def open_tracker(
    config: StudyConfig, space: SearchSpace, prepared: Prepared, opened: OpenStudy, extra: dict[str, str] | None = None
) -> StudyTracker:
    """The study's parent run in MLflow, with everything that decides its result, and `extra` tags."""
    spec = prepared.data.spec
    params = {
        "trials": config.trials,
        "time_budget_seconds": config.time_budget,
        "max_epochs": config.max_epochs,
        "sampler": config.sampler,
        "scheduler": config.scheduler,
        "seed": config.seed,
        "precision": config.precision,
        "eval_seeds": config.eval_seeds,
        "split": str(config.split),
        "trainer": config.trainer,
        "workers_per_trial": config.resources.workers,
        "cpus_per_worker": config.resources.cpus,
        "gpus_per_worker": config.resources.gpus,
        "max_concurrent": config.max_concurrent,
        "space": {name: str(value) for name, value in space.entries.items()},
    } | config.ref.roles.told()
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
        "classes": str(0 if spec.task is TaskType.REGRESSION else spec.n_out),
    } | config.ref.roles.tag()
    tracker = StudyTracker(
        config.tracking_uri,
        config.ref.experiment,
        config.name,
        folder=opened.folder,
        study_id=opened.identity,
        params=params,
        tags=tags | environment() | (extra or {}),
        texts={"search_space.yaml": space.source},
    )
    tracker.tag_study({RECORD: config_text(config)})
    tracker.trials_known(known_trials(opened.study))
    return tracker


@contextmanager
def recorded(opened: OpenStudy, tracker: StudyTracker, started: float) -> Iterator[None]:
    """Closes study and tracker as the work within ends: finished (it adds its seconds itself), failed or killed.

    Args:
        opened: The study.
        tracker: Of its run in MLflow.
        started: Unix time at which the work began.

    Raises:
        StorageFull: No space is left.
    """
    status = "FAILED"
    try:
        with as_storage_full(str(opened.folder)):
            yield
        status = "FINISHED"
    except (KeyboardInterrupt, StorageFull):
        status = "KILLED"
        raise
    finally:
        if status != "FINISHED":
            with suppress(StorageFull):
                opened.add_seconds(time.time() - started)
        tracker.close(status)


def open_search_tracker(
    whole: StudyConfig, models: Sequence[str], slots: Mapping[str, int], prepared: Prepared, folder: Path, identity: str
) -> StudyTracker:
    """The run of a search over several models, above the runs of their studies."""
    params = {
        "models": ", ".join(models),
        "trials": whole.trials,
        "time_budget_seconds": whole.time_budget,
        "sampler": whole.sampler,
        "scheduler": whole.scheduler,
        "seed": whole.seed,
        "split": str(whole.split),
        "refit": whole.refit,
        "slots": dict(slots),
    } | whole.ref.roles.told()
    tags = {
        "dataset": whole.ref.key,
        "suite": whole.ref.group,
        "model": AUTOML,
        "task": prepared.data.spec.task.value,
        "metric": whole.metric,
        "data_hash": prepared.fingerprint,
        "rows": "/".join(map(str, prepared.rows)),
    } | whole.ref.roles.tag()
    return StudyTracker(
        whole.tracking_uri,
        whole.ref.experiment,
        whole.name,
        folder=folder,
        study_id=identity,
        params=params,
        tags=tags | environment(),
    )


def test_metrics(final: Evaluation) -> dict[str, float]:
    """The test scores as metrics in MLflow: mean and deviation over the seeds, and those of the two references."""
    scores = {"test_score_mean": final.test_mean, "test_score_std": final.test_std}
    return scores | reference_metrics(final.references)


def finish(
    config: StudyConfig,
    prepared: Prepared,
    opened: OpenStudy,
    tracker: StudyTracker,
    best: tuple[int, float],
    final: Evaluation,
    seconds: float,
) -> StudyResult:
    """Registers the winner, then writes the result to the tracker and the study."""
    scores = test_metrics(final) | {"test_score": final.test_scores[final.registered]}
    run_id = tracker.parent_run_id()
    model = register_best(
        final.predictor,
        config.ref.key,
        alias=config.model,
        val_score=final.val_scores[final.registered],
        example=prepared.example.frame,
        run_id=run_id,
        evidence=evidence(prepared, final.validation, final.trained, config.resources.gpus > 0),
        uri=config.tracking_uri,
        study_id=opened.identity,
        data_key=f"{prepared.fingerprint} {config.split}",
        metric=config.metric,
        metrics=scores,
        tags={"seed": str(final.seeds[final.registered]), "data_hash": prepared.fingerprint}
        | {"trained_on": trained_on(config)},
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
        verdict=model.verdict,
        trained_on=trained_on(config),
        size_bytes=model.size_bytes,
        **asdict(final.costs),
    )
    tracker.log_final(
        {**scores, "best_val_score": best[1], **{f"trials_{k}": float(v) for k, v in result.trials.items()}},
        tags=_final_tags(config, best[0], final, f"{model.name} v{model.version}", opened.test_openings),
        texts={"leaderboard.csv": to_csv(leaderboard([result])), PREDICTIONS: final.predictions},
        tables={"leaderboard.json": trial_rows(opened.study)},
    )
    opened.save_result({**asdict(result), "eval_seeds": config.eval_seeds, "refit": config.refit})
    return result


def _final_tags(config: StudyConfig, best: int, final: Evaluation, registered: str, openings: int) -> dict[str, str]:
    """What the study's run is told of its final evaluation, beside numbers."""
    return {
        "best_trial": str(best),
        "registered_model": registered,
        "trained_on": trained_on(config),
        "test_openings": str(openings),
        "eval_seeds": json.dumps(list(final.seeds)),
        "test_scores": json.dumps(list(final.test_scores)),
        "val_scores": json.dumps(list(final.val_scores)),
    }
