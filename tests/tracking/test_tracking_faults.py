"""Servers that hang, drip, refuse and lie; writers killed at any moment; MLflow brought back to the study."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import optuna
import pandas as pd
import pytest
from mlflow.tracking import MlflowClient

from bishop_ray.cli import models
from bishop_ray.errors import UserError
from bishop_ray.search.journal import open_journal
from bishop_ray.search.study import locked
from bishop_ray.tracking import StudyTracker, check_tracking, replay_spool, runs_frame
from bishop_ray.tracking.spool import Spool

pytest_plugins = ("tracking_fixtures",)
pytestmark = pytest.mark.faults
ROOT = Path(__file__).resolve().parents[2]


class Faulty(BaseHTTPRequestHandler):
    """Answers every request in the way that its server is named after."""

    fault = ""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.fault == "drip":
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            for _ in range(60):
                self.wfile.write(b" ")
                time.sleep(1)
            return
        self.send_response(200 if self.fault == "login page" else int(self.fault))
        self.send_header("Retry-After", "3600")
        self.end_headers()
        self.wfile.write(b"<html>please log in, or come back later</html>")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def log_message(self, *args: object) -> None:
        """Nothing on the screen."""


@pytest.fixture(params=["hole", "drip", "500", "503", "429", "404", "login page"])
def faulty(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server with a fault; the hole takes connections and never answers."""
    if request.param == "hole":
        with socket.socket() as hole:
            hole.bind(("127.0.0.1", 0))
            hole.listen(64)
            yield f"http://127.0.0.1:{hole.getsockname()[1]}"
        return
    handler = type("Handler", (Faulty,), {"fault": request.param})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_training_never_waits_and_nothing_is_lost(faulty: str, uri: str, tmp_path: Path) -> None:
    tracker = StudyTracker(faulty, "x", "s", folder=tmp_path / "study")
    seconds = []
    for number in range(4):
        tracker.trial_started(number, {"lr": number})
        for epoch in range(100):
            began = time.perf_counter()
            tracker.trial_reported(number, epoch, {"val_loss": epoch / 7, "lr": 0.5})
            seconds.append(time.perf_counter() - began)
            time.sleep(0.002)
    tracker.trial_finished(0, "FINISHED", "patience")
    assert statistics.median(seconds) < 1e-4
    began = time.monotonic()
    assert not tracker.close(timeout=2)
    assert time.monotonic() - began < 3
    assert tracker.dropped == 0
    assert replay_spool(tracker.spool_path, uri) == 1 + 4 * 101 + 1 + 1
    frame = runs_frame(uri, "x").set_index("trial").sort_index()
    assert frame.status.to_dict() == {-1: "FINISHED", 0: "FINISHED", 1: "KILLED", 2: "KILLED", 3: "KILLED"}
    client = MlflowClient(uri)
    for number in range(4):
        for key in ("val_loss", "lr"):
            history = client.get_metric_history(frame.run_id[number], key)
            assert [m.step for m in history] == list(range(100))


@pytest.mark.parametrize("faulty", ["503", "429", "login page"], indirect=True)
def test_a_refusal_is_told_at_once(faulty: str) -> None:
    """Whatever time the server asks for before the next try: an hour here."""
    began = time.monotonic()
    with pytest.raises(UserError, match=r"127\.0\.0\.1") as caught:
        check_tracking(faulty)
    assert time.monotonic() - began < 8
    assert "\n" not in str(caught.value)


def test_a_full_disk_keeps_events_in_memory(tmp_path: Path) -> None:
    spool = Spool(Path("/dev/full"))
    events = [{"kind": "metrics", "time": 1, "trial": 0, "step": step, "metrics": {"a": 1.0}} for step in range(5)]
    for event in events:
        spool.append([event])
    assert spool.read().events == events
    spool.path = tmp_path / "spool.jsonl"  # there is room again
    time.sleep(1.1)
    batch = spool.read()
    spool.append(events[:1])
    assert spool.read().events == [*events, events[0]]
    spool.drop(batch)  # what was sent from memory is on disk now: once more is no harm, less would be
    assert spool.read().events == [*events, events[0]]


def test_a_long_outage_is_read_in_pieces_and_the_file_is_cut(tmp_path: Path) -> None:
    header = {"kind": "study", "time": 0, "study_id": "s"}
    spool = Spool(tmp_path / "spool.jsonl", header)
    events = [{"kind": "metrics", "time": step, "trial": 0, "pad": "x" * 2000} for step in range(5000)]
    spool.append(events)
    largest, found = spool.path.stat().st_size, []
    while spool:
        batch = spool.read()
        assert len(batch.events) <= 1000
        found += batch.events
        spool.drop(batch)
        if spool.path.exists():
            assert json.loads(spool.path.open().readline()) == header
    assert found == events
    assert not spool.path.exists()
    assert largest > 10e6


WRITER = """
import json, os, sys, time
from pathlib import Path
from bishop_ray.tracking import KnownTrial, StudyTracker
uri, folder, epochs = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
truth = folder / "truth"
done = [int(line) for line in truth.read_text().split()] if truth.exists() else []
tracker = StudyTracker(uri, "x", "s", folder=folder)
known = {e: {"epoch/best_val_score": e / 3} for e in done}
tracker.trials_known([KnownTrial(0, {"lr": 0.5}, "", "", 1000, 1000, known)])
tracker.trial_started(0, {"lr": 0.5})
for epoch in range(max(done, default=0) // 5 * 5 + 1, epochs + 1):  # a checkpoint every five epochs
    if epoch not in done:
        with truth.open("a") as file:
            file.write(f"{epoch}\\n")
    tracker.trial_reported(0, epoch, {"epoch/best_val_score": epoch / 3, "epoch/train_loss": 1 / epoch})
    time.sleep(0.01)
tracker.trial_finished(0, "FINISHED", "max epochs", {"seconds": 1.0})
assert tracker.close()
"""


def test_a_writer_killed_again_and_again_writes_each_step_once(uri: str, tmp_path: Path) -> None:
    folder, epochs = tmp_path / "study", 600
    folder.mkdir()
    draw = random.Random(5)
    command = [sys.executable, "-c", WRITER, uri, str(folder), str(epochs)]
    for _ in range(3):
        seen = len((folder / "truth").read_text().split()) if (folder / "truth").exists() else 0
        process = subprocess.Popen(command, cwd=ROOT)
        while len((folder / "truth").read_text().split() if (folder / "truth").exists() else ()) < seen + 5:
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 1.5))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    frame = runs_frame(uri, "x").set_index("trial")
    assert frame.status.to_dict() == {-1: "FINISHED", 0: "FINISHED"}
    client = MlflowClient(uri)
    history = client.get_metric_history(frame.run_id[0], "epoch/best_val_score")
    assert sorted((m.step, m.value) for m in history) == [(e, e / 3) for e in range(1, epochs + 1)]
    steps = [m.step for m in client.get_metric_history(frame.run_id[0], "epoch/train_loss")]
    assert len(steps) == len(set(steps))
    assert len(steps) > epochs - 3 * 10  # of other metrics, what was told within some 20 ms of a kill may be missing


def test_what_a_writer_told_is_on_disk_when_it_is_killed(uri: str, tmp_path: Path) -> None:
    """Even while MLflow hangs: nothing waits in memory for it."""
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(8)
        code = f"""
import os, signal, time
from pathlib import Path
from bishop_ray.errors import UserError
from bishop_ray.tracking import StudyTracker
t = StudyTracker("http://127.0.0.1:{hole.getsockname()[1]}", "x", "s", folder=Path({str(tmp_path / "study")!r}))
time.sleep(3)  # the writer hangs in its first call
t.trial_started(0, {{"lr": 1}})
for epoch in range(500):
    t.trial_reported(0, epoch, {{"val_loss": 0.5}})
t.trial_finished(0, "FINISHED", "done")
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert replay_spool(tmp_path / "study" / "mlflow_spool.jsonl", uri) == 503
    frame = runs_frame(uri, "x").set_index("trial")
    assert frame.status.to_dict() == {-1: "KILLED", 0: "FINISHED"}
    assert len(MlflowClient(uri).get_metric_history(frame.run_id[0], "val_loss")) == 500


KILLED_STUDY = """
import os, signal, sys
from pathlib import Path
import optuna
from bishop_ray.errors import UserError
from bishop_ray.tracking import StudyTracker
from bishop_ray.search.journal import open_journal
optuna.logging.set_verbosity(optuna.logging.ERROR)
uri, folder = sys.argv[1], Path(sys.argv[2])
folder.mkdir(parents=True)
study = optuna.create_study(storage=open_journal(folder / "optuna.journal"), study_name=folder.name)
study.set_user_attr("id", "abc")
tracker = StudyTracker(uri, "x", folder.name, folder=folder, study_id="abc", tags={"dataset": "wine"})
trials = [study.ask() for _ in range(5)]
for trial in trials:
    trial.suggest_float("lr", 0, 1)
    if trial.number < 4:
        tracker.trial_started(trial.number, trial.params)
        tracker.trial_reported(trial.number, 1, {"epoch/best_val_score": 0.25, "epoch/lr": 0.1})
    for step in (1, 2, 3):
        trial.report(step / 4, step)
assert tracker.flush()
for number, state in enumerate((optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED,
                                optuna.trial.TrialState.FAIL)):
    trials[number].set_user_attr("reason", f"reason {number}")
    study.tell(trials[number], 0.75 if not number else None, state=state)
study.tell(trials[4], 0.75)
os.kill(os.getpid(), signal.SIGKILL)  # before MLflow was told of any end, or of trial 4 at all
"""


def sync(storage: Path, uri: str, *more: str) -> int:
    flags = ["sync", *more, "--storage", str(storage), "--tracking-uri", uri]
    return models.run_models(models.models_parser().parse_args(flags))


def test_sync_completes_what_a_killed_search_did_not_tell(
    uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "studies" / "wine-mlp-s0"
    killed = subprocess.run([sys.executable, "-c", KILLED_STUDY, uri, str(folder)], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    before = runs_frame(uri, "x").set_index("trial").sort_index()
    assert before.status.tolist() == ["RUNNING"] * 5
    with locked(folder):
        assert sync(tmp_path, uri) == 1
    assert "left alone: study wine-mlp-s0 is being run by another process" in capsys.readouterr().out
    line = [sys.executable, str(ROOT / "jobs" / "models.py"), "sync", "wine-mlp-s0", "--storage", str(tmp_path)]
    done = subprocess.run([*line, "--tracking-uri", uri], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "wine-mlp-s0: 0 events sent, 6 runs completed\n"

    frame = runs_frame(uri, "x").set_index("trial").sort_index()
    assert frame.status.tolist() == ["KILLED", "FINISHED", "KILLED", "FAILED", "KILLED", "FINISHED"]
    assert frame["tags.bishop.reason"][[0, 1, 2]].tolist() == ["reason 0", "reason 1", "reason 2"]
    assert "killed" in frame["tags.bishop.reason"][3]
    assert frame["tags.dataset"][4] == "wine"
    study = optuna.load_study(study_name=folder.name, storage=open_journal(folder / "optuna.journal"))
    client = MlflowClient(uri)
    for number in range(5):
        history = client.get_metric_history(frame.run_id[number], "epoch/best_val_score")
        assert sorted((m.step, m.value) for m in history) == [(1, 0.25), (2, 0.5), (3, 0.75)]
        assert frame["params.lr"][number] == str(study.trials[number].params["lr"])
    assert sync(tmp_path, uri) == 0
    assert "nothing to do" in capsys.readouterr().out
    pd.testing.assert_frame_equal(runs_frame(uri, "x").set_index("trial").sort_index(), frame)
    assert os.listdir(folder) == ["optuna.journal"]
    with pytest.raises(UserError, match="did you mean 'wine-mlp-s0'"):
        sync(tmp_path, uri, "wine-mlp")
