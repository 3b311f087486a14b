"""The job ``jobs/ablate.py`` from flags to tables: every ablation, going on, failures, records in MLflow."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from fakes import make_table

from bishop_ray import cli
from bishop_ray.cli import ablate as ablate_cli
from bishop_ray.cli.flags import read
from bishop_ray.errors import UserError
from bishop_ray.models import not_installed
from bishop_ray.search import dataset
from bishop_ray.search.cluster import Cluster
from bishop_ray.search.options import DataOptions
from bishop_ray.search.plan import datasets
from bishop_ray.tracking import runs_frame, tracking_uri
from bishop_ray.tracking.client import open_client

pytest_plugins = ("study_fixtures",)
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--space", str(ROOT / "tests" / "tiny_space.yaml"), "--max-epochs", "2"]


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BISHOP_RAY_HOME", str(tmp_path / "home"))
    for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    raw = make_table(n_num=4, n_cat=2, rows=120)
    raw.frame.assign(answer=raw.target).to_csv(tmp_path / "small.csv", index=False)
    return ["--table", str(tmp_path / "small.csv"), "--target", "answer"]


def ablate(*flags: str) -> int:
    return ablate_cli.run_ablate(ablate_cli.ablate_parser().parse_args(flags))


def folder(tmp_path: Path, name: str) -> Path:
    return tmp_path / "home" / "ablations" / f"small-{name}-s0"


WANTED = {
    "components": ["full", "no_cat_emb", "no_num_emb", "no_patch_emb", "no_decoder", "no_module"],
    "hopfield": ["gsh", "hopfield", "attention", "sparsemax", "entmax15"],
    "rotation": ["full", "r1", "r2", "r3"],
    "depth": ["1", "2", "8"],
    "convergence": ["gsh", "hopfield"],
}


@pytest.mark.parametrize("name", WANTED)
def test_every_setting_is_trained_and_recorded(
    name: str, data: list[str], tmp_path: Path, ray_here: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ["--settings", *WANTED[name]] if name == "depth" else []
    output = tmp_path / "out.csv"
    assert ablate(name, *data, *TINY, *only, "--runs", "1", "--output", str(output)) == 0
    printed = capsys.readouterr().out
    rows = pd.read_csv(output, dtype={"setting": str})
    assert list(rows["setting"]) == WANTED[name]
    assert set(rows["runs"]) == {1}
    assert rows["test"].between(0, 1).all()
    assert list(rows["note"] == "base").count(True) == 1
    assert all(setting in printed for setting in WANTED[name])
    runs = pd.read_csv(tmp_path / "out-runs.csv", dtype={"setting": str})
    assert set(runs["test_openings"]) == {1}
    assert set(runs["epochs"]) == {2}
    told = runs_frame("", f"ablation-{name}")
    assert set(told["kind"]) == {"ablation"}
    assert set(told["status"]) == {"FINISHED"}
    assert set(told["params.ablation"]) == {name}
    merged = told.merge(runs.astype({"setting": str}), left_on="params.setting", right_on="setting")
    assert len(merged) == len(WANTED[name])
    assert (merged["metrics.test"] == merged["test"]).all()
    assert (merged["metrics.validation"] == merged["validation"]).all()
    curves = pd.read_csv(tmp_path / "out-curves.csv", dtype={"setting": str})
    assert set(curves["epoch"]) == {1, 2}
    assert set(curves["quantity"]) == {"train_loss", "val_loss", "val_score"}
    run, setting = merged["run_id"].iloc[0], merged["setting"].iloc[0]
    kept = json.loads((folder(tmp_path, name) / "runs" / f"bishop-{setting}-s1.json").read_text())
    client = open_client(tracking_uri(""), 30.0)
    for metric in ("epoch/val_score", "epoch/train_loss", "epoch/val_loss"):
        history = {m.step: m.value for m in client.get_metric_history(run, metric)}
        assert history == {int(step): metrics[metric] for step, metrics in kept["epochs"].items()}
        assert set(history) == {1, 2}


@pytest.mark.skipif(bool(not_installed("xgboost") or not_installed("lightgbm")), reason="boosters are not installed")
def test_features_are_removed_for_all_three_models(data: list[str], tmp_path: Path, ray_here: Cluster) -> None:
    only = ["--settings", "random_50", "increasing_50", "decreasing_50", "random_10"]
    small = [f"{key}={value}" for key, value in {"d_model": 8, "d_embedding": 8, "d_ff": 8, "n_decoded": 8}.items()]
    assert ablate("sparsity", *data, "--max-epochs", "2", "--set", *small, *only, "--runs", "1") == 0
    rows = pd.read_csv(folder(tmp_path, "sparsity") / "table.csv")
    assert list(rows["model"].unique()) == ["bishop", "xgboost", "lightgbm"]
    assert len(rows) == 3 * 5
    assert set(rows["runs"]) == {1}, "10 % of six features is one"
    by_model = rows.set_index(["model", "setting"])["test"]
    assert by_model["xgboost", "all"] >= by_model["xgboost", "decreasing_50"]
    importance = json.loads((folder(tmp_path, "sparsity") / "importance.json").read_text())
    assert sum(importance.values()) == pytest.approx(1.0)


def test_the_same_command_trains_only_what_is_missing(
    data: list[str], tmp_path: Path, ray_here: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["hopfield", *data, *TINY, "--settings", "hopfield"]
    assert ablate(*flags, "--runs", "1") == 0
    runs = folder(tmp_path, "hopfield") / "runs"
    first = {path.name: path.read_text() for path in runs.glob("*.json")}
    assert len(first) == 2
    capsys.readouterr()
    assert ablate(*flags, "--runs", "2") == 0
    assert "[2/2]" in capsys.readouterr().out, "the second run of both settings, nothing else"
    assert {name: (runs / name).read_text() for name in first} == first
    (runs / "bishop-gsh-s1.json").unlink()
    assert ablate(*flags, "--runs", "2") == 0
    assert "[1/1] small bishop gsh s1" in capsys.readouterr().out
    old, new = json.loads(first["bishop-gsh-s1.json"]), json.loads((runs / "bishop-gsh-s1.json").read_text())
    assert (new["test"], new["validation"]) == (old["test"], old["validation"]), "same seed, same run"
    assert ablate(*flags, "--runs", "2") == 0
    assert "finished before, nothing was trained" in capsys.readouterr().out
    told = runs_frame("", "ablation-hopfield")
    assert len(told) == 4, "none is counted twice"
    with pytest.raises(UserError, match=r"begun with other settings \(bishop.model.d_ff was 16, is 8\)"):
        ablate(*flags, "--runs", "2", "--set", "d_ff=8")
    assert ablate(*flags, "--runs", "1", "--set", "d_ff=8", "--fresh") == 0
    kinds = runs_frame("", "ablation-hopfield")["kind"]
    assert sorted(kinds) == ["ablation"] * 2 + ["ablation-old"] * 4


@pytest.mark.skipif(bool(not_installed("xgboost")), reason="xgboost is not installed")
def test_a_run_that_fails_does_not_stop_the_others(
    data: list[str], tmp_path: Path, ray_here: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["sparsity", *data, "--max-epochs", "2", "--models", "bishop", "xgboost", "--runs", "1"]
    flags += ["--settings", "all", "--set", "train.lr=1e30", "d_model=8", "d_embedding=8", "optimizer=adamw"]
    assert ablate(*flags) == cli.EXIT_FAILED
    printed = capsys.readouterr().out
    assert "failed: small bishop all s1: " in printed
    assert "non-finite" in printed
    rows = pd.read_csv(folder(tmp_path, "sparsity") / "table.csv").set_index("model")
    assert (rows.loc["bishop", "runs"], rows.loc["bishop", "failed"]) == (0, 1)
    assert pd.isna(rows.loc["bishop", "test"]), "a failed run is no bad score"
    assert rows.loc["xgboost", "runs"] == 1
    told = runs_frame("", "ablation-sparsity").set_index("params.model")
    assert (told.loc["bishop", "status"], told.loc["xgboost", "status"]) == ("FAILED", "FINISHED")
    assert "non-finite" in told.loc["bishop", "tags.bishop.reason"]
    assert ablate(*flags) == cli.EXIT_FAILED
    assert "[1/1] small bishop all s1: failed" in capsys.readouterr().out, "only the failed one is tried again"
    assert len(runs_frame("", "ablation-sparsity")) == 2


def test_test_rows_are_opened_once_per_run_after_training(
    data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task as Ray runs it, here in this process: what it asks for, in order."""
    from bishop_ray.paper.ablations import run as task
    from bishop_ray.paper.ablations.settings import Change

    asked: list[str] = []
    opens, trains = dataset.open_test, task.train_here
    monkeypatch.setattr(task, "open_test", lambda study: (asked.append("test"), opens(study))[1])
    monkeypatch.setattr(task, "train_here", lambda *a: (asked.append("train"), trains(*a))[1])
    args = ablate_cli.ablate_parser().parse_args(["rotation", *data, *TINY, "--runs", "1"])
    refs, _ = datasets(read(DataOptions, args))
    (config,) = ablate_cli._configs(args, ablate_cli._options(args), refs, None)
    loaded = dataset.load(config.study)
    assert {len(loaded.train), len(loaded.validation)} == {84, 24}
    study = loaded.config
    from bishop_ray.paper.ablations.run import _settings

    run = task.Run("r2", study, _settings(study, 1), config.base["bishop"], Change(rotate=True), {})
    record, trace = task.perform(run, loaded)
    assert trace == ""
    assert asked == ["train", "test"]
    assert record.test_openings == 1


def test_an_interrupted_command_goes_on(data: list[str], tmp_path: Path) -> None:
    flags = ["hopfield", *data, *TINY, "--runs", "1", "--settings", "hopfield", "--max-concurrent", "1"]
    command = [sys.executable, str(ROOT / "jobs" / "ablate.py"), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("[1/2]"):
                process.send_signal(signal.SIGTERM)
                break
        _, errors = process.communicate(timeout=60)
    assert process.returncode == cli.EXIT_INTERRUPTED, errors
    assert errors == "interrupted; the same command goes on where this one was\n"
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    assert again.stderr == ""
    assert "[1/1] small bishop hopfield s1" in again.stdout
    assert len(runs_frame("", "ablation-hopfield")) == 2
