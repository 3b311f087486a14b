"""The life of a service: started on a Ray of its own or a cluster, replaced while it answers, stopped.

A service on a Ray of its own belongs to the process that started it, which holds a lock in ``serving/`` of this user's
folder and leaves there, readable by this user alone, where its Ray is. The same command in another process finds that
and puts the model's present version in the place of the one that answers.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ray
from filelock import FileLock, Timeout

from bishop_ray.errors import UserError
from bishop_ray.home import home
from bishop_ray.serving import deployment
from bishop_ray.serving.app import token_digest
from bishop_ray.serving.place import enter, free_port, ray_access, read_note, url_of, write_note
from bishop_ray.serving.served import Deployed
from bishop_ray.tracking import find_version, load_best, tracking_uri
from bishop_ray.tracking.names import safe_file_name
from bishop_ray.tuning.cluster import Cluster, connect
from bishop_ray.tuning.loopback import on_loopback

TOKEN = "BISHOP_SERVE_TOKEN"  # noqa: S105  the name of a variable
SHORTEST_TOKEN = 16
HOST, PORT = "127.0.0.1", 8000
Say = Callable[[str], None]


@dataclass(frozen=True)
class Wish:
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


def serve_model(wish: Wish, say: Say, catch_signals: Callable[[], None] = lambda: None) -> None:
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
    new = Deployed(wish.name, version, uri, token_digest(token) if token else "", wish.max_body)
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


def _own(wish: Wish, new: Deployed, note: Path, say: Say, catch_signals: Callable[[], None]) -> None:
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


def _replace(wish: Wish, new: Deployed, note: Path, say: Say) -> None:
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


def _on_cluster(wish: Wish, new: Deployed, say: Say) -> None:
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


def _with_token(new: Deployed, old: Deployed | None) -> tuple[Deployed, str]:
    """With the token's digest: the one given, else that of the service that runs, else of a new token, given too."""
    if new.token_digest:
        return new, ""
    if old is not None:
        return _with_digest(new, old.token_digest), ""
    token = secrets.token_urlsafe(32)
    return _with_digest(new, token_digest(token)), token


def _with_digest(new: Deployed, digest: str) -> Deployed:
    return Deployed(new.name, new.version, new.uri, digest, new.max_body)


def _cpus(cluster: Cluster, replicas: int) -> float:
    """CPUs of a replica: one, or less where twice the replicas, as they run while versions change, would not fit."""
    return min(1.0, int(1000 * cluster.cpus / (2 * replicas)) / 1000)


def _tell(wish: Wish, new: Deployed, url: str, made: str, say: Say) -> None:
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


def check_same(wish: Wish, host: str, port: int) -> None:
    """A service that runs cannot move: UserError when a flag asks for that."""
    if (wish.host and wish.host != host) or (wish.port and wish.port != port):
        raise UserError(f"--host, --port: the service runs at {url_of(host, port)} already; stop it to move it")
