"""A head and two nodes for jobs: the commands and the environment of cluster.yaml on loopback, with ports and folders
of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import yaml
from cluster_fixtures import CLONE, ROOT, STORAGE, Config, environment
from mlflow import MlflowClient
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from ray.util import get_node_ip_address

BIN = Path(sys.executable).parent
WORKERS = 2


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    held = [socket.socket() for _ in range(number)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in held]
    for one in held:
        one.close()
    return ports


def answer(url: str, token: str = "", body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Status and content of a request; POST where there is a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            text = response.read().decode()
            return response.status, json.loads(text) if text[:1] in "[{" else text
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def until(reached: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true value of `reached()`."""
    end = time.monotonic() + seconds
    while not (value := reached()):
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.2)
    return value


@dataclass(frozen=True)
class Nodes:
    """A head and two workers, and how they are spoken to."""

    api: str
    head: str
    token: str
    environment: dict[str, str]
    folder: Path
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def kill(self, node: str) -> None:
        """Takes a node's power away."""
        os.killpg(self.started[node].pid, signal.SIGKILL)

    def ray(self, *words: str, at_home: bool = True) -> subprocess.CompletedProcess[str]:
        """A `ray` command, given in some other folder: of a user at home with the exported address, or on the head."""
        elsewhere = self.folder / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        env = self.environment | ({"RAY_API_SERVER_ADDRESS": self.api} if at_home else {})
        command = [str(BIN / "ray"), *words]
        return subprocess.run(command, env=env, cwd=elsewhere, capture_output=True, text=True, timeout=180)

    def submit(self, entrypoint: str) -> str:
        """The id of a job that was just submitted through the HTTP API."""
        status, content = answer(f"{self.api}/api/jobs/", self.token, {"entrypoint": entrypoint})
        assert status == 200, content
        return str(content["submission_id"])

    def state(self, job: str) -> str:
        """PENDING, RUNNING, SUCCEEDED, STOPPED or FAILED."""
        return str(answer(f"{self.api}/api/jobs/{job}", self.token)[1]["status"])

    def log(self, job: str) -> str:
        """What the job has printed."""
        return str(answer(f"{self.api}/api/jobs/{job}/logs", self.token)[1]["logs"])

    def trials(self, study: str) -> list[str]:
        """States of the study's trials, from its journal."""
        return [trial.state.name for trial in self._study(study)]

    def reports(self, study: str) -> dict[int, int]:
        """Reports by trial."""
        return {trial.number: len(trial.intermediate_values) for trial in self._study(study)}

    def _study(self, study: str) -> list[optuna.trial.FrozenTrial]:
        journal = self.folder / "store" / "studies" / study / "optuna.journal"
        storage = JournalStorage(JournalFileBackend(str(journal)))
        return optuna.load_study(storage=storage, study_name=study).trials

    def runs(self) -> list[str]:
        """States of all runs, from the MLflow server."""
        client = MlflowClient(self.environment["MLFLOW_TRACKING_URI"])
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        return [run.info.status for run in client.search_runs(experiments, max_results=5000)]


def node_commands(loaded: Config, ports: list[int], folder: Path) -> dict[str, str]:
    """The start commands of cluster.yaml: their own flags, other ports and paths."""
    starts = {
        place: next(command for command in loaded[f"{place}_start_ray_commands"] if "ray start" in command)
        for place in ("head", "worker")
    }
    serve = next(command for command in loaded["head_start_ray_commands"] if "mlflow server" in command)
    gcs, dashboard, client, mlflow, *agents = ports
    common = f"--block --min-worker-port=0 --max-worker-port=0 --object-store-memory={10**8}"
    starts["head"] = (
        starts["head"]
        .replace("--port=6379", f"--port={gcs}")
        .replace(
            "--autoscaling-config=~/ray_bootstrap_config.yaml",
            f"--dashboard-port={dashboard} --ray-client-server-port={client} "
            f"--dashboard-agent-listen-port={agents[0]} {common}",
        )
    )
    worker = starts.pop("worker").replace("$RAY_HEAD_IP:6379", f"{get_node_ip_address()}:{gcs}")
    for number, port in enumerate(agents[1:], start=1):
        starts[f"worker{number}"] = f"{worker} --num-cpus=1 --dashboard-agent-listen-port={port} {common}"
    own = {
        name: re.sub(r"--object-manager-port=\d+ ?", "", command).replace(CLONE, shlex.quote(str(ROOT)))
        for name, command in starts.items()
    }
    inner = re.search(r"\((MLFLOW_.*) > /tmp/mlflow.log", serve)
    assert inner
    served = "env " + inner[1].replace("setsid nohup ", "").replace("--port 5000", f"--port {mlflow}").replace(
        STORAGE, str(folder / "store")
    )
    return {"mlflow": served} | own


@contextlib.contextmanager
def three_nodes() -> Iterator[Nodes]:
    """A cluster of its own, with an MLflow server; whatever was started is ended."""
    folder = Path(tempfile.mkdtemp(prefix="b", dir="/tmp"))  # sockets lie below it, and their paths may have 107 bytes
    ports = free_ports(4 + 1 + WORKERS)
    token = secrets.token_hex(32)
    (folder / "token").write_text(token)
    (folder / "token").chmod(0o600)
    (folder / "store").mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MLFLOW_", "BISHOP_"))}
    loaded = yaml.safe_load((ROOT / "cluster.yaml").read_text("utf-8"))
    env |= environment(loaded["docker"]["run_options"])
    env |= {
        "BISHOP_RAY_HOME": str(folder / "store"),
        "MLFLOW_TRACKING_URI": env["MLFLOW_TRACKING_URI"].replace("5000", str(ports[3])),
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "PATH": f"{BIN}{os.pathsep}{env['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    here = Nodes(f"http://127.0.0.1:{ports[1]}", f"{get_node_ip_address()}:{ports[0]}", token, env, folder)
    started = here.started
    try:
        for name, command in node_commands(loaded, ports, folder).items():
            started[name] = start(command, env, folder / f"{name}.log")
            # One after the other: nodes of one host that start at the same moment choose the same sockets.
            if name != "mlflow":
                until(lambda n=name: started[n].poll() is not None or alive(here) == len(started) - 1, 120, name)
                assert started[name].poll() is None, f"{name} has ended"
        until(lambda: reachable(f"{env['MLFLOW_TRACKING_URI']}/health"), 120, "MLflow")
        yield here
    except BaseException:
        for log in sorted(folder.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text('utf-8', 'replace')[-2000:]}")
        raise
    finally:
        end(list(started.values()))
        shutil.rmtree(folder, ignore_errors=True)


def start(command: str, env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """The command in a session of its own."""
    line = re.sub("ray start|env MLFLOW", r"exec \g<0>", command)
    with log.open("wb") as file:
        return subprocess.Popen(
            ["bash", "-c", line], env=env, cwd=log.parent, stdout=file, stderr=file, start_new_session=True
        )


def reachable(url: str) -> int:
    """The status that answers, 0 where nobody does."""
    try:
        return answer(url)[0]
    except OSError:
        return 0


def alive(nodes: Nodes) -> int:
    """How many nodes have joined; none while nobody answers."""
    if not reachable(f"{nodes.api}/api/version"):
        return 0
    content = answer(f"{nodes.api}/nodes?view=summary", nodes.token)[1]
    return sum(node["raylet"].get("state") == "ALIVE" for node in content["data"]["summary"])


def end(started: list[subprocess.Popen[bytes]]) -> None:
    """Ends each process as Ctrl-C would, then what is left of its session."""
    for process in reversed(started):
        process.terminate()
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
