"""What a prediction costs over HTTP: one row at a time, many clients, and what batches save.

    python jobs/bench/serving.py [--seconds 10] [--clients 32] [--repeats 50] [--threads N] [--json FILE]

A BiSHop of the default size with random weights (8 categorical and 6 numerical columns, two classes), registered in a
store of its own in a temporary folder and served by `jobs/serve.py` on a free loopback port. `model call`: 32 requests
of one row in one call of the model against 32 calls, in this process. `one client`: requests of one row, one after the
other, over one connection. `clients`: as many connections at once, each sending one row after the other. The clients
share the CPUs with the service.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import torch
from harness import ROOT, Row, interleave, medians, parser, publish, ratio, start
from inference import loaded_predictor, make_frame, make_table

from bishop_ray import cli
from bishop_ray.errors import UserError
from bishop_ray.predictor import Predictor

NAME, TOGETHER = "bench", 32


def main() -> int:
    """Measures and prints a table."""
    built = parser(__doc__, repeats=50)
    built.set_defaults(device="cpu")
    built.add_argument("--seconds", type=cli.positive_float, default=10.0, metavar="X", help="of each HTTP load (10)")
    built.add_argument("--clients", type=cli.positive_int, default=32, metavar="N", help="connections at once (32)")
    args = built.parse_args()
    device = start(args)
    table = make_table()
    frame = make_frame(table)
    predictor = loaded_predictor(table, frame)
    rows = json.loads(frame.head(TOGETHER).to_json(orient="records"))
    found = model_call(predictor, rows, args.repeats, device)
    with tempfile.TemporaryDirectory(prefix="bishop-bench-") as folder, served(predictor, Path(folder)) as (url, token):
        for clients in (1, args.clients):
            found.append(load(url, token, rows, clients, args.seconds))
    publish(found, args, device)
    return 0


def model_call(predictor: Predictor, rows: list[dict[str, object]], repeats: int, device: torch.device) -> list[Row]:
    """One call with all rows against a call per row, from checked rows to replies."""
    from bishop_ray.serving.app import Served

    model = Served(predictor, NAME, 1)
    requests = [[row] for row in rows]
    sides: dict[str, Callable[[], object]] = {
        f"model call, 1 x {TOGETHER} rows": lambda: model.reply(requests),
        f"model call, {TOGETHER} x 1 row": lambda: [model.reply([request]) for request in requests],
    }
    seconds = medians(interleave(sides, repeats, device))
    slowest = max(seconds.values())
    return [
        {"what": what, "median ms": 1e3 * value, "rows/s": TOGETHER / value, "times faster": ratio(slowest, value)}
        for what, value in seconds.items()
    ]


@contextmanager
def served(predictor: Predictor, folder: Path) -> Iterator[tuple[str, str]]:
    """Address and token of a service in processes of its own, which ends with the block."""
    from bishop_ray.registry import register_best
    from bishop_ray.tracking import StudyTracker

    uri, token = f"sqlite:///{folder}/mlflow.db", secrets.token_urlsafe(32)
    tracker = StudyTracker(uri, NAME, NAME, folder=folder / "study")
    register_best(
        predictor, NAME, alias="bishop", val_score=0.5, example=make_frame(make_table()).head(2),
        run_id=tracker.parent_run_id(), uri=uri,
    )  # fmt: skip
    tracker.close(timeout=20)
    command = [sys.executable, str(ROOT / "jobs" / "serve.py"), NAME, "--tracking-uri", uri, "--port", "0"]
    environment = os.environ | {"BISHOP_SERVE_TOKEN": token, "BISHOP_RAY_HOME": str(folder / "home")}
    environment.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = next((found[1] for line in process.stdout if (found := re.search(r"answers at (http\S+)", line))), "")
        if not url:
            raise UserError("jobs/serve.py ended before it answered; its error is above")
        yield url, token
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def load(url: str, token: str, rows: list[dict[str, object]], clients: int, seconds: float) -> Row:
    """What `clients` connections see within `seconds`, after a fifth of that has gone by uncounted."""
    times: list[list[float]] = [[] for _ in range(clients)]
    faults: list[str] = []
    begin = time.perf_counter() + seconds / 5
    until = begin + seconds

    def client(number: int) -> None:
        body = json.dumps({"rows": [rows[number % len(rows)]]})
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        while (now := time.perf_counter()) < until:
            connection.request("POST", "/predict", body, headers)
            reply = connection.getresponse()
            answer = reply.read()
            if reply.status != 200:
                faults.append(f"{reply.status} {answer[:200]!r}")
                return
            if now >= begin:
                times[number].append(time.perf_counter() - now)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    every = sorted(value for own in times for value in own)
    if faults or len(every) < 2:
        raise UserError(f"the service answered {faults[0] if faults else 'too slowly to measure'}")
    return {
        "what": f"HTTP, {clients} client{'s' * (clients > 1)}, one row each",
        "median ms": 1e3 * statistics.median(every),
        "p99 ms": 1e3 * every[min(len(every) - 1, int(0.99 * len(every)))],
        "rows/s": len(every) / seconds,
    }


if __name__ == "__main__":
    cli.run(main)
