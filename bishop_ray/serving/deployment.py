"""Ray Serve deployment of a registered model, with request batching.

``ray.serve.batch`` does not do this: it fills a batch before the call that is under way has ended, so that without a
wait its batches are single requests, and with one a lone request waits for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.util import get_node_ip_address

from bishop_ray._compat.ray import replica_on_loopback, serve_address
from bishop_ray.errors import SourceUnavailable, UserError
from bishop_ray.registry import load_best
from bishop_ray.serving.app import DeploymentSpec, Reply, Served, build_app
from bishop_ray.serving.schemas import Rows

Q = TypeVar("Q")
A = TypeVar("A")


class RequestBatcher(Generic[Q, A]):
    """One call at a time, in a thread, for all that wait for it.

    Args:
        answer: Answers several requests in their order; what it raises, each of them gets as its answer.
        most: Requests of one call.
    """

    def __init__(self, answer: Callable[[Sequence[Q]], Sequence[A | Exception]], most: int) -> None:
        self._answer, self._most = answer, most
        self._waiting: deque[tuple[Q, asyncio.Future[A | Exception]]] = deque()
        self._work: asyncio.Task[None] | None = None

    async def ask(self, request: Q) -> A | Exception:
        """The answer to one request; at once where nothing is under way. One event loop's coroutines may call this."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[A | Exception] = loop.create_future()
        self._waiting.append((request, future))
        if self._work is None or self._work.done():
            self._work = loop.create_task(self._until_none_waits())
        return await future

    async def _until_none_waits(self) -> None:
        while self._waiting:
            count = min(self._most, len(self._waiting))
            part = [self._waiting.popleft() for _ in range(count)]
            part = [(request, future) for request, future in part if not future.done()]  # whoever asked has gone away
            if not part:
                continue
            answers: Sequence[A | Exception]
            try:
                answers = await asyncio.to_thread(self._answer, [request for request, _ in part])
            except Exception as error:
                answers = [error] * len(part)
            for (_, future), answer in zip(part, answers, strict=True):
                if not future.done():
                    future.set_result(answer)


BATCH = 32
"""Requests that one call of the model answers together, at most."""
MANY = 256
"""A request with more rows than this is no part of a batch: it fills a call by itself."""
RUNNING = "RUNNING"
"""The state of a replica that answers, in `ray.serve.status`."""
ONGOING, WAITING = 128, 1024
"""Requests at a time that a replica works on, and that wait for a replica; further ones are answered 503."""


@serve.deployment(
    name="model",
    max_ongoing_requests=ONGOING,
    max_queued_requests=WAITING,
    max_surge_percent=100,  # new replicas first: the old ones answer until these do
    max_constructor_retry_count=2,
    graceful_shutdown_wait_loop_s=0.5,
)
@serve.ingress()
class ModelServer:
    """A replica: one version of one model.

    Args:
        deployed: Which model, and how it answers.
    """

    def __init__(self, deployed: DeploymentSpec) -> None:
        if get_node_ip_address().startswith("127."):  # its other ports are there too
            replica_on_loopback()
        predictor = load_best(deployed.name, str(deployed.version), deployed.uri)
        self._deployed = deployed
        self._served = Served(predictor, deployed.name, deployed.version)
        self._together = RequestBatcher(self._served.reply, BATCH)
        # The first call costs more than the next ones. A model that cannot do without a value says so when it is asked.
        self._served.reply([[dict.fromkeys((name for name, _ in predictor.schema), None)]])

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The HTTP application of this replica."""
        return build_app(self._served, self._ask, self._deployed.token_digest, self._deployed.max_body)

    def deployed(self) -> DeploymentSpec:
        """What this replica was told; reached through Ray only, not over HTTP."""
        return self._deployed

    async def _ask(self, rows: Rows) -> Reply | Exception:
        if len(rows) > MANY:
            return (await asyncio.to_thread(self._served.reply, [rows]))[0]
        return await self._together.ask(rows)


def app_name(name: str) -> str:
    """The name that Serve knows a model's service by."""
    return f"bishop {name}".replace("#", " ")


def start(host: str, port: int) -> None:
    """Starts Serve's controller and proxy on the Ray of this process, unless they run already."""
    _quiet()
    serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})


def deploy(deployed: DeploymentSpec, replicas: int, cpus: float) -> None:
    """Puts a version into service, in the place of the model's version that is there; returns when it answers.

    Args:
        deployed: The version.
        replicas: Processes that answer.
        cpus: CPUs that each reserves; while versions change, twice the replicas run.

    Raises:
        SourceUnavailable: It could not be started; the earlier version goes on answering.
        UserError: The address belongs to another application of this Serve.
    """
    _quiet()
    server: Any = ModelServer
    app = server.options(num_replicas=replicas, ray_actor_options={"num_cpus": cpus}).bind(deployed)
    try:
        serve.run(app, name=app_name(deployed.name), route_prefix="/")
    except RayServeException as error:
        raise UserError(f"this Ray Serve has another application at '/': {_reason(deployed.name, error)}") from error
    except RuntimeError as error:
        title = f"version {deployed.version} of {deployed.name}"
        others = "; an earlier one goes on" if healthy(deployed.name) else ""
        raise SourceUnavailable(f"{title} did not start{others}: {_reason(deployed.name, error)}") from error


def running(name: str) -> DeploymentSpec | None:
    """What serves a model on this Ray at the moment; None when nothing does.

    Raises:
        SourceUnavailable: It does not say, as when more requests wait than it can take.
    """
    if not healthy(name):
        return None
    handle = serve.get_app_handle(app_name(name))
    try:
        found = handle.deployed.remote().result(timeout_s=60)
    except (TimeoutError, RayServeException, RayError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise SourceUnavailable(f"the service of {name} runs, but does not say its version: {reason}") from error
    return found if isinstance(found, DeploymentSpec) else None


def healthy(name: str) -> bool:
    """Whether a replica answers."""
    application = serve.status().applications.get(app_name(name))
    return application is not None and any(
        count and state == RUNNING  # an enumeration of strings, or plain ones
        for part in application.deployments.values()
        for state, count in part.replica_states.items()
    )


def address() -> tuple[str, int]:
    """Host and port that Serve's proxies listen on."""
    found = serve_address()
    if found is None:
        raise SourceUnavailable("this Ray runs no Ray Serve")
    return found


def stop(name: str) -> None:
    """Takes a service away when its requests are answered."""
    with contextlib.suppress(RayServeException):  # it may have been interrupted before Serve ran
        serve.delete(app_name(name))


def _quiet() -> None:
    """Ray Serve's news stay in its own log files."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)


def _reason(name: str, error: Exception) -> str:
    """Why a deployment failed: the last line of what its replica raised."""
    application = serve.status().applications.get(app_name(name))
    texts = [part.message for part in application.deployments.values()] if application else []
    lines = [line.strip() for text in (str(error), *texts) for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
