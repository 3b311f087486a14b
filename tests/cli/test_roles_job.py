"""Searches with weights, groups, time and balanced classes, as a person runs them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from test_jobs import run

import bishop_ray
from bishop_ray.tracking import runs_frame

pytestmark = pytest.mark.slow


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BISHOP_RAY_HOME", str(tmp_path / "home"))
    for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def sales(path: Path) -> Path:
    rng = np.random.default_rng(0)
    rows, x = 240, rng.normal(size=240)
    frame = pd.DataFrame({"x": x, "shop": np.arange(rows) % 40, "w": rng.integers(0, 4, rows)})
    frame["day"] = (pd.Timestamp("2024-01-01") + pd.to_timedelta(np.arange(rows) // 3, "D")).astype(str)
    frame["sold"] = np.where(x + rng.normal(0, 0.3, rows) > 1, "much", "little")
    frame.to_csv(path, index=False)
    return path


def test_weights_and_groups(home: Path, tmp_path: Path) -> None:
    table = sales(tmp_path / "sales.csv")
    flags = ["--table", str(table), "--target", "sold", "--models", "xgboost", "realmlp", "--trials", "2"]
    flags += ["--weights", "w", "--groups", "shop", "--no-doctor", "--refit"]
    result = run(*flags)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "realmlp cannot take row weights (--weights)" in result.stdout
    uri = f"sqlite:///{home / 'mlflow.db'}"
    frame = pd.read_csv(table)
    model = bishop_ray.load("sales", tracking_uri=uri)
    answers = model.predict(frame)
    assert [name for name, _ in model.schema] == ["x", "day"]
    assert answers.equals(model.predict(frame.drop(columns=["w", "shop", "sold"]))), "no column of roles is asked for"
    assert np.mean(answers == frame["sold"]) > 0.85
    runs = runs_frame(uri, "sales")
    studies = runs[runs["tags.model"].isin(["xgboost", "automl"])]
    assert set(studies["tags.roles"].dropna()) == {"weights 'w', groups 'shop'"}
    assert set(studies["params.weights"].dropna()) == {"'w'"}


def test_time_and_balance(home: Path, tmp_path: Path) -> None:
    table = sales(tmp_path / "sales.csv")
    flags = ["--table", str(table), "--target", "sold", "--models", "mlp", "--trials", "1", "--max-epochs", "3"]
    flags += ["--eval-seeds", "1", "--no-doctor", "--metric", "balanced_accuracy"]
    result = run(*flags, "--time", "day", "--balance")
    assert result.returncode == 0, result.stdout + result.stderr
    runs = runs_frame(f"sqlite:///{home / 'mlflow.db'}", "sales")
    study = runs[runs["tags.roles"].notna()].iloc[0]
    assert study["tags.roles"] == "time 'day', balance yes"
    assert study["params.balance"] == "yes"
    both = run(*flags, "--time", "day", "--groups", "shop")
    assert both.returncode == 2
    assert both.stderr.startswith("error: --groups and --time exclude each other")
    assert both.stderr.count("\n") == 1
