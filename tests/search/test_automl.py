"""Searches over several models with the real Ray, Optuna and MLflow, on small tables."""

from __future__ import annotations

import importlib.util
import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
import pytest
from filelock import FileLock
from mlflow import MlflowClient
from optuna.trial import TrialState

from bishop_ray.config import Skipped, StudyConfig, StudyResult
from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.refs import embedded_ref
from bishop_ray.data.split import SplitProtocol
from bishop_ray.errors import UnknownName, UserError
from bishop_ray.metrics import evaluate
from bishop_ray.models import create_model, model_class
from bishop_ray.models.base import Estimator
from bishop_ray.registry import load_best
from bishop_ray.search.cluster import Cluster
from bishop_ray.search.dataset import combined, load, open_test
from bishop_ray.search.leaderboard import COLUMNS
from bishop_ray.search.search import StudyFailed, automl_folder, run_automl
from bishop_ray.search.space import load_space
from bishop_ray.search.study import open_study, study_folder
from bishop_ray.search.suite import run_studies
from bishop_ray.tracking import check_tracking, runs_frame

pytest_plugins = ("study_fixtures",)

MLP = """# small
model: {n_blocks: 1, d_block: {choice: [8, 16]}, dropout: 0.0}
train: {lr: {float: [1.0e-3, 1.0e-2], log: true}, batch_size: 64}
"""


def studies(folder: Path, dataset: str, models: str, trials: int, **more: Any) -> list[StudyConfig]:
    """A study per model, as the job makes them."""
    folder.mkdir(parents=True, exist_ok=True)
    space = folder / "small.yaml"
    space.write_text(MLP)
    uri = check_tracking(f"sqlite:///{folder}/mlflow.db")
    configs = []
    for model in models.split():
        cls = model_class(model)
        reports = cls.reports if issubclass(cls, Estimator) else 4
        configs.append(
            StudyConfig(
                **{
                    "ref": embedded_ref(dataset),
                    "model": model,
                    "space": str(space) if model == "mlp" else model,
                    "trials": trials,
                    "max_epochs": reports,
                    "metric": "",
                    "split": SplitProtocol((0.7, 0.2, 0.1)),
                    "max_concurrent": 2,
                    "storage": str(folder / "store"),
                    "tracking_uri": uri,
                }
                | more
            )
        )
    return configs


def silent(config: StudyConfig, progress: Any) -> None:
    """Hears nothing."""


def journal(config: StudyConfig) -> optuna.Study:
    backend = optuna.storages.journal.JournalFileBackend(str(study_folder(config) / "optuna.journal"))
    return optuna.load_study(study_name=config.name, storage=optuna.storages.JournalStorage(backend))


def trials_of(configs: list[StudyConfig]) -> list[optuna.trial.FrozenTrial]:
    """All trials that were begun."""
    return [t for c in configs for t in journal(c).get_trials(deepcopy=False) if t.state != TrialState.WAITING]


def runs_of(configs: list[StudyConfig]) -> pd.DataFrame:
    return runs_frame(configs[0].tracking_uri, configs[0].ref.experiment)


@dataclass(frozen=True)
class Ended:
    """A search that ended, and what was said meanwhile."""

    configs: list[StudyConfig]
    results: list[StudyResult]
    skipped: list[Skipped]
    events: list[str]

    @property
    def by_model(self) -> dict[str, StudyResult]:
        return {result.model: result for result in self.results}


@pytest.fixture(scope="module")
def searched(ray_here: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    configs = studies(tmp_path_factory.mktemp("automl"), "breast_cancer", "lightgbm random_forest mlp tabpfn", 9)
    events: list[str] = []
    results, skipped = run_automl(
        configs, {"cpu": 2}, lambda config, progress: events.append(f"{config.model}: {progress.last}")
    )
    return Ended(configs, results, skipped, events)


def test_one_budget_for_all_models(searched: Ended) -> None:
    trained = searched.configs[:3]
    assert len(trials_of(trained)) == 9
    assert all(t.state in (TrialState.COMPLETE, TrialState.PRUNED) for t in trials_of(trained))
    singles = [r for r in searched.results if r.model != "ensemble"]
    assert sorted(r.model for r in singles) == ["lightgbm", "mlp", "random_forest"]
    assert sum(sum(r.trials.values()) for r in singles) == 9
    starts = [event for event in searched.events if event.endswith("started")]
    # Two at a time: whose process is up first is the machine's to say.
    assert set(starts[:3]) == {f"{model}: trial 0 started" for model in ("lightgbm", "random_forest", "mlp")}
    assert searched.events[-1] == "automl: evaluating the best of each model on the test split, once"
    assert [s.model for s in searched.skipped] == ["tabpfn"]
    assert "weights" in searched.skipped[0].reason


def test_scores_are_those_of_the_registered_models(searched: Ended) -> None:
    config = replace(searched.configs[0], metric="auc")
    test, validation = open_test(config), load(config).validation
    for result in searched.results:
        model = load_best("breast_cancer", result.model, config.tracking_uri)
        target = model.target
        scores = [
            evaluate("auc", model.task, target.encode(part.target), model.output(part.frame), scale=1.0)
            for part in (test, validation)
        ]
        assert scores[0] == pytest.approx(result.test_mean, abs=1e-9)
        if result.model != "ensemble":  # whose validation score is cross-fitted
            assert scores[1] == pytest.approx(result.val_score, abs=1e-6)


def test_the_champion_is_the_best_by_validation(searched: Ended) -> None:
    scores = [result.val_score for result in searched.results]
    assert scores == sorted(scores, reverse=True)
    assert [result.champion for result in searched.results] == [True, *[False] * (len(scores) - 1)]
    champion = load_best("breast_cancer", "champion", searched.configs[0].tracking_uri)
    assert champion.model_name == searched.results[0].model
    if "ensemble" in searched.by_model:
        best_single = max(r.val_score for r in searched.results if r.model != "ensemble")
        assert (searched.results[0].model == "ensemble") == (searched.by_model["ensemble"].val_score > best_single)


def test_runs_of_models_lie_under_the_run_of_the_search(searched: Ended) -> None:
    runs = runs_of(searched.configs)
    assert "RUNNING" not in set(runs["status"])
    parents = runs[runs["kind"] == "study"].set_index("tags.model")
    assert set(parents.index) == {"automl", "lightgbm", "random_forest", "mlp"}
    above = {run_id: above_of(searched.configs, run_id) for run_id in runs["run_id"]}
    assert {above[run_id] for run_id in parents["run_id"].drop("automl")} == {parents.loc["automl", "run_id"]}
    trials = runs[runs["kind"] == "trial"]
    assert len(trials) == 9
    assert {above[run_id] for run_id in trials["run_id"]} == set(parents["run_id"].drop("automl"))
    assert set(parents["tags.test_openings"].drop("automl")) == {"1"}, "the test split is opened once"
    assert parents.loc["automl", "tags.champion"] == searched.results[0].model


def above_of(configs: list[StudyConfig], run_id: str) -> str:
    """The run that a run lies under."""
    return str(MlflowClient(configs[0].tracking_uri).get_run(run_id).data.tags.get("mlflow.parentRunId", ""))


def test_leaderboard_beside_the_run(searched: Ended) -> None:
    parents = runs_of(searched.configs).query("kind == 'study'").set_index("tags.model")
    uri = searched.configs[0].tracking_uri
    client = MlflowClient(uri)
    path = client.download_artifacts(parents.loc["automl", "run_id"], "leaderboard.csv")
    board = pd.read_csv(path)
    assert tuple(board.columns) == COLUMNS
    assert list(board["model"]) == [*(r.model for r in searched.results), "tabpfn"]
    assert board["note"].iloc[0] == "champion"
    assert board["note"].iloc[-1].startswith("skipped: tabpfn needs")
    trained = board.iloc[:-1]
    assert (trained[["fit_seconds", "predict_ms_per_1000_rows", "size_mb"]] > 0).all(axis=None)
    assert trained["trials"].sum() == 9
    assert trained["test"].tolist() == [r.test_mean for r in searched.results]


def test_little_is_left_on_disk(searched: Ended) -> None:
    store = Path(searched.configs[0].storage) / "studies"
    assert not list(store.glob("*/tune-*"))
    assert not list(store.glob("*/train"))
    assert not list(store.glob("*/trials/*")), "no trial is resumed any more"
    for config in searched.configs[:3]:
        kept = {int(path.name) for path in (study_folder(config) / "models").iterdir()}
        complete = {t.number for t in trials_of([config]) if t.state == TrialState.COMPLETE}
        assert kept <= complete
        assert len(kept) == min(5, len(complete))


def test_the_same_command_again_trains_nothing(searched: Ended) -> None:
    before = len(runs_of(searched.configs))
    results, skipped = run_automl(searched.configs, {"cpu": 2}, silent)
    assert all(result.reused for result in results)
    assert [replace(result, reused=False) for result in results] == searched.results
    assert skipped == searched.skipped
    assert len(runs_of(searched.configs)) == before
    with FileLock(str(automl_folder(searched.configs[0])) + ".lock"), pytest.raises(UserError, match="another process"):
        run_automl(searched.configs, {"cpu": 2}, silent)


def test_refit_trains_the_champion_on_train_and_validation_rows(searched: Ended) -> None:
    configs = [replace(config, refit=True) for config in searched.configs]
    results, _ = run_automl(configs, {"cpu": 2}, silent)
    assert len(trials_of(configs[:3])) == 9, "no further trial"
    assert [r.model for r in results] == [r.model for r in searched.results]
    assert results[0].trained_on == "train and validation"
    assert {r.trained_on for r in results[1:]} == {"train"}
    assert results[0].val_score == searched.results[0].val_score, "validation rows can no longer score it"
    uri = configs[0].tracking_uri
    champion = load_best("breast_cancer", "champion", uri)
    assert champion.model_name == results[0].model
    members = [m.predictor for m in champion.members] if results[0].model == "ensemble" else [champion]
    both, _ = combined(replace(configs[0], metric="auc"))
    test = open_test(replace(configs[0], metric="auc"))
    for member in members:
        assert member.info["stop_reason"] == "refit"
        if member.model_name == "mlp":
            continue
        again = create_model(member.model_name, member.preprocessor.spec, member.hparams)
        coder = Preprocessor.fit(both, again.numeric)
        again.refit(coder.transform(both), int(member.info["rounds"]))
        table = coder.transform(test)
        np.testing.assert_allclose(member.output(test.frame), again.predict(table.x_num, table.x_cat), atol=1e-6)


@pytest.mark.slow
def test_interrupted_it_goes_on_and_the_count_is_exact(ray_here: Cluster, tmp_path: Path) -> None:
    configs = studies(tmp_path, "diabetes", "lightgbm random_forest mlp", 8)
    with pytest.raises(KeyboardInterrupt) as held:
        run_automl(configs, {"cpu": 2}, interrupt_when(lambda event: event.startswith("trial 1 epoch")))
    assert "RUNNING" not in set(runs_of(configs)["status"])
    begun = {(t.datetime_start, json.dumps(t.params)) for t in trials_of(configs)}
    assert 4 <= len(begun) < 8
    assert not list(Path(configs[0].storage).glob("studies/*/tune-*"))
    # As in a notebook, which keeps the exception: the slots are free all the same.
    results, skipped = run_automl(configs, {"cpu": 2}, silent)
    assert held.value
    assert not skipped
    assert len(trials_of(configs)) == 8
    assert begun <= {(t.datetime_start, json.dumps(t.params)) for t in trials_of(configs)}, "nothing is lost"
    assert all(t.state.is_finished() for t in trials_of(configs))
    runs = runs_of(configs)
    assert (runs["kind"] == "trial").sum() == 8
    assert set(runs["status"]) <= {"FINISHED", "KILLED"}
    assert {r.metric for r in results} == {"r2"}
    assert results[0].test_mean > results[0].mean
    scores = [r.val_score for r in results]
    assert scores == sorted(scores, reverse=True)


def interrupt_when(wanted: Callable[[str], bool]) -> Callable[[StudyConfig, Any], None]:
    def listener(config: StudyConfig, progress: Any) -> None:
        if wanted(progress.last):
            signal.raise_signal(signal.SIGINT)

    return listener


def test_models_without_a_trained_trial_are_named_with_the_reason(
    ray_here: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = studies(tmp_path, "iris", "xgboost random_forest mlp lightgbm tabpfn", 2)
    wild = tmp_path / "wild.yaml"
    wild.write_text("# diverges\ntrain: {lr: {float: [1.0e+29, 1.0e+30]}}\n")
    configs = [replace(c, space=str(wild)) if c.model == "mlp" else c for c in configs]
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "xgboost" else find(name, *a))
    results, skipped = run_automl(configs, {"cpu": 1}, silent)
    assert [r.model for r in results] == ["random_forest"], "one model makes no ensemble"
    reasons = {s.model: s.reason for s in skipped}
    assert set(reasons) == {"xgboost", "tabpfn", "mlp", "lightgbm"}
    assert "pip install 'bishop-ray[boosters]'" in reasons["xgboost"]
    assert "weights" in reasons["tabpfn"]
    assert reasons["mlp"].startswith("no trained trial: epoch 1: non-finite")
    assert reasons["lightgbm"] == "the 2 trials went to other models"
    again, same = run_automl(configs, {"cpu": 1}, silent)
    assert again[0].reused
    assert same == skipped, "also the second time"


@pytest.mark.slow
def test_nothing_left_to_try_is_an_end(ray_here: Cluster, tmp_path: Path) -> None:
    fixed = tmp_path / "fixed.yaml"
    fixed.write_text("# one point\nmodel: {max_depth: 2}\n")
    configs = [replace(c, space=str(fixed)) for c in studies(tmp_path, "iris", "random_forest gbdt", 7)]
    results, _ = run_automl(configs, {"cpu": 2}, silent)
    assert len(trials_of(configs)) == 2
    again, _ = run_automl(configs, {"cpu": 2}, silent)
    assert [r.version for r in again] == [r.version for r in results], "nothing is registered twice"
    assert all(r.reused for r in again)


@pytest.mark.slow
def test_no_score_at_all_is_a_failure_and_the_test_split_stays_closed(ray_here: Cluster, tmp_path: Path) -> None:
    wild = tmp_path / "wild.yaml"
    wild.write_text("# diverges\ntrain: {lr: {float: [1.0e+29, 1.0e+30]}}\n")
    configs = [replace(c, space=str(wild)) for c in studies(tmp_path, "iris", "mlp resnet", 3)]
    with pytest.raises(StudyFailed, match=r"no model was trained to its end: mlp: .*non-finite"):
        run_automl(configs, {"cpu": 2}, silent)
    assert "RUNNING" not in set(runs_of(configs)["status"])
    assert not any("test_openings" in journal(config).user_attrs for config in configs)


def test_a_single_model_that_cannot_do_the_data_is_skipped(ray_here: Cluster, tmp_path: Path) -> None:
    one = studies(tmp_path, "iris", "tabpfn", 1)
    with pytest.raises(UserError, match="tabpfn needs pretrained weights"):
        run_studies([one], {}, silent)
    two = studies(tmp_path, "wine", "tabpfn", 1)
    results, failures, skipped = run_studies([one, two], {}, silent)
    assert not results
    assert not failures
    assert [s.dataset for s in skipped] == ["iris", "wine"]
    assert not (tmp_path / "store" / "studies" / one[0].name).exists()


@pytest.mark.slow
@pytest.mark.slow
def test_time_budget_is_kept(ray_here: Cluster, tmp_path: Path) -> None:
    models = "lightgbm random_forest gbdt mlp"
    configs = studies(tmp_path, "breast_cancer", models, 100_000, time_budget=40.0, refit=True)
    began = time.time()
    results, skipped = run_automl(configs, {"cpu": 2}, silent, began + 40)
    assert time.time() - began < 55  # on a machine that has other things to do as well
    assert not skipped
    assert sum(sum(r.trials.values()) for r in results) > 8
    assert "RUNNING" not in set(runs_of(configs)["status"])
    reasons = {t.user_attrs.get("reason") for t in trials_of(configs)}
    assert reasons <= {"finished", "patience", "max_epochs", "early-stopped", "time limit", "time budget", None}
    count = len(trials_of(configs))
    results, _ = run_automl(configs, {"cpu": 2}, silent, time.time() + 30)
    assert not results[0].reused, "a budget spent again goes on"
    assert len(trials_of(configs)) > count


def test_changed_data_is_refused_before_anything_runs(ray_here: Cluster, tmp_path: Path) -> None:
    configs = studies(tmp_path, "iris", "lightgbm mlp", 2)
    open_study(replace(configs[0], metric="auc"), load_space("lightgbm", "lightgbm"), "other data")
    with pytest.raises(UserError, match="data was other data"):
        run_automl(configs, {"cpu": 2}, silent)
    with pytest.raises(UnknownName):  # not even an experiment
        runs_of(configs)
