"""A service on the real Ray Serve, by its command: requests while versions change, and a fuzz of its OpenAPI."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from predictor_fakes import make_predictor
from test_serving import odd_table, rows_of

from bishop_ray.data.table import TaskType
from bishop_ray.registry import register_best
from bishop_ray.tracking import StudyTracker

pytest_plugins = ("tracking_fixtures",)
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
RAW = odd_table(TaskType.BINARY)
FUZZ = int(os.environ.get("BISHOP_FUZZ_REQUESTS", "120"))
"""Requests of the fuzz; the full number is 2,000."""

ROW = rows_of(RAW.frame)[1]
NAME = "wine"


@dataclass
class Service:
    """A service in a process of its own."""

    process: subprocess.Popen[str]
    home: Path
    uri: str
    url: str = ""
    token: str = ""
    lines: list[str] = field(default_factory=list)

    def call(self, path: str, body: bytes | None = None, token: str | None = None) -> tuple[int, Any]:
        shown = self.token if token is None else token
        headers = {"Authorization": f"Bearer {shown}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    @property
    def note(self) -> Path:
        return self.home / "serving" / f"{NAME}.json"

    def again(self) -> subprocess.CompletedProcess[str]:
        """The same command once more."""
        return finished(command(self.uri), environment(self.home))

    def as_cluster(self) -> subprocess.CompletedProcess[str]:
        """The same command of somebody who only knows the service's Ray, as one knows a cluster's.

        Ray takes a loopback address for the machine's own unless it is told otherwise.
        """
        found = json.loads(self.note.read_text())
        _, *words = command(self.uri, "--ray-address", found["address"])
        return finished([sys.executable, "-c", ON_LOOPBACK, *words], environment(self.home / "other") | found["access"])


ON_LOOPBACK = """
import runpy, sys
from bishop_ray._compat.ray import on_loopback
del sys.argv[0]
with on_loopback():
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def finished(line: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=120)


def command(uri: str, *flags: str) -> list[str]:
    return [sys.executable, str(ROOT / "jobs" / "serve.py"), NAME, "--tracking-uri", uri, *flags]


def environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_ADDRESS", "BISHOP_SERVE"))}
    return kept | {"BISHOP_RAY_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def register(uri: str, tracker_of: Callable[..., StudyTracker]) -> Callable[[int], int]:
    run_id = tracker_of(uri).parent_run_id()

    def call(seed: int) -> int:
        made = register_best(
            make_predictor(RAW, seed), NAME, alias="bishop", val_score=0.5 + seed / 100, example=RAW.frame.head(2),
            run_id=run_id, uri=uri, metric="accuracy", study_id="s",
        )  # fmt: skip
        assert made.champion
        return made.version

    return call


@pytest.fixture
def service(uri: str, register: Callable[[int], int], tmp_path: Path) -> Iterator[Service]:
    assert register(0) == 1
    home = tmp_path / "home"
    process = subprocess.Popen(
        command(uri, "--port", "0"), env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    made = Service(process, home, uri)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            made.lines.append(line)
            if found := re.search(r"answers at (http://127\.0\.0\.1:\d+)", line):
                made.url = found[1]
            if found := re.search(r"made for this service: (\S+)", line):
                made.token = found[1]
            if line.startswith("Ctrl-C"):
                break
        assert made.url, made.lines
        assert made.token, made.lines
        yield made
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def test_versions_change_without_a_failed_request(service: Service, register: Callable[[int], int]) -> None:
    replies: list[tuple[float, int, int]] = []
    faults: list[str] = []
    stop = threading.Event()
    body = json.dumps({"rows": [ROW]}).encode()

    def client() -> None:
        while not stop.is_set():
            try:
                status, found = service.call("/predict", body)
                replies.append((time.monotonic(), status, found.get("version", 0)))
            except Exception as error:
                faults.append(repr(error))

    threads = [threading.Thread(target=client) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert register(1) == 2
        done = service.again()
        assert done.returncode == 0, done.stderr + done.stdout
        assert f"version 2 (champion) now answers at {service.url}" in done.stdout
        assert register(2) == 3
        done = service.as_cluster()
        assert done.returncode == 0, done.stderr + done.stdout
        assert f"version 3 (champion) answers at {service.url}" in done.stdout
        assert "bearer token" not in done.stdout, "it keeps its token"
        time.sleep(0.5)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert faults == []
    assert {status for _, status, _ in replies} == {200}
    assert {version for _, _, version in replies} == {1, 2, 3}
    assert replies[-1][2] == 3
    assert service.call("/ready")[1]["version"] == 3
    assert service.call("/predict", body, token="x" * 43)[0] == 401
    assert service.note.stat().st_mode & 0o777 == 0o600
    assert service.token not in service.note.read_text()
    _fuzz(service)
    _huge_body(service)
    _only_on_loopback(service.process.pid)
    _calls_need_the_token_of_ray(service.process.pid)
    _metrics(service)
    service.process.send_signal(signal.SIGINT)
    assert service.process.wait(60) == 0
    assert not service.note.exists()


def _tree(root: int) -> list[psutil.Process]:
    process = psutil.Process(root)
    return [process, *process.children(recursive=True)]


def _listening(processes: list[psutil.Process]) -> list[tuple[str, int]]:
    """Addresses and ports on which they take connections."""
    seen = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            seen += [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return [(address.removeprefix("::ffff:"), port) for address, port in seen]


def _only_on_loopback(root: int) -> None:
    """Case 82: all sockets of the service, Ray's and Serve's, take connections of this machine alone."""
    seen = _listening(_tree(root))
    assert seen
    assert {address for address, _ in seen} <= {"127.0.0.1", "::1"}


class _Code:
    """Runs in whoever unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.getpid, ()


def _calls_need_the_token_of_ray(root: int) -> None:
    """Case 82: the port on which a replica unpickles what other deployments ask refuses who lacks Ray's token."""
    import grpc
    from ray.serve.generated import serve_pb2, serve_pb2_grpc

    replicas = [process for process in _tree(root) if "ServeReplica" in process.name()]
    codes = []
    for _, port in _listening(replicas):
        request = serve_pb2.ASGIRequest(pickled_request_metadata=pickle.dumps(_Code()))
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as caught:
            serve_pb2_grpc.ASGIServiceStub(channel).HandleRequest(request, timeout=10)
        codes.append(caught.value.code())
    assert grpc.StatusCode.UNAUTHENTICATED in codes
    assert set(codes) <= {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}


def _metrics(service: Service) -> None:
    (line,) = [line for line in service.lines if "metrics" in line]
    with urllib.request.urlopen(line.split()[-1], timeout=30) as reply:
        assert b"ray_serve_deployment_status" in reply.read()


def _huge_body(service: Service) -> None:
    """A client with the token that sends 300 MB, length untold, is refused; the next one is answered."""

    def endless() -> Iterator[bytes]:
        for _ in range(300):
            yield b" " * 1_000_000

    connection = http.client.HTTPConnection(urlsplit(service.url).netloc, timeout=60)
    headers = {"Authorization": f"Bearer {service.token}", "Content-Type": "application/json"}
    connection.request("POST", "/predict", endless(), headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    assert service.call("/predict", json.dumps({"rows": [ROW]}).encode())[0] == 200


def _memory(root: int) -> float:
    """Resident bytes of a process and all below it."""
    total = 0.0
    for process in _tree(root):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def _fuzz(service: Service) -> None:
    """Requests that fit the OpenAPI document, and that do not: none is a fault of ours, and memory stays bounded."""
    import schemathesis
    from hypothesis import HealthCheck, given, settings

    status, document = service.call("/openapi.json")
    assert status == 200
    api = schemathesis.openapi.from_dict(document)
    before = _memory(service.process.pid)
    seen: list[int] = []

    def ask(case: Any) -> None:
        reply = case.call(base_url=service.url, headers={"Authorization": f"Bearer {service.token}"}, timeout=60)
        seen.append(reply.status_code)
        assert reply.status_code < 500, (case.method, case.path, case.body, reply.text)

    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    for operation in (found.ok() for found in api.get_all_operations()):
        predicts = operation.path == "/predict"  # the others take nothing that could be varied
        quiet = settings(
            max_examples=FUZZ // 2 if predicts else 1, deadline=None, database=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        for mode in modes if predicts else modes[:1]:
            quiet(given(case=operation.as_strategy(generation_mode=mode))(ask))()
    assert len(seen) >= 0.8 * FUZZ
    assert {200, 422} <= set(seen)
    assert _memory(service.process.pid) < before + 500e6
