"""What happens to a study when something around it goes wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import ray
from filelock import FileLock

from bishop_ray.config import StudyConfig
from bishop_ray.data.refs import file_ref
from bishop_ray.errors import TrainingFailed, UserError
from bishop_ray.predictor import Predictor
from bishop_ray.search.callback import Progress
from bishop_ray.search.cluster import Cluster
from bishop_ray.search.dataset import load, prepare
from bishop_ray.search.search import run_study
from bishop_ray.search.space import load_space
from bishop_ray.search.study import OpenStudy, open_study, study_folder
from bishop_ray.search.suite import run_studies
from bishop_ray.tracking import StudyTracker, runs_frame
from bishop_ray.training.job import TrialSettings
from bishop_ray.training.trainable import evaluate_seed

pytest_plugins = ("study_fixtures",)


def opened(config: StudyConfig) -> OpenStudy:
    loaded = load(config)
    space = load_space(config.space, config.model)
    return open_study(replace(config, metric=loaded.config.metric, fresh=False), space, loaded.fingerprint)


def statuses(config: StudyConfig) -> list[str]:
    return sorted(runs_frame(config.tracking_uri, "iris")["status"])


def unclosed(config: StudyConfig) -> StudyTracker:
    """A tracker whose process was killed: it has opened its runs and never closes them."""
    study = opened(config)
    return StudyTracker(config.tracking_uri, "iris", config.name, folder=study.folder, study_id=study.identity)


def test_one_process_per_study(config: StudyConfig) -> None:
    folder = study_folder(config)
    folder.parent.mkdir(parents=True)
    with FileLock(folder.with_name(config.name + ".lock")), pytest.raises(UserError, match="run by another process"):
        run_study(config)
    assert not folder.exists()


@pytest.mark.slow
def test_fresh_start_ends_the_runs_of_a_killed_study(ray_here: Cluster, config: StudyConfig) -> None:
    tracker = unclosed(config)
    tracker.trial_started(0, {"lr": 1})
    assert tracker.flush()
    assert statuses(config) == ["RUNNING", "RUNNING"]
    run_study(replace(config, trials=1, max_epochs=1, fresh=True))
    assert statuses(config) == ["FINISHED", "FINISHED", "KILLED", "KILLED"]


@pytest.mark.slow
def test_finished_study_ends_runs_left_open_by_a_kill_at_the_very_end(ray_here: Cluster, config: StudyConfig) -> None:
    config = replace(config, trials=1, max_epochs=1)
    run_study(config)
    assert unclosed(config).flush()  # opens the parent again
    assert statuses(config) == ["FINISHED", "RUNNING"]
    assert run_study(config).reused
    assert statuses(config) == ["FINISHED", "FINISHED"]


@pytest.mark.slow
def test_more_seeds_evaluate_the_same_winner_again(ray_here: Cluster, config: StudyConfig) -> None:
    config = replace(config, trials=1, max_epochs=1)
    one = run_study(config)
    two = run_study(replace(config, eval_seeds=2))
    assert not two.reused
    assert two.test_scores[0] == one.test_scores[0], "the first seed's training is kept"
    assert len(two.test_scores) == 2
    assert opened(config).test_openings == 2


@pytest.mark.slow
def test_unexpected_error_ends_one_study_not_the_suite(ray_here: Cluster, config: StudyConfig) -> None:
    def listener(study: StudyConfig, progress: Progress) -> None:
        if study.seed == 1:
            raise RuntimeError("the screen broke")

    config = replace(config, trials=1, max_epochs=1)
    results, failures, _ = run_studies([[replace(config, seed=1)], [config]], {}, listener)
    assert [r.dataset for r in results] == ["iris"]
    assert len(failures) == 1
    assert "the screen broke" in failures[0].reason
    assert "Traceback" in (study_folder(replace(config, seed=1)) / "error.txt").read_text()
    assert "RUNNING" not in statuses(config)


def test_a_training_cut_by_the_deadline_is_not_taken_for_a_whole_one(ray_here: Cluster, config: StudyConfig) -> None:
    prepared = prepare(load(config))
    folder = str(Path(config.storage) / "x")
    settings = TrialSettings("bishop", "auc", 4, 0, config.resources, "auto", folder, ray.put(prepared.data))
    space = load_space(config.space, config.model)
    constants = {k[6:]: v for k, v in space.entries.items() if k.startswith("model.") and k not in space.searched}
    params = {"model": constants | {"d_model": 8, "dropout": 0.0}, "train": {"lr": 1e-3}}
    cut = Predictor.load(evaluate_seed(settings, 0, params, 1, deadline=1.0)).info
    assert (cut["stop_reason"], cut["epochs"]) == ("stopped", 1)
    whole = Predictor.load(evaluate_seed(settings, 0, params, 1, deadline=0.0)).info
    assert (whole["stop_reason"], whole["epochs"]) == ("max_epochs", 4)
    with pytest.raises(TrainingFailed, match="epoch 1"):
        evaluate_seed(settings, 1, {**params, "train": {"lr": 1e30}}, 1, deadline=0.0)


def test_one_class_in_a_part_is_refused_before_the_search(config: StudyConfig, tmp_path: Path) -> None:
    path = tmp_path / "rare.csv"
    pd.DataFrame({"a": range(40), "target": ["yes"] * 2 + ["no"] * 38}).to_csv(path, index=False)
    rare = replace(config, ref=file_ref(path, "target"))
    with pytest.raises(UserError, match=r"rare\.csv.*one class only"):
        load(rare)
    load(replace(rare, metric="accuracy"))


def test_settings_of_the_search_are_facts(ray_here: Cluster, config: StudyConfig) -> None:
    config = replace(config, trials=1, max_epochs=1)
    run_study(config)
    with pytest.raises(UserError, match="scheduler was asha, is none"):
        run_study(replace(config, scheduler="none"))


def test_workers_in_process_are_refused(config: StudyConfig) -> None:
    with pytest.raises(UserError, match="--workers-per-trial 2"):
        replace(config, trainer="inprocess", resources=replace(config.resources, workers=2))
