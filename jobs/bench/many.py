"""What a long search leaves behind: the driver's memory, the time in the study's storage, MLflow's metrics, disk.

    python jobs/bench/many.py [--trials 1000] [--slots 16] [--seconds 0.5] [--no-server]

Trials only sleep; everything else is the product: Tune with ASHA, TPE, the journal, a saved model per trial, and MLflow
behind a server of its own on a free loopback port (SQLite behind it; with ``--no-server`` SQLite directly). The
driver's unique memory (USS) is taken when a tenth of the trials and when all have ended. Storage time is what the
driver spends inside reads and writes of the journal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import sleeper
import slots as filling
from search import make_table

from bishop_ray import cli
from bishop_ray.config import Resources
from bishop_ray.search.callback import Progress
from bishop_ray.search.journal import Journal
from bishop_ray.tracking.environment import processor


class StorageClock:
    """Seconds inside the journal's reads and writes of this process."""

    def __init__(self) -> None:
        self.seconds, self.writes = 0.0, 0
        append, read = Journal.append_logs, Journal.read_logs

        def timed_append(journal: Journal, logs: list[dict[str, Any]]) -> None:
            began = time.perf_counter()
            append(journal, logs)
            self.seconds += time.perf_counter() - began
            self.writes += 1

        def timed_read(journal: Journal, log_number_from: int) -> Iterator[dict[str, Any]]:
            began = time.perf_counter()
            found = list(read(journal, log_number_from))
            self.seconds += time.perf_counter() - began
            yield from found

        Journal.append_logs, Journal.read_logs = timed_append, timed_read  # type: ignore[method-assign,assignment]


class Watcher:
    """Notes the driver's unique memory when a tenth of the trials, and when all have ended."""

    def __init__(self, trials: int) -> None:
        self._early, self._late, self.early, self.late, self.ended = trials // 10, trials, 0, 0, 0
        self.began = time.perf_counter()
        self.first = 0.0

    def __call__(self, progress: Progress) -> None:
        """Hears of every event."""
        self.first = self.first or time.perf_counter()
        if progress.finished != self.ended:
            self.ended = progress.finished
            if self.ended == self._early:
                self.early = unique()
            if self.ended == self._late:
                self.late = unique()


def unique() -> int:
    """Bytes that only this process holds."""
    return int(psutil.Process().memory_full_info().uss)


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """Address of an MLflow server on a free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", str(folder / "art")]
    quiet = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=quiet) as process:
        try:
            url, ends = f"http://127.0.0.1:{port}", time.monotonic() + 90
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):  # noqa: S310 - http
                    break
                if time.monotonic() > ends:
                    raise RuntimeError("the MLflow server did not start")
                time.sleep(0.2)
            yield url
        finally:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.terminate()
            process.terminate()


def written(uri: str, metric: str) -> tuple[int, int, dict[str, int]]:
    """Runs of trials, values of `metric` over all of them, and runs by status, as MLflow has them."""
    from bishop_ray.tracking import runs_frame
    from bishop_ray.tracking.client import open_client

    frame, client = runs_frame(uri), open_client(uri)
    trials = frame[frame["trial"] >= 0]
    values = sum(len(client.get_metric_history(run, metric)) for run in trials["run_id"])
    return len(trials), values, {str(k): int(v) for k, v in frame["status"].value_counts().items()}


def left(folder: Path) -> tuple[int, int]:
    """Bytes and files below a folder."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return sum(sizes), len(sizes)


def main() -> int:
    """Runs the search, prints one JSON line and a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trials", type=cli.positive_int, default=1000, help="trials (1000)")
    parser.add_argument("--slots", type=cli.positive_int, default=16, help="trials at a time (16)")
    parser.add_argument("--seconds", type=cli.positive_float, default=0.5, help="sleep of a trial (0.5)")
    parser.add_argument("--no-server", action="store_true", help="MLflow on SQLite without a server")
    args = parser.parse_args()
    sleeper.prepare_ray()
    from bishop_ray.search.cluster import connect
    from bishop_ray.search.search import run_study

    cpus = connect().cpus
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        (folder / "store").mkdir()
        make_table(folder / "table.parquet", 300)
        config = filling.study(folder / "store", folder / "table.parquet", args.trials, args.seconds, args.slots)
        config = replace(config, resources=Resources(cpus / args.slots))
        if not args.no_server:
            config = replace(config, tracking_uri=stack.enter_context(server(folder)))
        storage, watcher = StorageClock(), Watcher(args.trials)
        run_study(config, watcher)
        seconds, late = time.perf_counter() - watcher.first, watcher.late
        runs, values, statuses = written(config.tracking_uri, "epoch/val_score")
        size, files = left(folder / "store")
        expected = args.trials * sleeper.Sleeper.reports
    facts = {
        "trials": args.trials, "slots": args.slots, "seconds": round(seconds, 1),
        "trials_per_s": round(args.trials / seconds, 2), "uss_early_mb": round(watcher.early / 1e6, 1),
        "uss_end_mb": round(late / 1e6, 1),
        "kb_per_trial": round((late - watcher.early) / (args.trials - args.trials // 10) / 1e3, 1),
        "storage_ms_per_trial": round(storage.seconds / args.trials * 1e3, 2), "journal_writes": storage.writes,
        "runs": runs, "metrics_written": values, "metrics_expected": expected, "statuses": statuses,
        "left_mb": round(size / 1e6, 2), "left_files": files,
    }  # fmt: skip
    print(json.dumps(facts | {"machine": processor(), "cpus": os.cpu_count()}))
    print("| " + " | ".join(facts) + " |")
    print("|---" * len(facts) + "|")
    print("| " + " | ".join(str(value) for value in facts.values()) + " |")
    return 0


if __name__ == "__main__":
    cli.run(main)
