"""The job as a person runs it: a process, its output, its exit code."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from bishop_ray import cli
from bishop_ray.cli import ablate, reproduce, train, tune
from bishop_ray.errors import UserError
from bishop_ray.paths import check_storage
from bishop_ray.search.cluster import Cluster
from bishop_ray.tracking import check_tracking, runs_frame

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--space", str(ROOT / "tests" / "tiny_space.yaml")]


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BISHOP_RAY_HOME", str(tmp_path / "home"))
    for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def command(*flags: str) -> list[str]:
    return [sys.executable, str(ROOT / "jobs" / "tune.py"), *flags]


def run(*flags: str, cwd: Path | None = None, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*flags), capture_output=True, text=True, cwd=cwd, timeout=timeout)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "houses.csv"
    rows = 90
    frame = pd.DataFrame({"rooms": [i % 7 for i in range(rows)], "street": ["abc"[i % 3] for i in range(rows)]})
    frame["price"] = (
        frame["rooms"] * 10.5 + frame["street"].map({"a": 0, "b": 3, "c": 9}) + [i % 5 for i in range(rows)]
    )
    frame["empty"] = None
    frame["same"] = "x"
    frame.to_csv(path, index=False)
    return path


@pytest.mark.slow
def test_from_file_to_prediction_in_another_folder(table: Path, tmp_path: Path) -> None:
    flags = [
        "--table",
        str(table),
        "--target",
        "price",
        *TINY,
        "--trials",
        "2",
        "--max-epochs",
        "2",
        "--eval-seeds",
        "2",
    ]
    result = run(*flags, "--output", str(tmp_path / "board.csv"), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == "", "library noise is kept out"
    assert "registered model: houses (version 1, alias bishop; also champion)" in result.stdout
    assert "mlflow ui --backend-store-uri sqlite:////" in result.stdout
    board = pd.read_csv(tmp_path / "board.csv")
    assert list(board["dataset"]) == ["houses"]
    assert board["trials"][0] == 2
    assert board["mean"][0] < board["linear"][0]

    lines = [line.strip() for line in result.stdout.splitlines() if line.startswith("    ")]
    code = "\n".join(line for line in lines if line.startswith(("import bishop_ray", "model = ")))
    code += (
        "\nimport pandas as pd"
        "\nframe = pd.DataFrame({'street': ['never', None], 'extra': [1, 2], 'rooms': [3, None], 'same': ['x', 'x']})"
        "\nassert model.predict(frame).notna().all() and len(model.predict(frame)) == 2"
    )
    empty = tmp_path / "elsewhere"
    empty.mkdir()
    subprocess.run([sys.executable, "-c", code], check=True, cwd=empty)

    again = run(*flags)
    assert again.returncode == 0
    assert "finished before, nothing was trained: houses" in again.stdout
    runs = runs_frame("", "houses")
    assert len(runs) == 3
    assert "RUNNING" not in set(runs["status"])


@pytest.mark.slow
def test_interrupted_command_goes_on(table: Path, tmp_path: Path) -> None:
    flags = [
        "--table",
        str(table),
        "--target",
        "price",
        *TINY,
        "--trials",
        "3",
        "--max-epochs",
        "40",
        "--eval-seeds",
        "1",
    ]
    with subprocess.Popen(command(*flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if " epoch " in line:
                process.send_signal(signal.SIGTERM)
                break
        _, errors = process.communicate(timeout=60)
    assert process.returncode == cli.EXIT_INTERRUPTED, errors
    assert "goes on where this one was" in errors
    assert "Traceback" not in errors
    assert "RUNNING" not in set(runs_frame("", "houses")["status"])
    result = run(*flags)
    assert result.returncode == 0, result.stderr
    runs = runs_frame("", "houses")
    assert len(runs) == 4, "one parent, three trials: none lost, none twice"
    assert set(runs["status"]) <= {"FINISHED", "KILLED"}


@pytest.mark.slow
def test_whole_job_through_ray_train(table: Path) -> None:
    flags = [
        "--table",
        str(table),
        "--target",
        "price",
        *TINY,
        "--trials",
        "2",
        "--max-epochs",
        "2",
        "--eval-seeds",
        "1",
    ]
    result = run(*flags, "--trainer", "ray", "--max-concurrent", "1", timeout=500)
    assert result.returncode == 0, result.stderr
    assert "registered model: houses" in result.stdout
    trials = trials_of("houses")
    assert len(trials) == 2
    assert set(trials["metrics.workers"]) == {1.0}, "each in a worker group of its own"


def trials_of(experiment: str) -> pd.DataFrame:
    """Child runs, oldest first; ``metrics.workers`` is 0 for a trial without a process group."""
    runs = runs_frame("", experiment)
    return runs[runs["kind"] == "trial"].sort_values("start")


@pytest.mark.slow
def test_two_workers_per_trial(table: Path) -> None:
    flags = [
        "--table",
        str(table),
        "--target",
        "price",
        *TINY,
        "--trials",
        "1",
        "--max-epochs",
        "2",
        "--eval-seeds",
        "1",
    ]
    one = run(*flags, timeout=500)
    assert one.returncode == 0, one.stderr
    two = run(*flags, "--workers-per-trial", "2", "--cpus-per-trial", "0.9", "--fresh", timeout=500)
    assert two.returncode == 0, two.stderr
    trials = trials_of("houses")
    assert list(trials["metrics.workers"]) == [0.0, 2.0]
    # Same global batches, no dropout: the same training up to rounding.
    assert set(trials["params.model.dropout"].astype(float)) == {0.0}
    for name in ("metrics.epoch/train_loss", "metrics.epoch/val_loss", "metrics.epoch/val_score"):
        assert trials[name].iloc[0] == pytest.approx(trials[name].iloc[1], rel=1e-4, abs=1e-5), name
    scores = [float(re.search(r"test score of houses: r2 (\S+)", r.stdout)[1]) for r in (one, two)]
    assert scores[0] == pytest.approx(scores[1], abs=2e-4), "printed with four digits"


@pytest.mark.slow
def test_dry_run_trains_nothing(table: Path, tmp_path: Path) -> None:
    result = run("--table", str(table), "--target", "price", "--dry-run", "--trials", "7")
    assert result.returncode == 0, result.stderr
    assert (
        "houses-bishop-s0: regression, 1 numerical + 1 categorical columns, 63 train / 18 validation / 9"
        in result.stdout
    )
    assert "bishop: 7 trials per study" in result.stdout
    assert "model.d_model" in result.stdout
    assert not (tmp_path / "home").exists()


def test_dry_run_over_several_models_names_those_that_will_be_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "catboost" else find(name, *a))
    monkeypatch.setattr(tune, "connect_cluster", lambda address: Cluster(4, 0))
    flags = ["--dataset", "iris", "--models", "all", "--dry-run", "--trials", "12"]
    assert tune.tune(cli.tune_parser().parse_args(flags)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "iris-catboost-s0: will be skipped: catboost needs catboost: pip install 'bishop-ray[boosters]'" in lines
    assert any(line.startswith("iris-tabpfn-s0: ") and "will be skipped: tabpfn needs" in line for line in lines)
    assert "mlp: 12 trials per dataset, shared with the other models, up to 200 epochs each" in lines
    assert not any(line.startswith("catboost: ") for line in lines)
    with pytest.raises(UserError, match="pip install"):
        tune.tune(cli.tune_parser().parse_args(["--dataset", "iris", "--models", "catboost", "--dry-run"]))


BAD = [
    ([], ["--suite", "found none"]),
    (["--suite", "CR", "--dataset", "iris"], ["--suite and --dataset"]),
    (["--suite", "CX"], ["unknown suite 'CX'", "did you mean"]),
    (["--task", "abc"], ["'abc'", "positive number"]),
    (["--dataset", "irs"], ["unknown dataset 'irs'", "did you mean 'iris'"]),
    (["--dataset", "iris", "--models", "bishup"], ["unknown model 'bishup'", "did you mean 'bishop'"]),
    (["--dataset", "iris", "--metric", "acuracy"], ["unknown metric 'acuracy'", "did you mean 'accuracy'"]),
    (["--dataset", "iris", "--metric", "r2"], ["r2", "multiclass"]),
    (["--dataset", "iris", "--space", "bishop_smal"], ["did you mean 'bishop_small'"]),
    (["--dataset", "iris", "--target", "x"], ["--target goes with --table"]),
    (["--dataset", "iris", "--trials", "0"], ["--trials", ">= 1", "'0'"]),
    (["--dataset", "iris", "--time-budget", "soon"], ["--time-budget", "'soon'", "30m"]),
    (["--dataset", "iris", "--split", "0.5,0.5"], ["--split", "'0.5,0.5'"]),
    (["--dataset", "iris", "--seed", "-1"], ["--seed", ">= 0", "'-1'"]),
    (["--dataset", "iris", "--seed", "\u00b2"], ["--seed", ">= 0"]),
    (["--dataset", "iris", "--gpus-per-trial", "-0.5"], ["--gpus-per-trial", ">= 0", "'-0.5'"]),
    (["--dataset", "iris", "--cpus-per-trial", "0"], ["--cpus-per-trial", "> 0", "'0'"]),
    (["--dataset", "iris", "--models", ""], ["--models", "at least one of lightgbm", "''"]),
    (["--dataset", "iris", "--models", ","], ["--models", "at least one of lightgbm", "','"]),
    (
        ["--dataset", "iris", "--models", "xgbost", "mlp"],
        ["unknown model 'xgbost'", "did you mean 'xgboost'", "known:"],
    ),
    (["--dataset", "iris", "--models", "all", "mlp"], ["--models: expected all, or names", "'all mlp'"]),
    (["--dataset", "iris", "--models", "mlp,tabm", "--space", "mlp"], ["--space goes with one model", "mlp tabm"]),
    (["--dataset", "iris", "--models", "all", "--eval-seeds", "2"], ["--eval-seeds goes with one model"]),
    (["--dataset", "iris", "--frobnicate"], ["--frobnicate"]),
    (["--table", "nowhere.csv", "--target", "x"], ["nowhere.csv", "no such file"]),
    (["--table", "TABLE"], ["target"]),
    (["--table", "TABLE", "--target", "prise"], ["'prise'", "did you mean 'price'"]),
    (["--table", "TABLE", "--target", "empty"], ["'empty'", "missing"]),
    (["--table", "TABLE", "--target", "same"], ["'same'", "one"]),
    (["--table", "TABLE", "--target", "street", "--task-type", "regression"], ["street", "regression"]),
    (["--table", "TABLE", "--target", "price", "--task-type", "regresion"], ["did you mean 'regression'"]),
    (["--dataset", "iris", "--tracking-uri", "./mlruns"], ["sqlite"]),
    (["--dataset", "iris", "--tracking-uri", "ftp://x"], ["ftp"]),
]


@pytest.mark.parametrize(("flags", "words"), BAD, ids=lambda value: " ".join(value) or "nothing")
def test_bad_input_is_one_clear_line(flags: list[str], words: list[str], table: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        tune.tune(cli.tune_parser().parse_args([str(table) if f == "TABLE" else f for f in flags]))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    assert not (tmp_path / "home" / "studies").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["empty"]),
        ("a,price\n", ["rows"]),
        ("price\n1\n2\n3\n", ["feature"]),
        ("a,price\n1,2\n2,3\n", ["rows"]),
        ("a,a,price\n" + "1,2,3\n" * 50, ["'a'"]),
        ('a,price\n"1,2\n', []),
        ("\x00\x01\x02", []),
    ],
)
def test_bad_files_are_one_clear_line(content: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        tune.tune(cli.tune_parser().parse_args(["--table", str(path), "--target", "price"]))
    message = str(caught.value)
    assert "\n" not in message
    for word in ["bad.csv", *words]:
        assert word in message, message


def test_exit_code_and_standard_error(tmp_path: Path) -> None:
    result = run("--dataset", "irs")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: unknown dataset 'irs'")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "home").exists(), "nothing half-written"


JOBS = {
    "tune": lambda flags: tune.tune(cli.tune_parser().parse_args(flags)),
    "train": lambda flags: train.run_train(train.train_parser().parse_args(flags)),
    "ablate": lambda flags: ablate.run_ablate(ablate.ablate_parser().parse_args(["depth", *flags])),
    "reproduce": lambda flags: reproduce.run_reproduce(
        reproduce.reproduce_parser().parse_args(["--paper-table", "1", *flags])
    ),
}


@pytest.mark.parametrize("job", JOBS)
def test_storage_that_cannot_be_written_is_told_first(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "store"
    flags = ["--dataset", "adult" if job == "reproduce" else "iris"]

    def started(address: str) -> Cluster:
        raise AssertionError("Ray is started")

    monkeypatch.setattr(tune, "connect_cluster", started)
    with pytest.raises(UserError, match=rf"^--storage or BISHOP_RAY_HOME: cannot write {below}: Not a directory$"):
        JOBS[job]([*flags, "--storage", str(below)])
    monkeypatch.setenv("BISHOP_RAY_HOME", str(below))
    with pytest.raises(UserError, match=f"cannot write {below}: Not a directory"):
        JOBS[job](flags)
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "MLflow's store is not made"


def test_a_folder_is_tried_and_not_made(tmp_path: Path) -> None:
    check_storage(tmp_path / "new" / "store")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="cannot write /proc/store: "):
        check_storage(Path("/proc/store"))
    with pytest.raises(UserError, match=r"cannot write .*: File name too long"):
        check_storage(tmp_path / ("x" * 300))


def test_space_file_with_unknown_key(tmp_path: Path) -> None:
    space = tmp_path / "mine.yaml"
    space.write_text("model: {d_modle: 8}\n")
    result = run("--dataset", "iris", "--space", str(space))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "mine.yaml" in result.stderr
    assert "did you mean 'd_model'" in result.stderr
    assert not (tmp_path / "home" / "studies").exists()


@pytest.mark.slow
def test_unreachable_tracking_server() -> None:
    with socket.socket() as listener:  # accepts and never answers
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(UserError, match=r"127\.0\.0\.1:\d+ (is not available|did not answer)"):
            check_tracking(address)
        waited = time.monotonic() - started
        result = run("--dataset", "iris", "--tracking-uri", address)
    assert waited <= 20.5  # 20 s for the server, and the wake-up of a thread on a busy machine
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "127.0.0.1" in result.stderr


def test_unreachable_openml_with_a_cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENML_CACHE_DIR", str(tmp_path / "cold"))
    with socket.socket() as closed:  # a port that nobody listens on
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    started = time.monotonic()
    result = run("--suite", "CR", "--openml-server", address)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert address in result.stderr
    assert time.monotonic() - started < 60


@pytest.mark.slow
def test_suite_on_the_mirror(mirror: str, tmp_path: Path, openml_cache: Path) -> None:
    flags = ["--task", "361093", "361288", "--openml-server", mirror, "--max-rows", "300", *TINY]
    result = run(*flags, "--trials", "1", "--max-epochs", "2", "--eval-seeds", "1")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    board = pd.read_csv(tmp_path / "home" / "leaderboards" / "openml-tasks.csv")
    assert list(board["dataset"]) == ["361093-analcatdata_supreme", "361288-abalone"]
    assert list(board["metric"]) == ["r2", "r2"]
    assert not list(Path(os.environ["BISHOP_RAY_HOME"]).glob("studies/*/tune-*"))


def test_metric_that_fits_none_of_several_tasks(mirror: str, openml_cache: Path) -> None:
    flags = ["--task", "361093", "361288", "--openml-server", mirror, "--metric", "auc"]
    with pytest.raises(UserError, match="metric 'auc' does not fit a regression task"):
        tune.tune(cli.tune_parser().parse_args(flags))
