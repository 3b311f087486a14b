"""Public bug reports of this field that are tried from end to end; `case N` in a docstring is a report's number."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bishop_ray import cli
from bishop_ray.cli import ablate, models, reproduce, serve, train, tune
from bishop_ray.cli import report as report_cli
from bishop_ray.config import Resources, StudyConfig
from bishop_ray.data.refs import embedded_ref
from bishop_ray.data.schema import make_raw
from bishop_ray.data.split import SplitProtocol, split_indices
from bishop_ray.data.table import TaskType
from bishop_ray.errors import UserError
from bishop_ray.metrics import METRICS, evaluate
from bishop_ray.search.dataset import divide, prepare
from bishop_ray.search.ensemble import Candidate, Problem, build_ensemble
from bishop_ray.search.ensemble_selection import Member, cross_fitted, fold_of_rows, select
from bishop_ray.training.job import TrialSettings, train_here

ROOT = Path(__file__).resolve().parents[1]
SMALL = {
    "xgboost": {"model": {"n_rounds": 8, "patience": 8}, "train": {}},
    "random_forest": {"model": {"n_trees": 8}, "train": {}},
    "mlp": {"model": {"n_blocks": 1, "d_block": 16}, "train": {"lr": 1e-2}},
}


@pytest.mark.parametrize("metric", ["log_loss", "rmse"])
def test_weights_of_an_ensemble_fit_the_rows_of_a_shuffled_table(metric: str, tmp_path: Path) -> None:
    """Case 6: from a frame with a shuffled index of repeated numbers to an ensemble's score, recomputed by hand."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(150, 3))
    number = x @ [1.0, -1.0, 0.5] + rng.normal(scale=0.5, size=150)
    y = number if metric == "rmse" else np.where(number > 0, "b", "a")
    frame = pd.DataFrame(x, columns=list("xyz"), index=rng.permutation(np.r_[0:75, 0:75])).assign(y=y)
    raw = make_raw("t", frame, "y")
    config = StudyConfig(embedded_ref("iris"), "mlp", "", 1, 4, metric, SplitProtocol((0.6, 0.3, 0.1)), seed=5)
    loaded = divide(config, raw)
    data = prepare(loaded).data
    found = []
    for model, params in SMALL.items():
        settings = TrialSettings(model, metric, 4, 0, Resources(), "inprocess", "", None)
        scores: list[float] = []
        folder = tmp_path / model

        def note(report: object, scores: list[float] = scores) -> bool:
            scores.append(report.best_val_score)  # type: ignore[attr-defined]
            return False

        train_here(settings.trial(params), data, folder / "c", note, folder)
        found.append(Candidate(model, 0, scores[-1], folder))
    task = raw.task
    problem = Problem(data.validation.y, metric, task, data.target_scale, 0)
    ensemble = build_ensemble(sorted(found, key=lambda c: -c.score), problem)
    assert ensemble is not None

    rows = frame.iloc[split_indices(raw, 5, (0.6, 0.3, 0.1)).validation]
    assert rows.index.has_duplicates
    predictor = ensemble.load()
    for contender, _ in ensemble.members:
        np.testing.assert_allclose(contender.predictions(), contender.load().output(rows), atol=1e-5)
    weights = select(
        [Member(c.model, "0", c.score) for c, _ in ensemble.members],
        [c.load().output(rows).astype(np.float32) for c, _ in ensemble.members],
        predictor.target.encode(rows["y"]), metric, task, data.target_scale,
    )  # fmt: skip
    assert list(weights.values()) == pytest.approx([weight for _, weight in ensemble.members])
    if metric == "rmse":
        by_hand = -np.sqrt(np.mean((predictor.predict(rows) - rows["y"]) ** 2))
    else:
        likely = predictor.predict_proba(rows).to_numpy()[np.arange(len(rows)), (rows["y"] == "b").astype(int)]
        by_hand = np.mean(np.log(likely))
    whole = evaluate(metric, task, problem.y, predictor.output(rows), scale=data.target_scale)
    assert whole == pytest.approx(by_hand, rel=1e-5)
    assert whole >= found[0].score - 1e-6
    other = rows.iloc[rng.permutation(len(rows))]
    assert abs(evaluate(metric, task, problem.y, predictor.output(other), scale=data.target_scale) - whole) > 0.05


@pytest.mark.parametrize("metric", [name for name, row in METRICS.items() if TaskType.MULTICLASS in row.tasks])
def test_seven_classes_one_of_three_rows_and_five_folds(metric: str) -> None:
    """Cases 8 and 27: two folds of five lack the class; five are used, and every metric knows all seven."""
    rng = np.random.default_rng(0)
    y = rng.permutation(np.r_[np.repeat(np.arange(6), 20), [6, 6, 6]])
    fold = fold_of_rows(y, TaskType.MULTICLASS, 5, seed=0)
    assert len(set(fold.tolist())) == 5
    assert sum(6 not in y[fold == k] for k in range(5)) == 2
    predictions = []
    for sharpness in (1.0, 2.0, 4.0):
        raw = rng.dirichlet(np.ones(7), len(y))
        raw[np.arange(len(y)), y] += sharpness
        predictions.append((raw / raw.sum(axis=1, keepdims=True)).astype(np.float32))
    members = [Member(f"f{i}", "", evaluate(metric, TaskType.MULTICLASS, y, p)) for i, p in enumerate(predictions)]
    assert all(np.isfinite(member.score) for member in members)
    assert np.isfinite(cross_fitted(members, predictions, y, metric, TaskType.MULTICLASS).score)
    for k in range(5):
        assert np.isfinite(evaluate(metric, TaskType.MULTICLASS, y[fold == k], predictions[0][fold == k]))


JOBS: dict[str, tuple[Callable[[], argparse.ArgumentParser], Callable[[argparse.Namespace], int]]] = {
    "tune": (cli.tune_parser, tune.tune),
    "train": (train.train_parser, train.run_train),
    "ablate": (ablate.ablate_parser, ablate.run_ablate),
    "reproduce": (reproduce.reproduce_parser, reproduce.run_reproduce),
    "report": (report_cli.report_parser, report_cli.run_report),
    "serve": (serve.serve_parser, serve.run_serve),
    "predict": (serve.predict_parser, serve.run_predict),
    "models": (models.models_parser, models.run_models),
}
LINES = (
    "tune --dataset iris --models mlp --trials 1",
    "train --dataset iris --model mlp",
    "ablate components --dataset iris",
    "reproduce --paper-table 1 --dataset adult --data-dir . --models mlp",
    "report --experiment x",
    "serve iris",
    "predict iris rows.csv --output out.csv",
    "models sync",
    "models replay 1",
    "models ensemble iris",
)


@pytest.mark.parametrize("how", ["flag", "variable"])
@pytest.mark.parametrize("line", LINES)
def test_a_file_store_is_refused_by_every_job(
    line: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 58: with the way out, before anything is written; neither job nor environment is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BISHOP_RAY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "rows.csv").write_text("a\n1\n")
    (tmp_path / "adult.csv").write_text("a\n1\n")
    job, *flags = line.split()
    parser, run = JOBS[job]
    if how == "flag":
        flags += ["--tracking-uri", "./mlruns"]
    else:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:mlruns")
    with pytest.raises(
        UserError, match=r"is a file store, .* use sqlite:.*mlflow migrate-filestore --source \S*mlruns"
    ):
        run(parser().parse_args(flags))
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"rows.csv", "adult.csv"}
    assert not (tmp_path / "mlruns").exists()


def test_a_file_store_is_refused_behind_fit(tmp_path: Path) -> None:
    """Case 58."""
    from bishop_ray.sklearn import TunedRegressor

    search = TunedRegressor(models="mlp", trials=1, storage=str(tmp_path), tracking_uri=str(tmp_path / "mlruns"))
    with pytest.raises(ValueError, match="is a file store"):
        search.fit(np.arange(60.0).reshape(30, 2), np.arange(30.0))
    assert not (tmp_path / "mlruns").exists()


WITNESS = """
import os, socket, sys
from pathlib import Path

HERE = ("127.", "::1", "localhost", "0.0.0.0", "::", socket.gethostname())


def witness(event, args):
    if event == "socket.connect" and isinstance(args[1], tuple):
        # A datagram socket is "connected" to learn the own address; nothing is sent.
        host = args[1][0] if args[0].type & 15 == socket.SOCK_STREAM else ""
    elif event == "socket.sendto" and isinstance(args[1], tuple):
        host = args[1][0]
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = args[0].decode() if isinstance(args[0], bytes) else args[0] or ""
    else:
        return
    kind = "own" if not host or host.startswith(HERE) else "foreign"
    with open(os.environ["WITNESS"], "a") as file:
        names = [frame.f_code.co_filename for frame in frames(sys._getframe())] if kind == "foreign" else []
        callers = [n.split("site-packages/")[1] for n in names if "site-packages/" in n]
        file.write(f"{kind} {os.getpid()} {event} {host} {' < '.join(dict.fromkeys(callers))}\\n")


def frames(frame):
    while frame:
        yield frame
        frame = frame.f_back


sys.addaudithook(witness)
"""


@pytest.fixture
def room() -> Iterator[Path]:
    """A short folder: Ray's sockets lie in it, and their paths have a limit."""
    with tempfile.TemporaryDirectory(prefix="bc", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.mark.slow
def test_a_search_calls_nobody_and_needs_no_network(room: Path) -> None:
    """Case 88: no Python process of a search asks for another host; where the system lets us, there is no route."""
    witness = room / "site"
    witness.mkdir()
    (witness / "sitecustomize.py").write_text(WITNESS)
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(90, 3)), columns=list("abc"))
    frame.assign(y=frame.a > 0).to_csv(room / "t.csv", index=False)
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "LANG") if name in os.environ}
    env = {**kept, "HOME": str(room), "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{witness}:{ROOT}", "TMPDIR": str(room)}
    env |= {"WITNESS": str(room / "calls.txt"), "RAY_TMPDIR": str(room)}
    alone = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "alone"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True).returncode:
        alone = []
    command = [*alone, sys.executable, str(ROOT / "jobs" / "tune.py"), "--table", str(room / "t.csv"), "--target", "y"]
    command += ["--models", "mlp", "--trials", "1", "--max-epochs", "2", "--eval-seeds", "1", "--max-concurrent", "1"]
    done = subprocess.run(command, cwd=room, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    calls = (room / "calls.txt").read_text().splitlines()
    assert not [call for call in calls if call.startswith("foreign")]
    assert len({call.split()[1] for call in calls}) >= 3, "driver, Ray's own processes and a worker are watched"
