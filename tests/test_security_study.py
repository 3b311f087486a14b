"""The same promises with Ray, MLflow and OpenML at work: sockets, tokens, hostile servers, planted secrets."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from fakes import make_table
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from predictor_fakes import make_predictor
from test_security import payloads, refused

from bishop_ray.data.table import TaskType
from bishop_ray.registry import load_best, register_best
from bishop_ray.tracking import StudyTracker

pytest_plugins = ("tracking_fixtures",)
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
RAW = make_table(TaskType.BINARY, rows=60)


# Ray ------------------------------------------------------------------------------------------------------------------

CONNECT = """
import sys, ray
from bishop_ray.search.cluster import connect
connect()
ray.get(ray.remote(lambda: 1).remote())
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
ASK = """
import sys
from ray._raylet import GcsClient
print(len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=10)), "nodes")
"""


def environment(home: Path, **more: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "LANG") if name in os.environ}
    return {**kept, "HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


@pytest.fixture(scope="module")
def own_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[psutil.Process, str, Path]]:
    """A process that has started a Ray of its own: it, its address, its home."""
    home = tmp_path_factory.mktemp("home")
    with subprocess.Popen(
        [sys.executable, "-c", CONNECT], env=environment(home), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert ":" in address, "no Ray started"
        yield psutil.Process(process.pid), address, home
        process.communicate(timeout=60)


def listening(process: psutil.Process) -> list[tuple[str, str, int]]:
    """Name, address and port of every socket on which a process or one below it takes connections."""
    found = []
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            sockets = [c for c in each.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            found += [(each.name(), c.laddr.ip, c.laddr.port) for c in sockets]
    return found


def test_an_own_ray_listens_on_loopback_only(own_ray: tuple[psutil.Process, str, Path]) -> None:
    """Case 82."""
    sockets = listening(own_ray[0])
    assert {name for name, _, _ in sockets} >= {"gcs_server", "raylet"}
    assert not [found for found in sockets if found[1].removeprefix("::ffff:") not in ("127.0.0.1", "::1")]


def test_an_own_ray_refuses_who_has_no_token(own_ray: tuple[psutil.Process, str, Path], tmp_path: Path) -> None:
    """Case 82."""
    process, address, _ = own_ray
    token = next(child for child in process.children() if child.name() == "gcs_server").environ()["RAY_AUTH_TOKEN"]
    cases = [({}, False), ({"RAY_AUTH_MODE": "disabled"}, False)]
    cases += [({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": value}, value == token) for value in ("0" * 64, token)]
    for more, welcome in cases:
        command = [sys.executable, "-c", ASK, address]
        done = subprocess.run(command, env=environment(tmp_path, **more), capture_output=True, text=True, check=False)
        if welcome:
            assert done.stdout == "1 nodes\n", done.stderr[-500:]
        else:
            assert done.returncode
            assert "InvalidAuthToken" in done.stderr
    for _, _, port in listening(process):  # what speaks HTTP among them answers nobody either, but for its metrics
        with (
            contextlib.suppress(OSError, HTTPException),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/jobs/", timeout=3) as got,
        ):
            assert got.read(6) == b"# HELP", port


def test_an_own_ray_leaves_its_token_nowhere(own_ray: tuple[psutil.Process, str, Path]) -> None:
    process, _, home = own_ray
    gcs = next(child for child in process.children() if child.name() == "gcs_server")
    session = next(Path(word.split("=")[1]).parent for word in gcs.cmdline() if word.startswith("--log_dir="))
    token = gcs.environ()["RAY_AUTH_TOKEN"]
    assert (session / "logs" / "gcs_server.out").is_file()
    assert not leaks([home, session], [token])
    for child in process.children(recursive=True):
        assert token not in " ".join(child.cmdline())


def leaks(folders: list[Path], secrets: list[str]) -> list[str]:
    """Files and names of files that hold a secret, as it is, in base64, or quoted for an address."""
    from urllib.parse import quote

    wanted = [
        form for s in secrets for form in (s, quote(s, safe=""), base64.b64encode(s.encode()).decode().rstrip("="))
    ]
    patterns = [form.encode() for form in wanted]
    found = []
    for folder in folders:
        for path in folder.rglob("*"):
            if any(form in path.name for form in wanted):
                found.append(f"{path}: its name")
            if path.is_file() and not path.is_symlink():
                content = path.read_bytes()
                found += [f"{path}: {p.decode()}" for p in patterns if p in content]
    return found


# Registries -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def version(uri: str, tracker_of: Callable[..., StudyTracker], tmp_path: Path) -> Path:
    """Folder of a registered model's files."""
    run_id = tracker_of(uri).parent_run_id()
    register_best(
        make_predictor(RAW), "wine", alias="bishop", val_score=0.5, example=RAW.frame.head(2), run_id=run_id, uri=uri
    )
    return next((tmp_path / "mlartifacts").rglob("MLmodel")).parent


def test_what_mlflow_would_run_is_not_read(uri: str, version: Path, tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    evil = f"open({str(trap)!r}, 'w')"
    (version / "MLmodel").write_text(
        "flavors:\n  python_function:\n    loader_module: os\n    python_model: python_model.pkl\n    code: code\n"
    )
    for kind, content in payloads(trap).items():
        for folder in (version, version / "artifacts", version / "artifacts" / "predictor"):
            (folder / f"{kind}.pkl").write_bytes(content)
            (folder / "python_model.pkl").write_bytes(content)
    for name in ("__init__.py", "sitecustomize.py", "conftest.py", "torch.py"):
        (version / "artifacts" / "predictor" / name).write_text(evil)
        (version / "code" / name).write_text(evil)
    assert len(load_best("wine", uri=uri).predict(RAW.frame)) == len(RAW)
    shutil.rmtree(version / "artifacts" / "predictor")
    refused(lambda: load_best("wine", uri=uri), "wine", "holds no predictor")
    assert not trap.exists()


def test_a_link_in_the_registry(uri: str, version: Path, tmp_path: Path) -> None:
    weights = version / "artifacts" / "predictor" / "weights.safetensors"
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")  # with the right content: it is the link that counts
    refused(lambda: load_best("wine", uri=uri), weights.name, "leaves the model's folder")


def test_a_version_that_lies_elsewhere(uri: str, version: Path, tmp_path: Path) -> None:
    shutil.copytree(version, tmp_path / "elsewhere" / "m")
    with recorder() as (port, asked):
        sources = [
            "file:///etc", "/etc", f"{tmp_path}/elsewhere/m", f"{tmp_path}/mlartifacts/../elsewhere/m", "../..",
            "s3://nobody/m", f"http://127.0.0.1:{port}/api/2.0/mlflow-artifacts/artifacts/m", "mlflow-artifacts:/m",
            f"mlflow-artifacts://127.0.0.1:{port}/m", "runs:/0/m", "dbfs:/m", "hdfs://h/m",
        ]  # fmt: skip
        client, said = MlflowClient(uri, uri), 0
        for source in sources:
            try:
                made = client.create_model_version("wine", source, await_creation_for=0)
            except MlflowException:  # it refuses some by itself
                continue
            refused(lambda number=made.version: load_best("wine", str(number), uri=uri), "registry says")
            said += 1
        assert said >= 6
        assert not asked


@contextlib.contextmanager
def recorder(answer: Callable[[str], tuple[int, bytes]] = lambda path: (404, b"")) -> Iterator[tuple[int, list[str]]]:
    """A server on loopback: its port, and the requests it got with their Authorization."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.path} {self.headers.get('Authorization', '')}")
            status, body = answer(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1], asked
    finally:
        server.shutdown()
        server.server_close()


LISTINGS = ["../../../evil", "/tmp/evil", "..", "a/../../../../evil", "%2e%2e/%2e%2e/evil", "..\\..\\evil"]


@pytest.mark.parametrize("listed", LISTINGS)
def test_a_hostile_server_writes_nothing_outside(listed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 86: names that lead out of the folder; nothing here unpacks an archive (test_security.py)."""
    scratch = tmp_path / "a" / "b" / "tmp"
    scratch.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    def answer(path: str) -> tuple[int, bytes]:
        if "/artifacts/" in path:
            return 200, b"evil"
        texts = {
            "registered-models": {
                "registered_models": [{"name": "m", "aliases": [{"alias": "champion", "version": "1"}]}]
            },
            "get-download-uri": {"artifact_uri": "mlflow-artifacts:/1/m"},
            "model-versions/search": {"model_versions": [{"name": "m", "version": "1"}]},
            "mlflow-artifacts": {"files": [{"path": listed, "is_dir": False, "file_size": 4}]},
        }
        return 200, json.dumps(next((text for key, text in texts.items() if key in path), {})).encode()

    before = sorted(tmp_path.rglob("*"))
    with recorder(answer) as (port, asked):
        refused(lambda: load_best("m", uri=f"http://127.0.0.1:{port}"))
    assert any("mlflow-artifacts" in path for path in asked)
    assert sorted(tmp_path.rglob("*")) == before
    assert not Path("/tmp/evil").exists()


def test_a_server_that_sends_its_client_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host must not be sent the password of the tracking server."""
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "s3cr3t-word")
    with recorder() as (other, asked_there):
        sources = [
            f"mlflow-artifacts://127.0.0.1:{other}/m",
            f"http://127.0.0.1:{other}/api/2.0/mlflow-artifacts/artifacts/m",
        ]
        for source in [*sources, "file:///etc", str(tmp_path)]:

            def answer(path: str, source: str = source) -> tuple[int, bytes]:
                model = {"name": "m", "aliases": [{"alias": "champion", "version": "1"}]}
                texts = {
                    "registered-models": {"registered_models": [model]},
                    "get-download-uri": {"artifact_uri": source},
                }
                return 200, json.dumps(next((text for key, text in texts.items() if key in path), {})).encode()

            with recorder(answer) as (port, _):
                assert "s3cr3t" not in refused(
                    lambda p=port: load_best("m", uri=f"http://127.0.0.1:{p}"), "registry says"
                )
        assert not asked_there
        # That it would have been sent there:
        from mlflow.artifacts import download_artifacts

        with contextlib.suppress(Exception):
            download_artifacts(sources[1], dst_path=str(tmp_path), tracking_uri=f"http://127.0.0.1:{other}")
        assert any(base64.b64encode(b"me:s3cr3t-word").decode() in line for line in asked_there)


# A whole search -------------------------------------------------------------------------------------------------------

SECRETS = {
    "RAY_AUTH_TOKEN": "ray0t0ken" + "5" * 40,
    "MLFLOW_TRACKING_USERNAME": "mlflow-u5er",
    "MLFLOW_TRACKING_PASSWORD": "mlflow-pa55word",
    "OPENML_APIKEY": "0penml-api-key-env",
    "AWS_SECRET_ACCESS_KEY": "aws-5ecret-key",
}
URI_SECRET, KEY_SECRET = "ur1-pa55word", "0penml-api-key-file"


@contextlib.contextmanager
def mlflow_server(folder: Path) -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "artifacts"),
    ]  # fmt: skip
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                break
            time.sleep(0.3)
        yield port
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


@contextlib.contextmanager
def renaming(mirror: str, name: str) -> Iterator[str]:
    """An OpenML server whose datasets all have the name `name`."""

    def answer(path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(mirror.partition("/api/")[0] + path, timeout=20) as got:
                body = got.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        body = re.sub(rb"<oml:name>analcatdata_supreme</oml:name>", f"<oml:name>{name}</oml:name>".encode(), body)
        return 200, body.replace(mirror.partition("/api/")[0].encode(), address[0].encode())

    address: list[str] = []
    with recorder(answer) as (port, _):
        address.append(f"http://127.0.0.1:{port}")
        yield address[0]


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Path]:
    """A short folder: Ray's sockets lie in it, and their paths have a limit."""
    with tempfile.TemporaryDirectory(prefix="bs", dir="/tmp", ignore_cleanup_errors=True) as name:
        for part in ("home", "ray", "store", "cache", "mlflow"):
            (Path(name) / part).mkdir()
        yield Path(name)


def tune(room: Path, *flags: str, trials: int = 1, **own: str) -> subprocess.CompletedProcess[str]:
    """A search with a forest; everything it writes lies in `room`."""
    more = {
        "RAY_TMPDIR": str(room / "ray"),
        "OPENML_CACHE_DIR": str(room / "cache"),
        "TMPDIR": str(room / "ray"),
        **own,
    }
    budget = ["--models", "random_forest", "--trials", str(trials), "--eval-seeds", "1"]
    budget += ["--storage", str(room / "store")]
    command = [sys.executable, str(ROOT / "jobs" / "tune.py"), *flags, *budget]
    env = environment(room / "home", **more)
    return subprocess.run(command, cwd=room / "home", env=env, capture_output=True, text=True, timeout=200, check=False)


def test_a_search_with_planted_secrets_and_a_hostile_dataset_name(mirror: str, room: Path) -> None:
    settings = room / "home" / ".config" / "openml"
    settings.mkdir(parents=True)
    name = "../../../../evil/x" + "y" * 300
    with mlflow_server(room / "mlflow") as port, renaming(mirror, name) as server:
        (settings / "config").write_text(f"apikey = {KEY_SECRET}\nserver = {server}/api/v1/xml\n")
        uri = f"http://admin:{URI_SECRET}@127.0.0.1:{port}"
        done = tune(room, "--task", "361093", "--tracking-uri", uri, **SECRETS, RAY_AUTH_MODE="token")
        assert done.returncode == 0, done.stderr[-2000:]
        assert "registered model: 361093-evil_x" in done.stdout
    (settings / "config").unlink()
    secrets = [*SECRETS.values(), URI_SECRET, KEY_SECRET]
    assert not leaks([room], secrets)
    assert not [secret for secret in secrets if secret in done.stdout + done.stderr]
    assert any((room / "ray").rglob("raylet.out")), "Ray's session is not where it was looked for"
    studies = {path.name for path in (room / "store" / "studies").iterdir()}
    assert len(studies) == 2  # the study and its lock
    assert all(study.startswith("361093-evil_xyyy") and len(study.encode()) < 200 for study in studies)
    assert not list(Path("/tmp").glob("evil*"))


def test_a_table_with_a_hostile_name_and_columns_then_with_traps(room: Path) -> None:
    table = room / "..%2f..\u2028CON\\;rm -rf $HOME.csv"
    frame = RAW.frame.assign(**{"../../x": 1.0, "a\x01b": RAW.frame["num_0"], "=cmd()": 2.0, "y": RAW.target})
    frame.to_csv(table, index=False)
    before = set(room.iterdir())
    flags = ["--table", str(table), "--target", "y", "--tracking-uri", f"sqlite:///{room}/mlflow/mlflow.db"]
    done = tune(room, *flags)
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(room.iterdir()) == before
    for path in (room / "store").rglob("*"):
        assert path.resolve().is_relative_to((room / "store").resolve())
        assert path.name.isprintable()
    assert {path.name for path in (room / "mlflow").iterdir()} >= {"mlflow.db", "mlartifacts"}

    # What Tune writes beside our records, and would read if it were asked to restore; and whatever else is no record.
    bomb = payloads(room / "executed")["cloudpickle"]
    studies = [path for path in (room / "store" / "studies").iterdir() if path.is_dir()]
    assert len(studies) == 1
    below = [path for path in studies[0].rglob("*") if path.is_dir() and path.name != "model"]
    for folder in [studies[0], *below]:  # not among an estimator's own files, whose hash is known
        for name in ("tuner.pkl", "trainable.pkl", "params.pkl", "searcher-state-1.pkl", "search_gen_state-1.pkl"):
            (folder / name).write_bytes(bomb)
    for path in [path for path in studies[0].rglob("*.pkl") if path.is_file()]:
        path.write_bytes(bomb)
    # The model that was evaluated is met last, by a worker, unless the second trial is better: one line here too.
    for path in studies[0].rglob("predictor/model/*"):
        path.write_bytes(bomb)
    done = tune(room, *flags, trials=2)
    assert (done.returncode, done.stderr.count("\n")) in ((2, 1), (0, 0)), done.stderr
    assert not (room / "executed").exists()


def test_a_failing_command_shows_no_secret(room: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{free.getsockname()[1]}"
    settings = room / "home" / ".config" / "openml"
    settings.mkdir(parents=True)
    (settings / "config").write_text(f"apikey = {KEY_SECRET}\nserver = http://{dead}/api/v1/xml\n")
    commands = [
        ["--task", "361093"],  # the address that the client asked in vain holds the key
        ["--task", "361093", "--openml-server", f"http://me:{URI_SECRET}@{dead}"],
        ["--dataset", "iris", "--tracking-uri", f"http://me:{URI_SECRET}@{dead}"],
        ["--dataset", "iris", "--tracking-uri", f"me:{URI_SECRET}@{dead}"],
        ["--dataset", "iris", "--tracking-uri", f"postgresql://me:{URI_SECRET}@{dead}/db"],
        ["--dataset", "iris", "--study-db", f"postgresql://me:{URI_SECRET}@{dead}/db"],
        ["--dataset", "iris", "--traking-uri", f"http://me:{URI_SECRET}@{dead}"],
        ["--dataset", "iris", "--space", SECRETS["AWS_SECRET_ACCESS_KEY"]],
    ]
    with ThreadPoolExecutor(3) as pool:  # most of it is waiting for answers
        ended = list(pool.map(lambda command: tune(room, *command, **SECRETS), commands))
    for command, done in zip(commands, ended, strict=True):
        assert done.returncode == 2, (command, done.stderr[-1000:])
        lines = done.stderr.splitlines()
        assert lines[-1].startswith("error: "), done.stderr
        assert len(lines) == 1 or "postgresql" in str(command), done.stderr  # MLflow itself speaks of its retries
        for secret in (*SECRETS.values(), URI_SECRET, KEY_SECRET):
            assert secret not in done.stdout + done.stderr, command
    assert not leaks([room / "store", room / "cache", room / "ray"], [*SECRETS.values(), URI_SECRET, KEY_SECRET])


def test_nothing_of_the_clients_own_cache_is_unpickled(mirror: str, room: Path) -> None:
    """The client would unpickle what lies beside a table in its cache."""
    code = "import sys; from bishop_ray.data.load import load_dataset, task_dataset; "
    code += "print(len(load_dataset(task_dataset(sys.argv[1], sys.argv[2]))))"
    trap = room / "executed"
    env = environment(room / "home", OPENML_CACHE_DIR=str(room / "cache"))

    def load() -> None:
        done = subprocess.run(
            [sys.executable, "-c", code, "361093", mirror], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-1000:]
        assert int(done.stdout) > 1000

    fill = "import openml, sys; openml.config.server = sys.argv[2]; t = openml.tasks.get_task(int(sys.argv[1])); "
    fill += "d = t.get_dataset(); d.get_data(); d.features; d.qualities"
    subprocess.run([sys.executable, "-c", fill, "361093", mirror], env=env, check=True, capture_output=True)
    pickles = [path for path in (room / "cache").rglob("*") if "pkl" in path.name or "pickle" in path.name]
    assert pickles, "the client keeps no pickles any more: this test has lost its point"
    for path in pickles:
        path.write_bytes(payloads(trap)["pickle"])
    load()
    assert not trap.exists()
    with contextlib.suppress(subprocess.CalledProcessError):  # that the client by itself does run them:
        subprocess.run([sys.executable, "-c", fill, "361093", mirror], env=env, check=True, capture_output=True)
    assert trap.exists()
