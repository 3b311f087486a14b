"""The real openml client against the loopback mirror, healthy and broken."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from bishop_ray.data import load_dataset, openml_client, suite_datasets, task_dataset, task_ref
from bishop_ray.data.openml_cache import ServerCache
from bishop_ray.errors import SourceUnavailable, UnknownName, UserError

SMALL = 361093  # analcatdata_supreme: 4,052 rows, 5 of 7 features categorical
LOAD = """
import sys
from bishop_ray.data import load_dataset, task_ref
raw = load_dataset(task_ref(sys.argv[1], sys.argv[2]))
print(raw.fingerprint(), len(raw), "openml" in sys.modules)
"""


class Server:
    """The mirror's own server in a thread, with a log of its requests and a hook that may answer first."""

    def __init__(self, shared: Path) -> None:
        spec = importlib.util.spec_from_file_location("mirror_serve", shared / "openml_mirror" / "serve.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.requests: list[str] = []
        self.hook: Callable[[Any, int], bool] = lambda handler, count: False
        lock = threading.Lock()
        outer = self

        class Handler(module.Handler):  # type: ignore[misc, name-defined]
            def do_GET(self) -> None:
                with lock:
                    outer.requests.append(f"{self.command} {self.path}")
                    count = len(outer.requests)
                if not outer.hook(self, count):
                    super().do_GET()

            do_HEAD = do_GET

        self._http: ThreadingHTTPServer = module.make_server(0)
        self._http.RequestHandlerClass = Handler
        self.address = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def asked(self, part: str) -> list[str]:
        return [request for request in self.requests if part in request]

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server(shared: Path, openml_cache: Path) -> Iterator[Server]:
    running = Server(shared)
    yield running
    running.stop()


@pytest.fixture
def black_hole() -> Iterator[str]:
    """A host that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openml_client, "READ_SECONDS", 1.0)
    monkeypatch.setattr("bishop_ray.data.openml_client._PATIENCE_SECONDS", 1.5)


def tree(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def table_file(cache: Path) -> Path:
    (found,) = cache.rglob(f"task-{SMALL}.parquet")
    return found


def in_process(task: int, address: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LOAD, str(task), address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    ("suite", "group", "count", "paper"),
    [
        ("CC", "CC", 6, [361282, 361283, 361286]),
        ("cr", "CR", 12, [361093, 361094, 361099, 361104, 361288]),
        ("336", "336", 17, [361073, 361074, 361077, 361079, 361081, 361280]),
        ("Nc", "NC", 14, [361055, 361062, 361065, 361273, 361278]),
    ],
)
def test_suites(mirror: str, openml_cache: Path, suite: str, group: str, count: int, paper: list[int]) -> None:
    refs = suite_datasets(suite, mirror)
    assert len({ref.key for ref in refs}) == len(refs) == count
    assert {(ref.group, ref.kind, ref.server) for ref in refs} == {(group, "openml", mirror)}
    assert all(ref.name and not ref.name.startswith("task") for ref in refs)
    assert [int(ref.locator) for ref in suite_datasets(suite, mirror, paper_tasks=True)] == paper


def test_tables_are_what_the_manifest_says(mirror: str, openml_cache: Path, shared: Path) -> None:
    entries = json.loads((shared / "data" / "manifest.json").read_text("utf-8"))["datasets"]
    held = {entry["openml"]["task"]: entry for entry in entries if "openml" in entry}
    for task in (SMALL, 361286, 361062, 361289):
        entry, raw = held[task], load_dataset(task_ref(task, mirror))
        truth = pd.read_parquet(shared / "data" / entry["file"])
        assert raw.frame.shape == (entry["rows"], entry["features"])
        assert (raw.name, raw.target.name) == (entry["name"], entry["target"])
        assert list(raw.categorical) == entry["categorical_columns"]
        assert raw.task.is_classification == (entry["task_type"] != "regression")
        assert list(raw.frame.columns) == [name for name in truth.columns if name != entry["target"]]
        for name in raw.frame.columns:
            assert raw.frame[name].astype("object").tolist() == truth[name].astype("object").tolist(), name
        assert raw.target.astype("object").tolist() == truth[entry["target"]].astype("object").tolist()


def test_task_alone(mirror: str, openml_cache: Path) -> None:
    ref = task_dataset(str(SMALL), mirror)
    assert (ref.key, ref.experiment) == (f"{SMALL}-analcatdata_supreme", "openml-tasks")


def test_server_from_environment_and_client_settings(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BISHOP_OPENML_SERVER", server.address)
    assert len(suite_datasets("CC")) == 6
    monkeypatch.delenv("BISHOP_OPENML_SERVER")
    assert openml_client.server_url() == "https://www.openml.org/api/v1/xml"
    (tmp_path / "config" / "openml").mkdir(parents=True)
    (tmp_path / "config" / "openml" / "config").write_text(f"apikey = x\nserver = {server.address}/api/v1/xml\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert openml_client.server_url() == f"{server.address}/api/v1/xml"


@pytest.mark.parametrize("address", ["localhost:80", "ftp://host", "http://", "http://host:port", "host"])
def test_bad_address(address: str) -> None:
    with pytest.raises(UserError, match="must be an address like http://host:port; found"):
        suite_datasets("CR", address)


def test_only_what_is_needed_is_asked_once(server: Server) -> None:
    first = load_dataset(task_ref(SMALL, server.address))
    asked = list(server.requests)
    assert not server.asked("features")
    assert not server.asked("splits")
    again = load_dataset(task_ref(SMALL, server.address))
    assert server.requests == asked
    assert again.fingerprint() == first.fingerprint()
    pd.testing.assert_frame_equal(again.frame, first.frame)
    pd.testing.assert_series_equal(again.target, first.target)


def test_two_processes_one_download(server: Server) -> None:
    processes = [in_process(SMALL, server.address) for _ in range(2)]
    answers = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    assert len({out.split()[0] for out, _ in answers}) == 1
    assert len(server.asked("GET /datasets/")) == 1
    assert len(server.asked("/task/")) == 1


def test_bad_gateway_every_third_call(server: Server) -> None:
    def fail(handler: Any, count: int) -> bool:
        if count % 3:
            return False
        handler.send(b"<html><hr>502 Bad Gateway</html>", "text/html", status=502)
        return True

    server.hook = fail
    refs = suite_datasets("CC", server.address)
    assert len(refs) == 6
    for ref in refs[-2:]:
        assert len(load_dataset(ref)) > 1000
    assert len(server.requests) > 20


def test_qualities_may_fail(server: Server) -> None:
    def fail(handler: Any, count: int) -> bool:
        if "qualities" not in handler.path:
            return False
        handler.send(
            b'<oml:error xmlns:oml="x"><oml:code>1</oml:code><oml:message>no</oml:message></oml:error>',
            "text/xml",
            status=412,
        )
        return True

    server.hook = fail
    assert len(load_dataset(task_ref(SMALL, server.address))) == 4052


def test_short_answer_is_refused(server: Server, tmp_path: Path, shared: Path, impatient: None) -> None:
    """A well-formed file with rows missing: never taken for the dataset."""
    (name,) = (shared / "data").glob(f"cr_{SMALL}_*.parquet")
    pd.read_parquet(name).head(500).to_parquet(tmp_path / "short.parquet")

    def shorten(handler: Any, count: int) -> bool:
        if "/datasets/" not in handler.path:
            return False
        handler.send((tmp_path / "short.parquet").read_bytes(), "binary/octet-stream")
        return True

    server.hook = shorten
    with pytest.raises(SourceUnavailable, match="500 rows of 4052"):
        load_dataset(task_ref(SMALL, server.address))
    server.hook = lambda handler, count: False
    assert len(load_dataset(task_ref(SMALL, server.address))) == 4052


def test_black_hole_ends_in_time(black_hole: str, openml_cache: Path, impatient: None) -> None:
    errors: list[BaseException] = []

    def load() -> None:
        try:
            load_dataset(task_ref(SMALL, black_hole))
        except SourceUnavailable as error:
            errors.append(error)

    threads = [threading.Thread(target=load) for _ in range(4)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    # one wait of two silent tries, shared by all four, not one after the other
    assert time.monotonic() - started < 8
    assert len(errors) == 4
    assert all("no usable answer" in str(error) and "\n" not in str(error) for error in errors)


def test_time_limits_add_up_to_less_than_a_minute() -> None:
    tries = 1 + openml_client.retries().read
    assert 2 * tries * openml_client.READ_SECONDS < 55
    assert (1 + openml_client.retries().connect) * openml_client.CONNECT_SECONDS < 30


def test_offline_with_warm_cache(server: Server, openml_cache: Path) -> None:
    refs = suite_datasets("CC", server.address)
    raw = load_dataset(task_ref(SMALL, server.address))
    server.stop()
    before = tree(openml_cache)
    process = in_process(SMALL, server.address)
    out, err = process.communicate(timeout=60)
    # the client is not even imported
    assert out.split() == [raw.fingerprint(), "4052", "False"], err
    assert suite_datasets("CC", server.address) == refs
    assert tree(openml_cache) == before


def test_cold_and_offline_leaves_the_cache_alone(server: Server, openml_cache: Path, impatient: None) -> None:
    load_dataset(task_ref(SMALL, server.address))
    path = table_file(openml_cache)
    path.write_bytes(path.read_bytes()[:-100])
    before = path.read_bytes()
    server.stop()
    with pytest.raises(SourceUnavailable, match=f"task {SMALL}"):
        load_dataset(task_ref(SMALL, server.address))
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text", "description"])
def test_damaged_cache_is_healed(
    server: Server, openml_cache: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = load_dataset(task_ref(SMALL, server.address)).fingerprint()
    path = table_file(openml_cache)
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) - 500] ^= 1  # one bit of the footer, which Parquet's own checksums leave out
    changed = {"truncated": bytes(content[: len(content) // 2]), "empty": b"", "text": b"PAR1 no"}
    path.write_bytes(changed.get(damage, bytes(content)))
    if damage == "description":
        path.with_suffix(".json").write_text('{"format": 1, "name"')
    assert load_dataset(task_ref(SMALL, server.address)).fingerprint() == good
    assert len(server.asked("GET /datasets/")) == 2
    assert "damaged" in caplog.text
    assert load_dataset(task_ref(SMALL, server.address)).fingerprint() == good
    assert len(server.asked("GET /datasets/")) == 2


def test_damaged_suite_list_is_healed(server: Server, openml_cache: Path) -> None:
    refs = suite_datasets("CC", server.address)
    (path,) = openml_cache.rglob("suite-334.json")
    path.write_text(path.read_text()[:40])
    assert suite_datasets("CC", server.address) == refs


def test_the_clients_own_cache_serves_offline_and_stays(server: Server, openml_cache: Path) -> None:
    fill = (
        "import sys, openml; openml.config.server = sys.argv[1] + '/api/v1/xml';"
        f"openml.tasks.get_task({SMALL}).get_dataset().get_data()"
    )
    subprocess.run([sys.executable, "-c", fill, server.address], check=True, timeout=60, env=dict(os.environ))
    server.stop()
    before = tree(openml_cache)
    raw = load_dataset(task_ref(SMALL, server.address))
    assert (len(raw), len(raw.categorical)) == (4052, 5)
    after = tree(openml_cache)
    assert {name: after.get(name) for name in before} == before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda server: suite_datasets("99", server), "suite 99: .* answers 'Unknown study'"),
        (lambda server: load_dataset(task_ref(7, server)), "task 7: .* answers 'Unknown task'"),
        (lambda server: suite_datasets("5", server, paper_tasks=True), "suite 5"),
    ],
)
def test_unknown_numbers(mirror: str, openml_cache: Path, call: Callable[[str], object], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        call(mirror)
    assert not isinstance(caught.value, SourceUnavailable)
    assert "\n" not in str(caught.value)


def test_unknown_suite_name() -> None:
    with pytest.raises(UnknownName, match=r"unknown suite 'CRX'; did you mean 'CR'\?"):
        suite_datasets("CRX")


def test_names_that_clash_carry_the_task(openml_cache: Path) -> None:
    url = openml_client.server_url("http://127.0.0.1:9")
    cache = ServerCache(openml_cache, url)
    cache.folder.mkdir(parents=True)
    cache.write_suite(77, {"12": "house", "15": "House", "11": "pol"})
    assert [ref.key for ref in suite_datasets("77", url)] == ["77-house-12", "77-House-15", "77-pol"]


def test_cache_folder_that_cannot_be_written(mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPENML_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot be written .*OPENML_CACHE_DIR"):
        load_dataset(task_ref(SMALL, mirror))


def test_small_integers_do_not_wrap(mirror: str, openml_cache: Path) -> None:
    """OpenML stores many columns as uint8: sums and standardisation must happen after a cast."""
    from bishop_ray.data import Preprocessor

    raw = load_dataset(task_ref(361062, mirror))  # pol
    small = [name for name in raw.frame.columns if raw.frame[name].dtype == np.uint8]
    assert small
    encoded = Preprocessor.fit(raw)
    names = [column.name for column in encoded.numbers]
    x_num, _ = encoded.transform_features(raw.frame)
    for name in small:
        if name in names:
            values = raw.frame[name].to_numpy(np.float64)
            expected = (values - values.mean()) / values.std()
            np.testing.assert_allclose(x_num[:, names.index(name)], expected, rtol=1e-5, atol=1e-5)
