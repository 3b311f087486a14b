"""A team's MLflow: the documented command, 32 writers at once, and a server that stops, dies and comes back."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pandas as pd
import pytest
import requests
from mlflow.entities import ViewType
from mlflow.tracking import MlflowClient
from team_server import ROOT, USER, TeamServer, free_port, postgres_bin

from bishop_ray.tracking import StudyTracker, check_tracking, runs_frame

pytestmark = pytest.mark.faults

PROCESSES, STUDIES, TRIALS, EPOCHS = 4, 8, 3, 25
METRICS = ("epoch/train_loss", "epoch/best_val_score", "layers/alpha/encoder.0")


@pytest.fixture(scope="module")
def team() -> Iterator[TeamServer]:
    """A running server, in a folder that is short enough for a socket's address."""
    postgres_bin()  # or the test is skipped, before anything is made
    place = Path(tempfile.mkdtemp(prefix="team-", dir="/tmp"))
    if not os.getuid():
        shutil.chown(place, USER)
    server = TeamServer(place / "mlflow")
    try:
        server.start()
        yield server
    finally:
        done = server.command("stop")
        shutil.rmtree(place, ignore_errors=True)
    assert done.returncode == 0, done.stdout + done.stderr


def value(study: int, trial: int, epoch: int, metric: int) -> float:
    return (study + 1) * (trial + 2) * (epoch + 3) / (7.0 + metric)


def write_studies(uri: str, folder: str, first: int) -> None:
    """Eight studies of one process, their epochs in turn, as eight searches side by side have them."""
    studies = range(first, first + STUDIES)
    trackers = {
        s: StudyTracker(
            uri, "team", f"s{s}", folder=Path(folder) / f"s{s}", params={"seed": s}, tags={"dataset": "wine"}
        )
        for s in studies
    }
    for trial in range(TRIALS):
        for study, tracker in trackers.items():
            tracker.trial_started(trial, {"model": {"width": study * 10 + trial}, "train": {"lr": 1e-3}})
        for epoch in range(EPOCHS):
            for study, tracker in trackers.items():
                metrics = {name: value(study, trial, epoch, m) for m, name in enumerate(METRICS)}
                tracker.trial_reported(trial, epoch, metrics)
            time.sleep(0.02)
        for study, tracker in trackers.items():
            status = ("FINISHED", "KILLED", "FAILED")[trial % 3]
            tracker.trial_finished(trial, status, f"reason {study}", {"seconds": float(study)})
            tracker.study_reported(trial + 1, {"best_val_score": float(trial)})
    for tracker in trackers.values():
        assert tracker.close(timeout=120)
        assert tracker.dropped == 0


def test_32_concurrent_writers_lose_and_double_nothing(team: TeamServer, tmp_path: Path) -> None:
    check_tracking(team.uri)
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=write_studies, args=(team.uri, str(tmp_path), p * STUDIES)) for p in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(150)
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    assert not list(tmp_path.glob("*/mlflow_spool.jsonl"))

    client = MlflowClient(team.uri)
    frame = runs_frame(team.uri, "team")
    assert Counter(frame.kind) == {"study": 32, "trial": 32 * TRIALS}
    parents = frame[frame.kind == "study"].set_index("tags.bishop.study_id")
    assert set(parents.status) == {"FINISHED"}
    assert parents["params.seed"].to_dict() == {f"s{s}": str(s) for s in range(32)}
    for study, parent in parents.run_id.items():
        history = client.get_metric_history(parent, "best_val_score")
        assert sorted((m.step, m.value) for m in history) == [(1, 0.0), (2, 1.0), (3, 2.0)], study
    found = client.search_runs([client.get_experiment_by_name("team").experiment_id], max_results=1000)
    parent_of = {run.info.run_id: run.data.tags.get("mlflow.parentRunId") for run in found}
    trials = frame[frame.kind == "trial"].set_index(["tags.bishop.study_id", "trial"])
    assert trials.index.is_unique
    for (name, trial), run in trials.iterrows():
        study = int(name[1:])
        assert run.status == ("FINISHED", "KILLED", "FAILED")[trial % 3]
        assert (run["params.model.width"], run["params.train.lr"]) == (str(study * 10 + trial), "0.001")
        assert (run["tags.bishop.reason"], run["tags.dataset"]) == (f"reason {study}", "wine")
        assert run["metrics.seconds"] == study
        assert parent_of[run.run_id] == parents.run_id[name]
        for m, metric in enumerate(METRICS):
            history = client.get_metric_history(run.run_id, metric)
            expected = [(epoch, value(study, trial, epoch, m)) for epoch in range(EPOCHS)]
            assert sorted((point.step, point.value) for point in history) == expected
    assert len(list((team.folder / "artifacts").rglob("*"))) == 0  # nothing was too long for its place
    assert team.sql("SELECT count(*) FROM metrics") == [str(32 * (TRIALS * (EPOCHS * 3 + 1) + TRIALS))]


def test_the_command_guards_the_server(team: TeamServer) -> None:
    again = team.command("start", "--port", str(team.port))
    assert (again.returncode, again.stdout) == (0, f"running: {team.uri}\n")
    assert team.uri in team.command("status").stdout
    assert team.sql("SHOW listen_addresses") == [""]  # no TCP port at all
    assert (team.folder / "postgres" / "pg_hba.conf").read_text().count("peer") >= 1
    psql = [str(team.bin / "psql"), "-h", str(team.folder / "socket"), "-d", "mlflow", "-c", "SELECT 1"]
    if not os.getuid():  # who could read all of its files
        for line in (psql, [*psql, "-U", "nobody"]):
            assert subprocess.run(line, capture_output=True, check=False).returncode
        refused = team.command("start", user=False)
        assert refused.returncode == 2
        assert "root cannot run PostgreSQL" in refused.stderr
    other = TeamServer(team.folder.parent / "other")
    for flags, words in (
        (["--port", str(team.port)], "taken"),
        (["--port", "x"], "--port: expected a number; found 'x'"),
        (["--prot", "1"], "found '--prot'"),
    ):
        done = other.command("start", *flags)
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
    assert "expected a folder" in TeamServer(team.folder.parent / "none").command("stop").stderr


def test_a_short_trial_takes_five_requests(team: TeamServer, tmp_path: Path) -> None:
    log = team.folder / "log" / "mlflow.log"
    tracker = StudyTracker(team.uri, "calls", "s", folder=tmp_path, tags={"dataset": "wine", "data_hash": "abc"})
    assert tracker.flush()
    before = log.read_text().count(" /api/")
    for number in range(20):
        tracker.trial_started(number, {f"p{i}": i for i in range(30)})
        for epoch in range(20):
            tracker.trial_reported(number, epoch, dict.fromkeys(METRICS, 1.0))
        tracker.trial_finished(number, "FINISHED", "patience", {"seconds": 1.0}, {"host": "a"})
    assert tracker.flush()
    # Its creation, its dataset, all of its values, its end; the start in a batch before the rest costs one more.
    assert 20 * 4 <= log.read_text().count(" /api/") - before <= 20 * 5
    assert tracker.close()


def test_texts_that_postgres_refuses_hold_up_nothing(team: TeamServer, tmp_path: Path) -> None:
    tags = {"dataset": "d" * 600, "data_hash": "h" * 60}
    tracker = StudyTracker(team.uri, "odd", "s" * 300, folder=tmp_path, study_id="odd", tags=tags)
    tracker.trial_started(0, {"zero": "a\0b", "half": "\ud800", "wide": "é" * 5999, "long": "x" * 9000})
    tracker.trial_reported(0, 1, {"large": 1e308, "small": 5e-324})
    tracker.trial_finished(0, "FAILED", "why \0 " + "y" * 9000, {"seconds": 1.0})
    assert tracker.close()
    assert tracker.dropped == 0
    frame = runs_frame(team.uri, "odd").set_index("trial")
    assert frame["params.zero"][0] == "a\ufffdb"
    assert frame["params.wide"][0] == "é" * 5999
    assert (frame["metrics.large"][0], frame["metrics.small"][0]) == (1e308, 5e-324)
    assert frame.status.to_dict() == {-1: "FINISHED", 0: "FAILED"}


def sync(storage: Path, uri: str) -> str:
    line = [sys.executable, str(ROOT / "jobs" / "models.py"), "sync", "--storage", str(storage), "--tracking-uri", uri]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def histories(uri: str, experiment: str) -> dict[int, list[int]]:
    client = MlflowClient(uri)
    frame = runs_frame(uri, experiment)
    trials = frame[frame.kind == "trial"].set_index("trial").sort_index()
    assert trials.index.is_unique
    return {
        number: [m.step for m in client.get_metric_history(run_id, "epoch/lr")]
        for number, run_id in trials.run_id.items()
    }


def test_a_server_that_stops_dies_and_comes_back(team: TeamServer, tmp_path: Path) -> None:
    """SIGSTOP in the middle of creations; SIGKILL, and gone when the study ends; a new start, and a sync."""
    tracker = StudyTracker(team.uri, "down", "s", folder=tmp_path / "studies" / "s")

    def report(numbers: range, epochs: range) -> None:
        for epoch in epochs:
            for number in numbers:
                tracker.trial_reported(number, epoch, {"epoch/lr": epoch / 3})

    for number in range(4):
        tracker.trial_started(number, {"lr": number})
    report(range(4), range(10))
    assert tracker.flush()
    team.signal(signal.SIGSTOP)
    try:
        for number in range(4, 8):
            tracker.trial_started(number, {"lr": number})
        report(range(8), range(10, 20))
        time.sleep(12)  # a creation is tried twice meanwhile, and both wait in the server's socket
    finally:
        team.signal(signal.SIGCONT)
    report(range(8), range(20, 25))
    assert tracker.flush(60)
    team.signal(signal.SIGKILL)
    report(range(8), range(25, 30))
    for number in range(8):
        tracker.trial_finished(number, "FINISHED" if number < 4 else "KILLED", "done")
    tracker.trial_started(8, {"lr": 8})
    tracker.trial_reported(8, 0, {"epoch/lr": 0.5})
    began = time.monotonic()
    assert not tracker.close(timeout=20)
    assert time.monotonic() - began < 21
    assert tracker.spool_path.is_file()
    team.start()
    assert sync(tmp_path, team.uri).endswith("runs completed\n")
    assert not tracker.spool_path.exists()

    expected = {number: list(range(30)) for number in range(4)}
    expected |= {number: list(range(10, 30)) for number in range(4, 8)} | {8: [0]}
    assert histories(team.uri, "down") == expected
    frame = runs_frame(team.uri, "down").set_index("trial").sort_index()
    assert frame.status.tolist() == ["FINISHED"] * 5 + ["KILLED"] * 5
    assert "nothing to do" in sync(tmp_path, team.uri)
    pd.testing.assert_frame_equal(runs_frame(team.uri, "down").set_index("trial").sort_index(), frame)
    assert histories(team.uri, "down") == expected


class LateCreation(BaseHTTPRequestHandler):
    """Passes on every request to the server behind it; the first creation of either kind of run only much later."""

    behind = ""
    held: ClassVar[set[str]] = set()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind = "trial" if b"bishop.trial" in body else "study"
        if held := self.path.endswith("/runs/create") and kind not in self.held:
            self.held.add(kind)
            time.sleep(14)  # their client hangs up after 5 s, and its second try is answered at once
        headers = {"Content-Type": self.headers.get("Content-Type", "application/json")}
        answer = requests.request(self.command, self.behind + self.path, data=body, headers=headers, timeout=30)
        if not held:
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

    do_GET = do_PATCH = do_POST

    def log_message(self, *args: object) -> None:
        """Nothing on the screen."""


def test_a_run_that_is_made_late_does_not_stay(team: TeamServer, tmp_path: Path) -> None:
    """A busy server makes the run that was asked for first after the study has told everything else."""
    handler = type("Handler", (LateCreation,), {"behind": team.uri, "held": set()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tracker = StudyTracker(f"http://127.0.0.1:{server.server_port}", "late", "s", folder=tmp_path)
        tracker.trial_started(0, {"lr": 0.1})
        tracker.trial_finished(0, "FINISHED", "patience", {"seconds": 1.0})
        began = time.monotonic()
        assert tracker.close()
        assert time.monotonic() - began > 14
        server.shutdown()
    frame = runs_frame(team.uri, "late").set_index("trial").sort_index()
    assert frame.status.to_dict() == {-1: "FINISHED", 0: "FINISHED"}
    experiment = MlflowClient(team.uri).get_experiment_by_name("late").experiment_id
    gone = MlflowClient(team.uri).search_runs([experiment], run_view_type=ViewType.DELETED_ONLY)
    assert sorted(run.data.tags["bishop.kind"] for run in gone) == ["study", "trial"]


def test_a_wrong_port_is_named(tmp_path: Path) -> None:
    """Without a flag, what waits is not sent to another store than the one it was written for."""
    folder = tmp_path / "studies" / "s"
    meant = f"http://127.0.0.1:{free_port()}"
    tracker = StudyTracker(meant, "x", "s", folder=folder)
    assert not tracker.close(timeout=15)
    line = [sys.executable, str(ROOT / "jobs" / "models.py"), "sync", "--storage", str(tmp_path)]
    env = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 2
    assert meant in done.stderr
    assert done.stderr.count("\n") == 1
    assert tracker.spool_path.is_file()
    assert not (tmp_path / "mlflow.db").exists()
