"""Studies with the real Ray, Optuna and MLflow, on small tables."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import pandas as pd
import pytest
from fakes import make_table
from optuna.trial import TrialState

from bishop_ray.config import Resources, StudyConfig
from bishop_ray.data.refs import DatasetRef, file_ref
from bishop_ray.errors import UnknownName, UserError
from bishop_ray.search.allocation import SuccessiveHalving
from bishop_ray.search.callback import Progress, curves, error_reason, is_metric
from bishop_ray.search.cluster import Cluster, concurrency, trial_resources
from bishop_ray.search.dataset import load
from bishop_ray.search.samplers import sampler_factory
from bishop_ray.search.search import StudyFailed, run_study
from bishop_ray.search.searcher import ModelSearcher, TrialSource
from bishop_ray.search.space import SearchSpace, load_space
from bishop_ray.search.study import best_of, open_study
from bishop_ray.search.suite import run_studies
from bishop_ray.tracking import runs_frame

TINY = Path(__file__).parents[1].joinpath("tiny_space.yaml")
SPACE = TINY.read_text("utf-8")


pytest_plugins = ("study_fixtures",)


def table_ref(tmp_path: Path, rows: int = 120) -> DatasetRef:
    raw = make_table("regression", rows=rows)
    path = tmp_path / "mine.csv"
    raw.frame.assign(target=raw.target.to_numpy()).to_csv(path, index=False)
    return file_ref(path, "target")


def reopened(config: StudyConfig) -> optuna.Study:
    loaded = load(config)
    space = load_space(config.space, config.model)
    return open_study(replace(config, metric=loaded.config.metric, fresh=False), space, loaded.fingerprint).study


def test_study_to_registered_model(ray_here: Cluster, config: StudyConfig) -> None:
    seen: list[str] = []
    result = run_study(config, lambda progress: seen.append(progress.last))
    assert sum(result.trials.values()) == 3
    assert result.metric == "auc"
    assert result.registered == "iris"
    assert 0.5 < result.test_mean <= 1.0
    assert result.mean == pytest.approx(0.5)
    assert any("epoch" in event for event in seen)
    assert seen[-1].startswith("final evaluation of trial")

    study = reopened(config)
    assert [t.number for t in study.trials] == [0, 1, 2]
    first = study.trials[0]
    assert first.params == {"model.d_model": 16, "model.dropout": 0.0, "train.lr": 5e-3}, "the default comes first"
    for trial in study.trials:
        assert trial.state in (TrialState.COMPLETE, TrialState.PRUNED)
        assert trial.intermediate_values
        assert json.loads(trial.user_attrs["params"])["train.batch_size"] == 32
        if trial.state == TrialState.COMPLETE:
            assert max(trial.intermediate_values) == 3
            assert trial.value == trial.intermediate_values[3]
    best = best_of(study)
    assert best is not None
    assert best[1] == result.val_score == max(max(t.intermediate_values.values()) for t in study.trials)

    runs = runs_frame(config.tracking_uri, "iris")
    assert len(runs) == 4
    assert set(runs["status"]) <= {"FINISHED", "KILLED"}
    trials = runs[runs["name"].str.startswith("trial-")] if "name" in runs else runs
    assert trials["metrics.best_val_score"].max() == pytest.approx(result.val_score)
    parent = runs[runs.kind == "study"].iloc[0]
    assert parent["metrics.test_score_mean"] == result.test_mean
    assert parent["metrics.test_score_constant"] == result.mean
    assert not list((Path(config.storage) / "studies" / config.name).glob("tune-*")), "Tune's own files are removed"

    again = run_study(config)
    assert again.reused
    assert again.test_scores == result.test_scores
    assert len(runs_frame(config.tracking_uri, "iris")) == 4, "a finished study trains nothing"

    more = run_study(replace(config, trials=4))
    assert sum(more.trials.values()) == 4
    assert not more.reused
    assert set(runs_frame(config.tracking_uri, "iris")["status"]) <= {"FINISHED", "KILLED"}

    with pytest.raises(UserError, match=r"max-epochs was 3, is 5.*--fresh"):
        run_study(replace(config, max_epochs=5))
    fresh = run_study(replace(config, trials=1, max_epochs=1, fresh=True))
    assert sum(fresh.trials.values()) == 1


@pytest.mark.slow
def test_same_seed_same_study(ray_here: Cluster, config: StudyConfig, tmp_path: Path) -> None:
    configs = [replace(config, storage=str(tmp_path / name), max_concurrent=1, trials=5) for name in ("a", "b")]
    # The second one is interrupted after its second trial and run again: it suggests what the first one did.
    run_study(configs[0])
    with pytest.raises(KeyboardInterrupt):
        run_study(configs[1], interrupt_at("trial 2 epoch 2"))
    interrupted = reopened(configs[1])
    assert interrupted.trials[2].state == TrialState.RUNNING, "it goes on, it is not lost"
    status = runs_frame(config.tracking_uri, "iris")["status"]
    assert "RUNNING" not in set(status)
    events: list[str] = []
    run_study(configs[1], lambda progress: events.append(progress.last))
    epochs = [int(event.split()[3].rstrip(":")) for event in events if event.startswith("trial 2 epoch ")]
    assert epochs[0] == 2, "epoch 1 left a checkpoint and is not trained again"
    one, two = (reopened(c) for c in configs)
    assert [t.params for t in one.trials] == [t.params for t in two.trials]
    assert [t.state for t in one.trials] == [t.state for t in two.trials]
    assert [best_value(t) for t in one.trials] == [best_value(t) for t in two.trials]


def best_value(trial: optuna.trial.FrozenTrial) -> float:
    return trial.intermediate_values[max(trial.intermediate_values)]


def interrupt_at(event: str):
    def listener(progress: Progress) -> None:
        if progress.last.startswith(event):
            signal.raise_signal(signal.SIGINT)

    return listener


@pytest.mark.slow
def test_diverged_trial_is_failed_with_its_reason(ray_here: Cluster, config: StudyConfig, tmp_path: Path) -> None:
    space = tmp_path / "wild.yaml"
    space.write_text(SPACE.replace("lr: {float: [1.0e-3, 1.0e-2], log: true}", "lr: {choice: [5.0e-3, 1.0e+30]}"))
    config = replace(config, space=str(space), trials=6, sampler="random", scheduler="none")
    result = run_study(config)
    trials = reopened(config).trials
    wild = [t for t in trials if t.params["train.lr"] > 1]
    assert wild, "the seed draws both"
    for trial in wild:
        assert trial.state == TrialState.FAIL
        assert trial.value is None
        assert "epoch 1" in trial.user_attrs["reason"]
        assert "non-finite" in trial.user_attrs["reason"]
    assert result.trials == {"failed": len(wild), "complete": 6 - len(wild)}
    runs = runs_frame(config.tracking_uri, "iris")
    assert (runs["status"] == "FAILED").sum() == len(wild)

    space.write_text(
        SPACE.replace("lr: {float: [1.0e-3, 1.0e-2], log: true}", "lr: {choice: [1.0e+30]}").split("first")[0]
    )
    hopeless = replace(config, trials=2, seed=7)
    with pytest.raises(StudyFailed, match=r"no trial gave a score.*non-finite"):
        run_study(hopeless)
    assert not (runs_frame(config.tracking_uri, "iris")["status"] == "RUNNING").any()


@pytest.mark.slow
def test_a_dataset_that_fails_does_not_stop_the_others(ray_here: Cluster, config: StudyConfig, tmp_path: Path) -> None:
    gone = table_ref(tmp_path)
    Path(gone.locator).unlink()
    good = replace(config, trials=1, max_epochs=1)
    results, failures, skipped = run_studies([[replace(good, ref=gone)], [good]], {}, lambda config, progress: None)
    assert not skipped
    assert [r.dataset for r in results] == ["iris"]
    assert [f.dataset for f in failures] == ["mine"]
    assert "mine.csv" in failures[0].reason
    with pytest.raises(UserError, match=r"mine\.csv"):
        run_studies([[replace(good, ref=gone)]], {}, lambda config, progress: None)


def test_changed_data_is_refused(ray_here: Cluster, config: StudyConfig, tmp_path: Path) -> None:
    config = replace(config, ref=table_ref(tmp_path), trials=1, max_epochs=1)
    result = run_study(config)
    assert result.metric == "r2"
    table_ref(tmp_path, rows=130)
    with pytest.raises(UserError, match="data was"):
        run_study(config)


@pytest.mark.slow
def test_time_budget_covers_the_final_evaluation(ray_here: Cluster, config: StudyConfig) -> None:
    started = time.time()
    config = replace(config, trials=1000, max_epochs=200, scheduler="none")
    result = run_study(config, deadline=started + 70)
    assert time.time() - started < 75
    assert sum(result.trials.values()) >= 1
    trials = reopened(config).trials
    ended = [t for t in trials if t.state.is_finished()]
    assert {t.user_attrs["reason"] for t in ended} <= {"time budget", "patience", "max_epochs"}
    # What was asked and had not started when time was up waits for the next run.
    assert all(t.state == TrialState.RUNNING and not t.intermediate_values for t in trials if t not in ended)


def searcher_of(config: StudyConfig, study: optuna.Study, space: SearchSpace, total: int) -> ModelSearcher:
    asker = TrialSource(study, space, sampler_factory(config))
    return ModelSearcher({"bishop": asker}, {"": SuccessiveHalving(["bishop"])}, {"": 9}, total, lambda *_: 0.0)


def test_searcher_counts_exactly(config: StudyConfig) -> None:
    loaded = load(config)
    space = load_space(config.space, config.model)
    opened = open_study(replace(config, metric="auc"), space, loaded.fingerprint)
    searcher = searcher_of(config, opened.study, space, 3)
    points = [searcher.suggest(str(i)) for i in range(5)]
    assert [p["number"] for p in points[:3]] == [0, 1, 2]
    assert points[3] == points[4] == ModelSearcher.FINISHED
    # Nothing was told, as after a kill: the same three come again, with the same parameters, and no other.
    again = searcher_of(config, reopened(replace(config, metric="auc")), space, 3)
    assert [again.suggest(str(i)) for i in range(4)] == points[:4]


def test_killed_between_ask_and_parameters(config: StudyConfig) -> None:
    space = load_space(config.space, config.model)
    opened = open_study(replace(config, metric="auc"), space, "hash")
    opened.study.ask()  # asked, then the process died
    searcher = searcher_of(config, opened.study, space, 2)
    first = searcher.suggest("a")
    assert first["number"] == 0
    assert first["params"]["train"]["lr"] == 5e-3, "it is still the default point"
    assert searcher.suggest("b")["number"] == 1
    assert searcher.suggest("c") == ModelSearcher.FINISHED


@pytest.mark.parametrize("sampler", ["tpe", "random", "gp"])
def test_samplers_learn_nothing_from_order_of_runs(config: StudyConfig, sampler: str) -> None:
    make = sampler_factory(replace(config, sampler=sampler, trials=6))
    space = load_space(config.space, config.model)

    def points() -> list[dict[str, float]]:
        study = optuna.create_study(direction="maximize")
        for number in range(6):
            study.sampler = make(number)
            trial = study.ask()
            space.suggest(trial)
            study.tell(trial, float(number % 3))
        return [t.params for t in study.trials]

    first = points()
    assert first == points()
    assert len({json.dumps(p) for p in first}) == 6


def test_unknown_sampler(config: StudyConfig) -> None:
    with pytest.raises(UnknownName, match="did you mean 'tpe'"):
        sampler_factory(replace(config, sampler="tpee"))


@pytest.mark.parametrize(
    ("cluster", "flags", "resources", "slots"),
    [
        (Cluster(2, 0), (None, None, 1), Resources(1, 0, 1), 2),
        (Cluster(2, 0), (0.5, None, 1), Resources(0.5, 0, 1), 4),
        (Cluster(2, 0), (1, None, 2), Resources(1, 0, 2), 1),
        (Cluster(16, 1), (None, None, 1), Resources(1, 0.25, 1), 4),
        (Cluster(2, 1), (None, None, 1), Resources(1, 0.5, 1), 2),
        (Cluster(32, 4), (2, 1.0, 2), Resources(2, 1, 2), 2),
        (Cluster(32, 4), (1, 0.3, 1), Resources(1, 0.3, 1), 12),
        (Cluster(8, 4), (1, 2.0, 1), Resources(1, 2, 1), 2),
    ],
)
def test_resources_follow_the_machine(cluster: Cluster, flags: tuple, resources: Resources, slots: int) -> None:
    found = trial_resources(cluster, *flags)
    assert found == resources
    assert concurrency(cluster, found, None) == slots
    assert concurrency(cluster, found, 1) == 1


def test_impossible_resources_are_refused() -> None:
    with pytest.raises(UserError, match=r"asks for 8 CPUs.*has 2"):
        trial_resources(Cluster(2, 0), 8, None, 1)
    with pytest.raises(UserError, match=r"asks for 1 GPUs.*has 0"):
        trial_resources(Cluster(2, 0), 1, 1.0, 1)
    with pytest.raises(UserError, match="--gpus-per-trial above 1 must be whole"):
        Resources(1, 1.5)


def test_small_parts_of_the_recorder(tmp_path: Path) -> None:
    assert is_metric("val_loss", 0.1)
    assert not is_metric("pid", 3)
    assert not is_metric("done", True)
    assert not is_metric("config/params/model/d_model", 3)

    result = {"train_loss": 1, "epoch_seconds": 2.0, "alpha/enc1.row": 1.5, "pid": 7, "workers": 0, "best_epoch": 1}
    assert curves(result) == {"epoch/train_loss": 1.0, "epoch/seconds": 2.0, "layers/alpha/enc1.row": 1.5}

    class Trial:
        error_file = str(tmp_path / "error.txt")

    Path(Trial.error_file).write_text(
        "Traceback\n  File x\nray.exceptions.RayTaskError\nOutOfMemoryError: CUDA out of memory\n"
    )
    assert error_reason(Trial()) == "OutOfMemoryError: CUDA out of memory"
    Trial.error_file = ""
    assert error_reason(Trial()) == "its process died"


def test_test_rows_are_in_no_object_of_the_search(ray_here: Cluster, config: StudyConfig, tmp_path: Path) -> None:
    """A planted marker in the test rows appears nowhere before the final evaluation."""
    from bishop_ray.search.dataset import open_test, prepare

    raw = make_table("regression", n_cat=0)
    frame = raw.frame.assign(target=raw.target.to_numpy(), marker=np.arange(len(raw.frame), dtype=float) + 1e6)
    path = tmp_path / "marked.csv"
    frame.to_csv(path, index=False)
    config = replace(config, ref=file_ref(path, "target"))
    loaded = load(config)
    test = open_test(replace(config, metric="r2"))
    hidden = set(test.frame["marker"])
    assert len(hidden) == loaded.rows[2] > 0
    for part in (loaded.train, loaded.validation, prepare(loaded).example):
        assert not hidden & set(part.frame["marker"])
    seen = pd.concat([loaded.train.frame, loaded.validation.frame])["marker"]
    assert set(seen) | hidden == set(frame["marker"])
