"""``jobs/models.py replay``: trials of real studies come out again, and what has changed is told."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from mlflow.tracking import MlflowClient

from bishop_ray import models_cli
from bishop_ray.config import Resources, StudyConfig
from bishop_ray.data.split import SplitProtocol
from bishop_ray.data.suites import embedded_ref, file_ref
from bishop_ray.errors import UserError
from bishop_ray.tracking import check_tracking
from bishop_ray.tuning.cluster import Cluster
from bishop_ray.tuning.record import RECORD, config_text, read_config
from bishop_ray.tuning.replay import replay_run
from bishop_ray.tuning.study import run_study

pytest_plugins = ["study_fixtures"]
ROOT = Path(__file__).resolve().parents[1]

BISHOP = (Path(__file__).with_name("tiny_space.yaml")).read_text("utf-8").partition("first:")[0]
SPACES = {
    "bishop": f"{BISHOP}first:\n"
    "  - {model: {d_model: 16, dropout: 0.1}, train: {lr: 5.0e-3}}\n"
    "  - {model: {d_model: 8, dropout: 0.0}, train: {lr: 6.0e-3}}\n"
    "  - {model: {d_model: 8, dropout: 0.2}, train: {lr: 1.0e-3}}\n",
    "mlp": "model: {n_blocks: 2, d_block: 16, dropout: 0.1}\n"
    "train: {lr: {choice: [0.01, 0.02, 0.00001]}, batch_size: 32}\n"
    "first: [{train: {lr: 0.01}}, {train: {lr: 0.02}}, {train: {lr: 0.00001}}, {train: {lr: 0.00001}}]\n",
    "xgboost": "model: {n_rounds: 60, subsample: 0.7, learning_rate: {choice: [0.3, 0.2, 0.001]}}\n"
    "first: [{model: {learning_rate: 0.3}}, {model: {learning_rate: 0.2}}, {model: {learning_rate: 0.001}}]\n",
}


@dataclass(frozen=True)
class Kept:
    """A study in MLflow: its own run, and the runs of its trials by status."""

    uri: str
    table: Path
    parent: str
    trials: dict[str, list[str]]


def table(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, 4))
    frame = pd.DataFrame(x, columns=list("abcd")).assign(kind=rng.choice(["u", "v", None], 160))
    frame["price"] = x @ [1.0, -2.0, 0.5, 0.0] + (frame["kind"] == "u") + rng.normal(scale=0.3, size=160)
    folder.mkdir(parents=True)
    frame.to_csv(folder / "prices.csv", index=False)
    return folder / "prices.csv"


def study(folder: Path, model: str) -> StudyConfig:
    space = folder / "space.yaml"
    path = table(folder)
    space.write_text(SPACES[model])
    return StudyConfig(
        ref=file_ref(path, "price"), model=model, space=str(space), trials=SPACES[model].count("lr:") + 1, max_epochs=9,
        metric="", split=SplitProtocol((0.7, 0.2, 0.1)), eval_seeds=1, storage=str(folder / "store"),
        tracking_uri=check_tracking(f"sqlite:///{folder}/mlflow.db"), resources=Resources(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory, ray_here: Cluster) -> dict[str, Kept]:
    found = {}
    for model in SPACES:
        folder = tmp_path_factory.mktemp("replay") / model
        config = study(folder, model)
        parent = run_study(config).parent_run
        client = MlflowClient(config.tracking_uri)
        runs = client.search_runs(["1"], "tags.`bishop.kind` = 'trial'", order_by=["start_time"])
        trials: dict[str, list[str]] = {}
        for run in runs:
            trials.setdefault(run.info.status, []).append(run.info.run_id)
        found[model] = Kept(config.tracking_uri, folder / "prices.csv", parent, trials)
    return found


def command(*flags: str) -> int:
    return models_cli.run_models(models_cli.models_parser().parse_args(["replay", *flags]))


@pytest.mark.slow
@pytest.mark.parametrize("model", SPACES)
def test_trials_of_a_study_come_out_again(studies: dict[str, Kept], model: str) -> None:
    """Case 50: the best one through its study's run, one that ended by itself, one that was stopped early."""
    kept = studies[model]
    best = replay_run(kept.parent, kept.uri)
    for again in (best, replay_run(kept.trials["FINISHED"][-1], kept.uri), replay_run(kept.trials["KILLED"][0], kept.uri)):
        assert again.same, again
        assert (again.problem, again.untold, again.differs) == ("", "", ())
    run = MlflowClient(kept.uri).get_run(kept.trials["KILLED"][0])
    assert again.recorded == run.data.metrics["best_val_score"]
    assert again.epochs == run.data.metrics["epochs"] < (20 if model == "xgboost" else 9)
    assert best.recorded > again.recorded
