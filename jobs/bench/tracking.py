"""What recording a search in MLflow costs it: seconds, latency of a call, metrics per second.

    python jobs/bench/tracking.py [--trials 16] [--epochs 200] [--epoch-ms 10] [--server http://HOST:PORT]

A synthetic search makes the calls of a real one: trials of 200 epochs with 8 metrics each, two at a time in processes
of their own. An epoch is a fixed amount of Python; then the trial reports and waits until this process has told the
tracker, as a trial waits for Tune. Sides in turn: no tracking, a SQLite file, a server (its own `mlflow server` with
one worker on SQLite where --server names none). CPU seconds are of this process, all threads, the end included. A
second table sends the same calls as fast as MLflow takes them and counts what arrived.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Row, command, machine, parser, publish, start, versions
from synthetic import METRICS, Search, end_trial, processes, report, start_trial, turns_of

from bishop_ray import cli
from bishop_ray.errors import UserError
from bishop_ray.tracking import StudyTracker, check_tracking, runs_frame
from bishop_ray.tracking.client import open_client

SLOTS = 2
_OFF = "off"


@contextlib.contextmanager
def own_server(folder: Path) -> Iterator[str]:
    """The address of an `mlflow server` with one worker on a SQLite file, on a free port of this machine.

    Raises:
        UserError: It did not answer within two minutes.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    line += ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", f"{folder}/artifacts"]
    env = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    uri = f"http://127.0.0.1:{port}"
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(line, env=env, stdout=log, stderr=log)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{uri}/health", timeout=2):  # noqa: S310
                break
            if process.poll() is not None:
                raise UserError(f"mlflow server ended: {(folder / 'server.log').read_text()[-300:]}")
            time.sleep(0.2)
        else:
            raise UserError("mlflow server does not answer")
        yield uri
    finally:
        process.terminate()
        process.wait(30)


def recorded(uri: str, experiment: str) -> int:
    """Values of the epochs' metrics that MLflow has, each step of a trial once."""
    client = open_client(uri)
    frame = runs_frame(uri, experiment)
    runs = frame[frame.kind == "trial"].run_id
    return sum(
        len({point.step for point in client.get_metric_history(run, f"epoch/{name}")})
        for run in runs
        for name in METRICS
    )


def compare(search: Search, uris: dict[str, str], repeats: int, folder: Path) -> list[Row]:
    """The search with each side in turn, every other round in reverse order; medians."""
    seconds: dict[str, list[float]] = {name: [] for name in uris}
    closing: dict[str, list[float]] = {name: [] for name in uris}
    processor: dict[str, list[float]] = {name: [] for name in uris}
    latencies: dict[str, list[float]] = {name: [] for name in uris}
    for number in range(repeats + 1):
        for name in list(uris) if number % 2 else reversed(uris):
            tracker = None
            if name != _OFF:
                # A name of its own: a server that has been measured before has its runs.
                study = uuid.uuid4().hex
                tracker = StudyTracker(uris[name], "bench", study, folder=folder / study)
                tracker.parent_run_id()
            calls: list[float] = []
            used = time.process_time()
            took = search.run(tracker, calls)
            before = time.perf_counter()
            if tracker and not tracker.close(timeout=300):
                raise UserError(f"{name}: MLflow did not take everything")
            if number:  # the first round imports and connects
                seconds[name].append(took)
                closing[name].append(time.perf_counter() - before)
                processor[name].append(time.process_time() - used)
                latencies[name] += calls
    return [
        {
            "tracking": name,
            "seconds": statistics.median(seconds[name]),
            "ratio to off": statistics.median(seconds[name]) / statistics.median(seconds[_OFF]),
            "trials/s": search.trials / statistics.median(seconds[name]),
            "CPU s": statistics.median(processor[name]),
            "CPU ms/epoch": 1000 * statistics.median(processor[name]) / (search.trials * search.epochs),
            "call median µs": statistics.median(latencies[name]) * 1e6,
            "call p99 µs": statistics.quantiles(latencies[name], n=100)[98] * 1e6,
            "close s": statistics.median(closing[name]) if name != _OFF else None,
        }
        for name in uris
    ]


def drain(search: Search, name: str, uri: str, folder: Path) -> Row:
    """The same search without work: what MLflow takes in a second, and whether it has all of it."""
    experiment = f"bench {uuid.uuid4().hex}"
    tracker = StudyTracker(uri, experiment, "s", folder=folder / f"drain-{name}")
    tracker.parent_run_id()
    began = time.perf_counter()
    for number in range(search.trials):
        start_trial(tracker, number)
        for epoch in range(1, search.epochs + 1):
            report(tracker, number, epoch, [])
        end_trial(tracker, number)
    if not tracker.close(timeout=600):
        raise UserError(f"{name}: MLflow did not take everything")
    seconds = time.perf_counter() - began
    expected = search.trials * search.epochs * len(METRICS)
    return {
        "tracking": name,
        "metrics/s": expected / seconds,
        "trials/s": search.trials / seconds,
        "metrics expected": expected,
        "metrics written": recorded(uri, experiment),
    }


def measure(args: argparse.Namespace, folder: Path) -> list[Row]:
    """Both tables' rows."""
    with contextlib.ExitStack() as stack:
        search = Search(args.trials, args.epochs, turns_of(args.epoch_ms), stack.enter_context(processes(SLOTS)))
        server = args.server or stack.enter_context(own_server(folder))
        uris = {_OFF: "", "sqlite": f"sqlite:///{folder}/mlflow.db", "server": server}
        for uri in list(uris.values())[1:]:
            check_tracking(uri)
        rows = compare(search, uris, args.repeats, folder)
        return rows + [drain(search, name, uri, folder) for name, uri in uris.items() if name != _OFF]


def main() -> int:
    """Measures and prints."""
    built = parser(__doc__, repeats=3)
    built.add_argument("--trials", type=cli.positive_int, default=16, metavar="N", help="trials of a search (16)")
    built.add_argument("--epochs", type=cli.positive_int, default=200, metavar="N", help="epochs of a trial (200)")
    built.add_argument("--epoch-ms", type=cli.positive_int, default=10, metavar="MS", help="work of an epoch (10)")
    built.add_argument("--server", default="", metavar="URI", help="an MLflow server (one of its own)")
    args = built.parse_args()
    device = start(args)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args, Path(folder))
    shown = argparse.Namespace(json=None)
    publish(rows[:3], shown, device)
    print()
    publish(rows[3:], shown, device)
    installed = versions() | {"mlflow": version("mlflow")}
    found: dict[str, Any] = {"command": command(), "machine": machine(device), "versions": installed, "rows": rows}
    line = json.dumps(found, allow_nan=False)
    print(f"\n{line}")
    if args.json is not None:
        args.json.write_text(line + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    cli.run(main)
