"""Service lifecycle: start, replace in place, stop.

A service on a Ray of its own belongs to the process that started it, which holds a lock in ``serving/`` of this user's
folder and leaves there, readable by this user alone, where its Ray is. The same command in another process finds that
and puts the model's present version in the place of the one that answers.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from filelock import FileLock, Timeout

from bishop_ray._compat.ray import on_loopback, reread_access
from bishop_ray.errors import SourceUnavailable, UserError
from bishop_ray.paths import home, replacing_file
from bishop_ray.registry import find_version, load_best
from bishop_ray.search.cluster import Cluster, connect
from bishop_ray.serving import deployment
from bishop_ray.serving.app import DeploymentSpec, token_digest
from bishop_ray.tracking import tracking_uri
from bishop_ray.tracking.naming import safe_file_name

START_SECONDS = 180.0
"""How long another process may take to start the service that this one is to update."""
_ACCESS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Variables by which Ray knows its own token, which is another one than that of the service."""


def free_port(host: str, port: int) -> int:
    """`port`, or a free one for 0.

    Raises:
        UserError: It cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
            return int(trial.getsockname()[1])
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: cannot be listened on: {error.strerror or error}") from None


def url_of(host: str, port: int) -> str:
    """The address that clients use."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def ray_access() -> dict[str, str]:
    """How the Ray of this process is reached, for `enter`."""
    return {name: os.environ[name] for name in _ACCESS if name in os.environ}


def enter(access: dict[str, str]) -> None:
    """Has this process join a Ray with the token of `access`, whatever its own environment says."""
    for name in _ACCESS:
        os.environ.pop(name, None)
    os.environ.update(access)
    reread_access()


def write_note(note: Path, values: dict[str, Any]) -> None:
    """Writes a note that this user alone can read."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with replacing_file(note) as part, os.fdopen(os.open(part, flags, 0o600), "w", encoding="utf-8") as file:
        json.dump(values, file)


def read_note(note: Path) -> dict[str, Any]:
    """What the process that serves has noted; waits while it is starting.

    Raises:
        SourceUnavailable: It does not get ready.
    """
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        try:
            found = json.loads(note.read_text("utf-8"))
            access = {name: str(found["access"][name]) for name in _ACCESS if name in found["access"]}
            place = {"address": str(found["address"]), "host": str(found["host"]), "port": int(found["port"])}
            return place | {"access": access}
        except FileNotFoundError:
            time.sleep(0.5)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(f"{note}: expected where the running service is; found a damaged file") from error
    raise SourceUnavailable(f"another process has been starting this service for {START_SECONDS:g} seconds; see there")


TOKEN = "BISHOP_SERVE_TOKEN"  # noqa: S105  the name of a variable
SHORTEST_TOKEN = 16
HOST, PORT = "127.0.0.1", 8000
Say = Callable[[str], None]


@dataclass(frozen=True)
class ServeOptions:
    """What a user asks to be served.

    Attributes:
        name: Registered name.
        alias: An alias, or a version number.
        uri: MLflow address, see `tracking_uri`.
        host: Address to listen on; "" for this machine alone, or where the service runs already.
        port: Port; 0 for a free one, None for `PORT`, or where the service runs already.
        replicas: Processes that answer.
        max_body: Bytes of a request's body.
        ray_address: Cluster to deploy on; "" for a Ray of its own.
    """

    name: str
    alias: str = "champion"
    uri: str = ""
    host: str = ""
    port: int | None = None
    replicas: int = 1
    max_body: int = 10_000_000
    ray_address: str = ""


def serve_model(wish: ServeOptions, say: Say, catch_signals: Callable[[], None] = lambda: None) -> None:
    """Serves a model: on a cluster returns when it answers, on a Ray of its own when it is stopped (Ctrl-C).

    Where the model is served already, its present version replaces the one that answers, and the call returns.

    Args:
        wish: What is to be served.
        say: Told a line at a time.
        catch_signals: Called when Ray, which puts handlers of its own in place, has started.

    Raises:
        UserError: No such model or version, a token that is none, an address that cannot be listened on.
        SourceUnavailable: MLflow or Ray does not answer, or the version does not start.
    """
    uri = tracking_uri(wish.uri)
    # Out of the environment: processes of Ray inherit it, and need a digest only.
    token = os.environ.pop(TOKEN, "")
    _check_token(token)
    version = find_version(wish.name, wish.alias, uri)
    load_best(wish.name, str(version), uri)  # what does not load here is not sent to replicas
    new = DeploymentSpec(wish.name, version, uri, token_digest(token) if token else "", wish.max_body)
    if wish.ray_address:
        connect(wish.ray_address)
        _on_cluster(wish, new, say)
        return
    folder = home() / "serving"
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / f"{safe_file_name(wish.name)}.json"
    lock = FileLock(note.with_suffix(".lock"), timeout=0)
    try:
        with lock:
            note.unlink(missing_ok=True)
            _own(wish, new, note, say, catch_signals)
    except Timeout:
        _replace(wish, new, note, say)


def _check_token(token: str) -> None:
    if token and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token):
        raise UserError(
            f"{TOKEN}: expected at least {SHORTEST_TOKEN} printable ASCII letters without spaces; found {len(token)}"
        )


def _own(wish: ServeOptions, new: DeploymentSpec, note: Path, say: Say, catch_signals: Callable[[], None]) -> None:
    """Starts the service on a Ray of this process, and stays until it is interrupted."""
    host = wish.host or HOST
    port = free_port(host, PORT if wish.port is None else wish.port)
    os.environ.setdefault("RAY_preload_python_modules", "ray.serve")  # in the processes that wait to become replicas
    cluster = connect()
    catch_signals()
    try:
        new, made = _with_token(new, None)
        deployment.start(host, port)
        deployment.deploy(new, wish.replicas, _cpus(cluster, wish.replicas))
        url = url_of(host, port)
        address = str(ray.get_runtime_context().gcs_address)
        write_note(note, {"address": address, "access": ray_access(), "host": host, "port": port})
        _tell(wish, new, url, made, say)
        say("Ctrl-C ends it; the same command elsewhere puts the model's present version in its place")
        _watch(wish.name, say)
    except KeyboardInterrupt:
        note.unlink(missing_ok=True)
        say("stopping: requests under way are answered first")
        deployment.stop(wish.name)
    finally:
        note.unlink(missing_ok=True)
        ray.shutdown()


def _watch(name: str, say: Say) -> None:
    """Says when the service stops answering and when it answers again; never returns."""
    well = True
    while True:
        time.sleep(5)
        if (now := deployment.healthy(name)) != well:
            say(f"{name}: {'answers again' if now else 'no replica answers'}")
            well = now


def _replace(wish: ServeOptions, new: DeploymentSpec, note: Path, say: Say) -> None:
    """Puts a version in the place of the one that another process serves."""
    found = read_note(note)
    check_same(wish, found["host"], found["port"])
    enter(found["access"])
    with on_loopback():
        cluster = connect(found["address"])
    try:
        new, made = _with_token(new, deployment.running(wish.name))
        deployment.deploy(new, wish.replicas, _cpus(cluster, wish.replicas))
        say(f"{wish.name}: version {new.version} ({wish.alias}) now answers at {url_of(found['host'], found['port'])}")
        _tell_token(made, say)  # no replica answered that could have told the one of before
    finally:
        ray.shutdown()


def _on_cluster(wish: ServeOptions, new: DeploymentSpec, say: Say) -> None:
    """Deploys on the cluster that this process has joined, where the service stays."""
    try:
        deployment.start(wish.host or HOST, PORT if wish.port is None else wish.port)
        host, port = deployment.address()
        check_same(wish, host, port)
        new, made = _with_token(new, deployment.running(wish.name))
        resources = ray.cluster_resources()
        cluster = Cluster(float(resources.get("CPU", 0)), 0.0)
        deployment.deploy(new, wish.replicas, _cpus(cluster, wish.replicas))
        _tell(wish, new, url_of(host, port), made, say)
        say("it stays on the cluster; the same command puts the model's present version in its place")
    finally:
        ray.shutdown()


def _with_token(new: DeploymentSpec, old: DeploymentSpec | None) -> tuple[DeploymentSpec, str]:
    """With the token's digest: the one given, else that of the service that runs, else of a new token, given too."""
    if new.token_digest:
        return new, ""
    if old is not None:
        return _with_digest(new, old.token_digest), ""
    token = secrets.token_urlsafe(32)
    return _with_digest(new, token_digest(token)), token


def _with_digest(new: DeploymentSpec, digest: str) -> DeploymentSpec:
    return DeploymentSpec(new.name, new.version, new.uri, digest, new.max_body)


def _cpus(cluster: Cluster, replicas: int) -> float:
    """CPUs of a replica: one, or less where twice the replicas, as they run while versions change, would not fit."""
    return min(1.0, int(1000 * cluster.cpus / (2 * replicas)) / 1000)


def _tell(wish: ServeOptions, new: DeploymentSpec, url: str, made: str, say: Say) -> None:
    say(f"{wish.name}: version {new.version} ({wish.alias}) answers at {url}")
    say(f"  POST {url}/predict, GET {url}/schema, /health, /ready, /docs")
    nodes = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]
    say(f"  Ray Serve's metrics: {', '.join(f'http://{node}/metrics' for node in nodes)}")
    _tell_token(made, say)
    if wish.host not in ("", HOST, "localhost", "::1"):
        say("  note: other machines reach it, and requests and token are not encrypted; put TLS in front")


def _tell_token(made: str, say: Say) -> None:
    if made:
        say(f"  bearer token, made for this service: {made}  (or set {TOKEN})")


def check_same(wish: ServeOptions, host: str, port: int) -> None:
    """A service that runs cannot move: UserError when a flag asks for that."""
    if (wish.host and wish.host != host) or (wish.port and wish.port != port):
        raise UserError(f"--host, --port: the service runs at {url_of(host, port)} already; stop it to move it")
