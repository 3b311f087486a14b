"""`bishop_ray.tune`, as a person calls it."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import bishop_ray
from bishop_ray import cli
from bishop_ray.cli.flags import read
from bishop_ray.cli.tune import tune as tune_job
from bishop_ray.errors import UserError
from bishop_ray.search.cluster import Cluster
from bishop_ray.search.options import SearchOptions

pytest_plugins = ["study_fixtures"]


@pytest.fixture
def frame() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 2))
    return pd.DataFrame({"size": x[:, 0], "age": x[:, 1], "price": 3 * x[:, 0] - x[:, 1] + 10})


def test_the_example_of_the_docstring(
    frame: pd.DataFrame, tmp_path: Path, ray_here: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BISHOP_RAY_HOME", str(tmp_path))
    example = inspect.getdoc(bishop_ray.tune).split("::\n")[1]
    found: dict[str, Any] = {"bishop_ray": bishop_ray, "frame": frame}
    exec(textwrap.dedent(example), found)
    result = found["result"]
    assert list(result.leaderboard["model"]) == ["xgboost"]
    assert result.best.registered == "flats"
    assert result.best.test_mean > 0.5
    assert result.predictor.predict(frame[["age", "size"]]).shape == (120,)
    assert list(result.trials["model"]) == ["xgboost"] * 4 == ["xgboost"] * len(result.study.trials)
    assert result.trials["best_val_score"].max() == result.best.val_score
    assert result.run_url.endswith(f"/runs/{result.best.parent_run}")
    words = repr(result)
    assert "xgboost" in words.splitlines()[2]
    assert "best: xgboost, test r2 0." in words
    again = bishop_ray.tune(frame, "price", models="xgboost", trials=4, name="flats")
    assert again.best.reused


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"trials": 0}, ["--trials", "0"]),
    ({"time_budget": "soon"}, ["--time-budget", "soon"]),
    ({"precision": "half"}, ["--precision", "half"]),
    ({"models": "xgbost"}, ["--models", "xgbost"]),
    ({"models": ["mlp", "tabm"], "space": "mlp"}, ["--models", "mlp", "tabm", "--space", "mlp"]),
    ({"metric": "acuracy"}, ["--metric", "acuracy"]),
    ({"split": "0.5,0.5"}, ["--split", "0.5,0.5"]),
    ({"groups": "size", "time": "age"}, ["--groups", "size", "--time", "age"]),
    ({"target": "prise"}, ["--target", "prise"]),
    ({"tracking_uri": "ftp://x"}, ["--tracking-uri", "ftp://x"]),
]


@pytest.mark.parametrize(("given", "flags"), BAD, ids=lambda value: " ".join(value))
def test_bad_input_has_the_line_of_the_command(
    given: dict[str, Any], flags: list[str], frame: pd.DataFrame, tmp_path: Path
) -> None:
    path = tmp_path / "flats.csv"
    frame.to_csv(path, index=False)
    line = ["--table", str(path), "--storage", str(tmp_path / "store")]
    line += [] if "target" in given else ["--target", "price"]
    with pytest.raises(UserError) as printed:
        tune_job(cli.tune_parser().parse_args([*line, *flags]))
    with pytest.raises(UserError) as raised:
        bishop_ray.tune(path, given.pop("target", "price"), storage=tmp_path / "store", **given)
    assert isinstance(raised.value, ValueError)
    assert str(raised.value) == str(printed.value).removesuffix(" (see tune.py --help)")


def test_an_unknown_option_names_the_nearest(frame: pd.DataFrame) -> None:
    with pytest.raises(UserError, match="unknown option 'max_epoch'; did you mean 'max_epochs'"):
        bishop_ray.tune(frame, "price", max_epoch=3)


def test_options_are_the_flags() -> None:
    assert read(SearchOptions, cli.tune_parser().parse_args([])) == SearchOptions()
    line = ["--models", "mlp", "--time-budget", "2m", "--no-doctor", "--seed", "3", "--cpus-per-trial", "2"]
    expected = SearchOptions(models=("mlp",), time_budget=120.0, doctor=False, seed=3, cpus_per_trial=2.0)
    assert read(SearchOptions, cli.tune_parser().parse_args(line)) == expected


def test_the_package_is_imported_at_once() -> None:
    began = time.perf_counter()
    code = "import sys, bishop_ray; sys.exit(bool({'torch', 'ray', 'mlflow', 'pandas'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert time.perf_counter() - began < 5, "a whole process, on a busy machine"
