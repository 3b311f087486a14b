"""Real MLflow: runs of a study, spool and resume, on SQLite and on a server that dies in the middle."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest
from mlflow.tracking import MlflowClient

from bishop_ray.errors import SourceUnavailable, UnknownName, UserError
from bishop_ray.tracking import (  # fmt: skip
    StudyTracker,
    check_tracking,
    environment,
    public_uri,
    replay_spool,
    runs_frame,
    tracking_uri,
)
from bishop_ray.tracking.naming import MAX_KEY, safe_key
from bishop_ray.tracking.sink import RunSink
from bishop_ray.tracking.spool import Spool

pytest_plugins = ("tracking_fixtures",)
ROOT = Path(__file__).resolve().parents[2]


def children(uri: str, study: str = "CC-wine-bishop-s0") -> pd.DataFrame:
    frame = runs_frame(uri, "CC", study)
    return frame[frame.kind == "trial"].set_index("trial").sort_index()


def test_two_processes_make_one_database_without_a_word(
    new_database: tuple[Path, list[tuple[int, str]]],
) -> None:
    path, ends = new_database
    assert ends == [(0, ""), (0, "")]
    assert path.read_bytes()[:15] == b"SQLite format 3"


# Addresses


def test_the_default_is_a_sqlite_file_of_this_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("BISHOP_RAY_HOME", str(tmp_path / "home"))
    assert tracking_uri() == f"sqlite:///{tmp_path}/home/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host:5000/")
    assert tracking_uri() == "http://host:5000"
    monkeypatch.chdir(tmp_path)
    assert tracking_uri("sqlite:///runs.db") == f"sqlite:///{tmp_path}/runs.db"


@pytest.mark.parametrize("text", ["./mlruns", "mlruns", "/data/mlruns", "file:///data/mlruns", "file:mlruns"])
def test_a_file_store_is_refused_with_the_way_out(text: str) -> None:  # case 58
    with pytest.raises(UserError, match=r"mlflow migrate-filestore --source \S*mlruns --target") as caught:
        tracking_uri(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("localhost:5000", "did you mean http://localhost:5000"),
        ("htp://host", "expected http"),
        ("databricks", "expected http"),
        ("http://", "names no host"),
        ("sqlite:///:memory:", "in-memory"),  # case 67
        ("sqlite://", "in-memory"),
    ],
)
def test_an_odd_address_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        tracking_uri(text)


def test_messages_hide_credentials() -> None:
    assert public_uri("https://me:s3cret@host:5000/x?token=t") == "https://host:5000/x"


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.monotonic()
    with pytest.raises(SourceUnavailable, match="connection refused") as caught:
        check_tracking(f"http://me:s3cret@127.0.0.1:{free_port()}")
    assert time.monotonic() - started < 20
    assert "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_server_that_never_answers() -> None:
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(8)
        started = time.monotonic()
        with pytest.raises(SourceUnavailable, match=f"127.0.0.1:{hole.getsockname()[1]}"):
            check_tracking(f"http://127.0.0.1:{hole.getsockname()[1]}")
        assert time.monotonic() - started < 21


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("these are no runs at all")
    with pytest.raises(UserError, match=r"notes\.txt: expected a SQLite file"):
        check_tracking(f"sqlite:///{tmp_path}/notes.txt")
    with pytest.raises(UserError, match=r"notes\.txt"):
        check_tracking(f"sqlite:///{tmp_path}/notes.txt/mlflow.db")


def test_importing_tracking_imports_nothing_heavy() -> None:
    code = (
        "import sys, bishop_ray.tracking; print([m for m in ('mlflow', 'torch', 'pandas', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Names and limits


@pytest.mark.parametrize("name", ["val_score", "alpha/encoder.0", "a b", "nonzero/decoder.1:x", "x.y-z"])
def test_a_good_name_stays(name: str) -> None:
    assert safe_key(name) == name


@pytest.mark.parametrize("name", ["r2@val %", "a//b", "/x", "../x", "", "x" * 300, "a\nb", "./a", "a/../b"])
def test_any_name_is_mapped_to_one_that_mlflow_takes(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    mapped = safe_key(name)
    _validate_metric_name(mapped)
    assert len(mapped) <= MAX_KEY
    assert mapped != safe_key(name + "!")


# A study


def test_a_study_as_people_see_it(uri: str, tracker_of: Callable[..., StudyTracker], tmp_path: Path) -> None:
    tracker = tracker_of(
        uri,
        params={"budget": {"trials": 2}, "space": "bishop"},
        tags={"dataset": "wine", "model": "bishop", **environment()},
        texts={"search_space.yaml": "model: {}\n"},
    )
    tracker.trial_started(0, {"model": {"d_model": 64}, "train": {"lr": 1e-3}})
    for epoch in (1, 2):
        tracker.trial_reported(0, epoch, {"val_loss": 1 / epoch, "r2@val %": 0.5, "train_loss": float("nan")})
    tracker.trial_finished(0, "FINISHED", "patience", {"epochs": 2.0})
    tracker.trial_started(7, {"model.d_model": 32})
    tracker.trial_finished(7, "KILLED", "early-stopped")
    tracker.trial_started(8, {"model.d_model": 16})
    tracker.trial_finished(8, "FAILED", "loss is NaN in epoch 3")
    rows = [{"trial": 0, "val_score": 0.5}, {"trial": 7, "val_score": None}]
    tracker.log_final(
        {"test_score_mean": 0.9, "test_score_std": 0.01}, {"stop": "trials"}, {}, {"leaderboard.json": rows}
    )
    assert tracker.close("FINISHED")

    client = MlflowClient(uri)
    parent = client.get_run(tracker.parent_run_id())
    assert parent.info.run_name == "CC-wine-bishop-s0"
    assert parent.info.status == "FINISHED"
    assert parent.data.params == {"budget.trials": "2", "space": "bishop"}
    assert parent.data.metrics == {"test_score_mean": 0.9, "test_score_std": 0.01}
    assert {"dataset", "version.python", "version.torch", "version.mlflow", "stop"} <= set(parent.data.tags)
    folder = Path(client.download_artifacts(parent.info.run_id, ""))
    assert (folder / "search_space.yaml").read_text() == "model: {}\n"
    table = json.loads((folder / "leaderboard.json").read_text())
    assert table == {"columns": ["trial", "val_score"], "data": [[0, 0.5], [7, None]]}
    assert tmp_path in folder.parents  # beside the database, not in the working directory

    found = children(uri)
    assert found.status.to_dict() == {0: "FINISHED", 7: "KILLED", 8: "FAILED"}
    assert found.name.to_dict() == {0: "trial-0000 wine", 7: "trial-0007 wine", 8: "trial-0008 wine"}
    assert found["tags.bishop.reason"].tolist() == ["patience", "early-stopped", "loss is NaN in epoch 3"]
    assert set(found["tags.dataset"]) == {"wine"}
    run = client.get_run(tracker.run_id(0))
    assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert run.data.params == {"model.d_model": "64", "train.lr": "0.001"}
    history = client.get_metric_history(run.info.run_id, "val_loss")
    assert [(m.step, m.value) for m in history] == [(1, 1.0), (2, 0.5)]
    mapped = safe_key("r2@val %")  # case 64: mapped, and the mapping logged
    assert [m.value for m in client.get_metric_history(run.info.run_id, mapped)] == [0.5, 0.5]
    assert parent.data.tags[f"bishop.metric_name.{mapped}"] == "r2@val %"
    assert "train_loss" not in run.data.metrics
    assert run.data.tags["bishop.nonfinite_metrics"] == "2"


def test_many_studies_of_one_process_write_side_by_side(uri: str, tmp_path: Path) -> None:
    """More trackers than MLflow's pool has connections: nobody waits until it times out."""
    trackers = [StudyTracker(uri, "CC", f"s{i}", folder=tmp_path / str(i), study_id=f"s{i}") for i in range(20)]
    for tracker in trackers:
        tracker.trial_started(0, {})
        tracker.trial_finished(0, "FINISHED")
    assert all(tracker.close() for tracker in trackers)
    assert not list(tmp_path.glob("*/mlflow_spool.jsonl"))
    assert len(runs_frame(uri, "CC")) >= 20


def test_eight_concurrent_trials_are_eight_children(uri: str, tracker_of: Callable[..., StudyTracker]) -> None:
    tracker = tracker_of(uri)

    def trial(number: int) -> None:  # case 56
        tracker.trial_started(number, {"model.width": number})
        for epoch in range(20):
            tracker.trial_reported(number, epoch, {"val_loss": number + epoch / 100})
        tracker.trial_finished(number, "FINISHED")

    threads = [threading.Thread(target=trial, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tracker.close()
    found = children(uri)
    assert found.index.tolist() == list(range(8))
    assert found["params.model.width"].tolist() == [str(number) for number in range(8)]
    client = MlflowClient(uri)
    for number in range(8):
        run = client.get_run(found.run_id[number])
        assert run.data.tags["mlflow.parentRunId"] == tracker.parent_run_id()
        values = [m.value for m in client.get_metric_history(run.info.run_id, "val_loss")]
        assert values == [number + epoch / 100 for epoch in range(20)]
    assert len(runs_frame(uri, "CC")) == 9


def test_a_long_parameter_becomes_an_artifact(uri: str, tracker_of: Callable[..., StudyTracker]) -> None:
    tracker = tracker_of(uri)
    long = "x" * 10_000  # case 63
    tracker.trial_started(0, {"model.layers": long, **{f"model.p{i}": i for i in range(250)}})
    assert tracker.flush()
    assert tracker.dropped == 0
    client = MlflowClient(uri)
    params = client.get_run(tracker.run_id(0)).data.params
    assert len(params) == 251
    assert params["model.layers"].startswith("sha256:")
    path = client.download_artifacts(tracker.run_id(0), "long_params/model.layers.txt")
    assert Path(path).read_text() == long


def test_a_call_costs_the_study_microseconds(uri: str, tracker_of: Callable[..., StudyTracker]) -> None:
    tracker = tracker_of(uri)
    tracker.trial_started(0, {})
    metrics = dict.fromkeys(("train_loss", "val_loss", "val_score", "best_val_score", "lr", "epoch_seconds"), 0.5)
    started = time.perf_counter()
    for epoch in range(1000):
        tracker.trial_reported(0, epoch, metrics)
    assert (time.perf_counter() - started) / 1000 < 2e-4
    assert tracker.close()
    history = MlflowClient(uri).get_metric_history(tracker.run_id(0), "lr")
    assert [m.step for m in history] == list(range(1000))


def test_close_ends_what_still_runs_and_may_be_called_twice(uri: str, tracker_of: Callable[..., StudyTracker]) -> None:
    tracker = tracker_of(uri)
    tracker.trial_started(0, {})
    tracker.trial_started(1, {})
    tracker.trial_finished(0, "FINISHED")
    assert tracker.close("KILLED", "Ctrl-C")
    assert tracker.close("FINISHED")
    frame = runs_frame(uri, "CC").set_index("trial")
    assert frame.status.to_dict() == {-1: "KILLED", 0: "FINISHED", 1: "KILLED"}
    assert frame["tags.bishop.reason"][1] == "interrupted: Ctrl-C"


def test_a_killed_study_goes_on_in_its_own_runs(
    uri: str, tracker_of: Callable[..., StudyTracker], tmp_path: Path
) -> None:
    code = f"""
import os, signal
from pathlib import Path
from bishop_ray.tracking import StudyTracker
tracker = StudyTracker({uri!r}, "CC", "CC-wine-bishop-s0", folder=Path({str(tmp_path / "study")!r}),
                       params={{"trials": 2}})
for number in range(3):
    tracker.trial_started(number, {{"lr": 0.5}})
    tracker.trial_reported(number, 1, {{"val_loss": 3.0}})
tracker.trial_finished(0, "FINISHED")
assert tracker.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    before = children(uri)
    assert before.status.to_dict() == {0: "FINISHED", 1: "RUNNING", 2: "RUNNING"}  # case 57

    tracker = tracker_of(uri, params={"trials": 4})
    tracker.trial_started(1, {"lr": 0.5})
    tracker.trial_reported(1, 2, {"val_loss": 2.0})
    tracker.trial_finished(1, "FINISHED")
    tracker.trial_started(3, {"lr": 0.1})
    tracker.trial_finished(3, "FINISHED")
    assert tracker.close()
    after = children(uri)
    assert after.status.to_dict() == {0: "FINISHED", 1: "FINISHED", 2: "KILLED", 3: "FINISHED"}
    assert after.run_id[:3].tolist() == before.run_id.tolist()
    parents = runs_frame(uri, "CC").query("kind == 'study'")
    assert parents.status.tolist() == ["FINISHED"]
    assert parents["params.trials"].tolist() == ["2"]
    assert parents["tags.bishop.now.trials"].tolist() == ["4"]
    history = MlflowClient(uri).get_metric_history(after.run_id[1], "val_loss")
    assert [(m.step, m.value) for m in history] == [(1, 3.0), (2, 2.0)]


def test_a_fresh_study_of_the_same_name_gets_its_own_runs(uri: str, tracker_of: Callable[..., StudyTracker]) -> None:
    one, two = tracker_of(uri, study_id="first"), None
    one.trial_started(0, {"lr": 1})
    assert one.close()
    two = tracker_of(uri, study_id="second")
    two.trial_started(0, {"lr": 2})
    assert two.close()
    assert one.parent_run_id() != two.parent_run_id()
    assert sorted(children(uri)["params.lr"]) == ["1", "2"]


def test_a_dead_server_costs_no_data_and_no_exception(uri: str, tracker_of: Callable[..., StudyTracker]) -> None:
    tracker = tracker_of(f"http://127.0.0.1:{free_port()}", params={"shape": (1, 2)})
    for number in range(2):
        tracker.trial_started(number, {"lr": np.float32(0.5)})
        tracker.trial_reported(number, 1, {"val_loss": np.float32(0.25), "bad": float("inf")})
    tracker.trial_finished(0, "FINISHED", "patience")
    started = time.monotonic()
    assert not tracker.close("FINISHED")
    assert time.monotonic() - started < 30
    assert tracker.parent_run_id(timeout=0) == ""
    assert replay_spool(tracker.spool_path, uri) > 0
    assert not tracker.spool_path.exists()
    found = children(uri)
    assert found.status.to_dict() == {0: "FINISHED", 1: "KILLED"}
    assert found["metrics.val_loss"].tolist() == [0.25, 0.25]
    assert found["params.lr"].tolist() == ["0.5", "0.5"]
    assert runs_frame(uri, "CC").query("kind == 'study'")["params.shape"].tolist() == ["(1, 2)"]
    assert replay_spool(tracker.spool_path, uri) == 0


def test_applying_events_twice_is_applying_them_once(uri: str, tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.jsonl")
    header = {"kind": "study", "time": 1000, "experiment": "CC", "study": "s", "study_id": "s"}
    spool.append([{**header, "params": {"a": "1"}, "tags": {}, "texts": {}}])
    for number in range(2):
        spool.append([{"kind": "start", "time": 2000, "trial": number, "params": {"lr": "1"}, "tags": {}}])
        loss = {"val_loss": 0.5, "nan": float("nan")}
        spool.append([{"kind": "metrics", "time": 3000, "trial": number, "step": 1, "metrics": loss}])
        end = {"kind": "finish", "time": 4000, "trial": number, "status": "FINISHED", "reason": "", "step": 0}
        spool.append([{**end, "metrics": {"epochs": 1.0}, "tags": {}}])
    with spool.path.open("a") as file:
        file.write('{"kind": "metr')  # the process died here
    events = Spool(spool.path).read().events
    assert len(events) == 7
    sink = RunSink(uri)
    sink.apply(events)
    sink.apply(events)
    RunSink(uri).apply(events)
    frame = runs_frame(uri, "CC", "s")
    assert len(frame) == 3
    for run_id in frame[frame.kind == "trial"].run_id:
        client = MlflowClient(uri)
        assert len(client.get_metric_history(run_id, "val_loss")) == 1
        assert client.get_run(run_id).data.tags["bishop.nonfinite_metrics"] == "1"
        assert client.get_run(run_id).info.status == "FINISHED"


def test_a_run_that_someone_deleted_is_counted_and_the_rest_goes_on(
    uri: str, tracker_of: Callable[..., StudyTracker]
) -> None:
    tracker = tracker_of(uri)
    tracker.trial_started(0, {})
    assert tracker.flush()
    MlflowClient(uri).delete_run(tracker.run_id(0))
    tracker.trial_reported(0, 1, {"val_loss": 1.0})
    tracker.trial_started(1, {})
    tracker.trial_reported(1, 1, {"val_loss": 1.0})
    assert tracker.close()
    assert tracker.dropped == 1
    assert children(uri)["metrics.val_loss"].to_dict() == {1: 1.0}


def test_an_artifact_store_that_cannot_be_written_holds_up_nothing(
    uri: str, tracker_of: Callable[..., StudyTracker], tmp_path: Path
) -> None:
    (tmp_path / "mlartifacts").write_text("a file where the folder should be")
    tracker = tracker_of(uri, texts={"search_space.yaml": "model: {}"})
    tracker.trial_started(0, {"lr": 1})
    tracker.trial_reported(0, 1, {"val_loss": 1.0})
    assert tracker.close()
    assert tracker.dropped == 1
    assert children(uri)["metrics.val_loss"].to_dict() == {0: 1.0}


def test_runs_of_an_unknown_experiment(uri: str, tracker_of: Callable[..., StudyTracker]) -> None:
    tracker_of(uri).close()
    with pytest.raises(UnknownName, match="did you mean 'CC'"):
        runs_frame(uri, "cc")
    assert runs_frame(uri, "CC", "no such study").empty


# A server


class Server:
    """``mlflow server`` on a free port, to be killed and started again."""

    def __init__(self, folder: Path, database: Path) -> None:
        self.folder = folder
        shutil.copy(database, folder / "server.db")
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{self.folder}/server.db",
            "--artifacts-destination", str(self.folder / "artifacts"),
        ]  # fmt: skip
        env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=env, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                return
            time.sleep(0.2)
        raise TimeoutError((self.folder / "server.log").read_text()[-2000:])

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # the session that start() made: its own processes only
            self.process.wait(10)
            self.process = None


@pytest.fixture
def server(new_database: tuple[Path, object], tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path, new_database[0])
    made.start()
    yield made
    made.kill()


@pytest.mark.faults
def test_a_server_killed_and_started_again_loses_nothing(
    server: Server, tracker_of: Callable[..., StudyTracker], capfd: pytest.CaptureFixture[str]
) -> None:
    from fakes import make_table
    from predictor_fakes import make_predictor

    from bishop_ray.registry import load_best, register_best

    assert check_tracking(server.uri) == server.uri
    tracker = tracker_of(server.uri, tags={"dataset": "wine"})
    half, again = threading.Barrier(9), threading.Event()

    def trial(number: int) -> None:
        tracker.trial_started(number, {"lr": number})
        for epoch in range(30):
            if epoch == 15:
                half.wait()
                again.wait()
            tracker.trial_reported(number, epoch, {"val_loss": epoch / 7, "lr": 0.1})
            time.sleep(0.01)
        tracker.trial_finished(number, "FINISHED" if number % 2 else "KILLED", "done")

    threads = [threading.Thread(target=trial, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    half.wait()
    assert tracker.flush()
    server.kill()
    again.set()
    for thread in threads:
        thread.join()
    assert not tracker.flush(timeout=60)
    assert tracker.spool_path.exists()
    server.start()
    assert tracker.flush(timeout=60)
    assert not tracker.spool_path.exists()

    raw = make_table(rows=40)
    parent = tracker.parent_run_id()
    best = register_best(
        make_predictor(raw), "CC-wine", alias="bishop", val_score=0.5, example=raw.frame.head(2), run_id=parent,
        uri=server.uri,
    )  # fmt: skip
    assert best.champion
    expected = make_predictor(raw).predict_proba(raw.frame)
    pd.testing.assert_frame_equal(load_best("CC-wine", uri=server.uri).predict_proba(raw.frame), expected)
    assert tracker.close()

    frame = runs_frame(server.uri, "CC").set_index("trial").sort_index()
    assert frame.index.tolist() == [-1, *range(8)]
    assert frame.status.tolist() == ["FINISHED", *["KILLED", "FINISHED"] * 4]
    client = MlflowClient(server.uri)
    for number in range(8):
        assert client.get_run(frame.run_id[number]).data.tags["mlflow.parentRunId"] == parent
        for name in ("val_loss", "lr"):
            history = client.get_metric_history(frame.run_id[number], name)
            assert [m.step for m in history] == list(range(30))
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "http" not in printed.err.replace(server.uri, "")


def test_mlflows_global_address_is_left_alone(uri: str, tracker_of: Callable[..., StudyTracker]) -> None:
    before = mlflow.get_tracking_uri()
    tracker = tracker_of(uri)
    assert tracker.close()
    assert mlflow.get_tracking_uri() == before
