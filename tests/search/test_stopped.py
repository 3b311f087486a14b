"""Why trials were stopped: the study and MLflow say the same, and it is what happened."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
from mlflow import MlflowClient
from optuna.trial import FrozenTrial, TrialState

from bishop_ray.cli import models
from bishop_ray.config import StudyConfig
from bishop_ray.errors import UserError
from bishop_ray.search.callback import Progress, StudyCallback
from bishop_ray.search.cluster import Cluster
from bishop_ray.search.scheduler import EPOCH, NO_CONTROLLER, REDUCTION, SCORE, make_scheduler
from bishop_ray.search.search import run_study
from bishop_ray.search.study import STOPPED, read_study, study_folder
from bishop_ray.tracking import StudyTracker, runs_frame
from bishop_ray.training.job import TrialSettings

pytest_plugins = ("study_fixtures",)
TAGS = ("bishop.reason", "bishop.stopped.rung", "bishop.stopped.epoch", "bishop.stopped.cutoff", "bishop.stopped.score")
QUANTILE = (1 - 1 / REDUCTION) * 100
FIELDS = ("rung", "epoch", "cutoff", "score")


def in_mlflow(config: StudyConfig) -> dict[int, tuple[str, dict[str, str]]]:
    """Run id and the tags that say why it ended, by trial."""
    client = MlflowClient(config.tracking_uri)
    found = {}
    for run_id in runs_frame(config.tracking_uri, config.ref.experiment)["run_id"]:
        tags = client.get_run(run_id).data.tags
        if "bishop.trial" in tags:
            found[int(tags["bishop.trial"])] = (run_id, {key: tags[key] for key in TAGS if key in tags})
    return found


def as_tags(trial: FrozenTrial) -> dict[str, str]:
    """What MLflow should say of a trial, from the study."""
    stop = trial.user_attrs.get(STOPPED, {})
    return {"bishop.reason": trial.user_attrs["reason"]} | {f"bishop.stopped.{f}": str(stop[f]) for f in FIELDS if stop}


def sync(config: StudyConfig) -> int:
    flags = ["sync", "--storage", config.storage, "--tracking-uri", config.tracking_uri]
    return models.run_models(models.models_parser().parse_args(flags))


def test_study_and_mlflow_say_at_which_rung_a_trial_was_stopped(
    ray_here: Cluster, config: StudyConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = Path(config.space)
    space.write_text(space.read_text().replace("{float: [1.0e-3, 1.0e-2], log: true}", "{choice: [5.0e-3, 1.0e-6]}"))
    config = replace(config, trials=6, max_concurrent=1, sampler="random")
    run_study(config)
    trials = read_study(study_folder(config)).trials
    at_rung: list[float] = []
    for trial in trials:
        score = trial.intermediate_values.get(2)
        stop = trial.user_attrs.get(STOPPED)
        assert (stop is not None) == (trial.state == TrialState.PRUNED) == (max(trial.intermediate_values) == 2)
        if stop is not None:
            cutoff = float(np.percentile(at_rung, QUANTILE))
            assert stop == {"rung": 0, "epoch": 2, "cutoff": cutoff, "score": score}
            assert stop["score"] < stop["cutoff"]
            assert trial.user_attrs["reason"] == "early-stopped"
        if score is not None:
            at_rung.append(score)
    stopped = [trial.number for trial in trials if STOPPED in trial.user_attrs]
    assert stopped

    told = in_mlflow(config)
    assert {number: tags for number, (_, tags) in told.items()} == {t.number: as_tags(t) for t in trials}
    # What MLflow does not have is brought there later, also where it has taken the run for one that was interrupted.
    client = MlflowClient(config.tracking_uri)
    for tag in TAGS[1:]:
        client.delete_tag(told[stopped[0]][0], tag)
    client.set_tag(told[stopped[0]][0], "bishop.reason", "interrupted")
    assert sync(config) == 0
    assert in_mlflow(config) == told

    monkeypatch.setattr("bishop_ray.search.scheduler.REDUCTION", REDUCTION + 1)
    with pytest.raises(UserError, match=f"reduction factor was {REDUCTION}, is {REDUCTION + 1}; use --fresh"):
        run_study(replace(config, trials=7))


def early_stopped(score: float, others: list[float]) -> tuple[str, dict[str, float]]:
    cutoff = float(np.percentile(others, QUANTILE))
    return "early-stopped", {"rung": 0, "epoch": 2, "cutoff": cutoff, "score": score}


def test_each_stop_has_the_reason_of_who_decided_it(config: StudyConfig, tmp_path: Path) -> None:
    """The time budget ends a search while the scheduler stops trials of it: neither speaks for the other."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize")
    scheduler = make_scheduler(replace(config, max_epochs=20, metric="auc"), study)
    tracker = StudyTracker(config.tracking_uri, config.ref.experiment, config.name, folder=tmp_path)
    asked = {number: study.ask() for number in range(5)}
    settings = TrialSettings("bishop", "auc", 20, 0, config.resources, "inprocess", str(tmp_path), None)
    recorder = StudyCallback(
        study, asked, scheduler, tracker, Progress(5, "auc", Counter()), lambda _: None, settings, lambda _: None
    )
    # Trial 1 was stopped once before, by a process that was killed before it could say so.
    asked[1].set_user_attr(STOPPED, {"rung": 9, "epoch": 9, "cutoff": 9.0, "score": 9.0})
    params: dict[str, Any] = {"model": {}, "train": {}}
    scores, trials = (0.9, 0.8, 0.7, 0.6, 0.5), []
    for number, score in enumerate(scores):
        trial: Any = SimpleNamespace(
            trial_id=f"t{number}", config={"number": number, "params": params, "model": "bishop"}
        )
        trials.append(trial)
        scheduler.on_trial_add(NO_CONTROLLER, trial)
        recorder.on_trial_start(0, trials, trial)
        for epoch in (1,) if number == 1 else (1, 2):
            result = {EPOCH: epoch, SCORE: score, "best_epoch": epoch, "workers": 0}
            decision = scheduler.on_trial_result(NO_CONTROLLER, trial, result)
            recorder.on_trial_result(0, trials, trial, result)
            trial.last_result = result
        if decision == "STOP" and number == 2:
            recorder.on_trial_complete(0, trials, trial)  # of the others Tune had no time to tell
    recorder.end_running()
    assert tracker.close()
    kept = {t.number: (t.user_attrs["reason"], t.user_attrs.get(STOPPED)) for t in study.trials}
    assert kept == {
        0: ("time budget", None),
        1: ("time budget", {}),
        2: early_stopped(0.7, [0.9]),
        3: early_stopped(0.6, [0.9, 0.7]),
        4: early_stopped(0.5, [0.9, 0.7, 0.6]),
    }
    assert {number: tags for number, (_, tags) in in_mlflow(config).items()} == {
        t.number: as_tags(t) for t in study.trials
    }
