"""Private parts of Ray: a cluster bound to loopback, secrets kept out of its logs, the rungs of its ASHA."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

_NOWHERE = dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")
"""The discard port of this machine, as the proxy of a process that has nothing to ask of others."""


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """A Ray that is started within listens on 127.0.0.1 only, all of its processes, and calls nobody.

    By itself it listens on every interface, guarded by its token alone, and replaces a loopback address that it is
    given by the machine's own (`ray._private.services.resolve_ip_for_localhost`). It stays on loopback where it holds
    clusters to be impossible, as on macOS and Windows: that is what this tells it, in this process and for the start.

    Its dashboard's process, started without a dashboard too, asks the metadata addresses of cloud providers where it
    is, for a usage report that is switched off (`ray._common.usage.usage_lib.get_cloud_from_metadata_requests`). That
    process alone is given a proxy that is not there; on loopback it uses none.
    """
    from ray._private import ray_constants, services

    start = services.start_ray_process

    def alone(command: list[str], process_type: str, *args: Any, **more: Any) -> Any:
        if process_type == ray_constants.PROCESS_TYPE_DASHBOARD:
            own = {"no_proxy": "127.0.0.1,localhost", "NO_PROXY": "127.0.0.1,localhost"}
            more["env_updates"] = {**(more.get("env_updates") or {}), **_NOWHERE, **own}
        return start(command, process_type, *args, **more)

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    services.start_ray_process = alone
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        services.start_ray_process = start


def keep_out_of_logs() -> None:
    """Tells Ray Tune not to hand credentials of a cloud to trials as settings, which every node logs in plain text.

    Tune copies them from this process's environment (`ray.tune.execution.class_cache`). Trials need no copy: a Ray of
    its own inherits the environment, and the nodes of a cluster have roles or credentials of their own.
    """
    from ray.tune.execution import class_cache

    names = class_cache.ENV_VARS_TO_PROPAGATE
    class_cache.ENV_VARS_TO_PROPAGATE = {name for name in names if not re.search("KEY|TOKEN|SECRET|PASSWORD", name)}


def next_rung(scheduler: Any, trial_id: str, epoch: int) -> tuple[int, int, float | None] | None:
    """The rung at which Tune's ASHA compares a trial's report of `epoch`, None for a report that it passes by.

    Args:
        scheduler: An `AsyncHyperBandScheduler`, before it is told of the report.
        trial_id: The trial, which the scheduler knows.
        epoch: Of the report.

    Returns:
        The rung's index (0 for the first), its epoch, and its cut-off (None while it has no score).
    """
    bracket = scheduler._trial_info[trial_id]
    for from_last, (milestone, scores) in enumerate(bracket._rungs):
        if epoch >= milestone and trial_id not in scores:
            cutoff = bracket.cutoff(scores)
            return len(bracket._rungs) - 1 - from_last, int(milestone), None if cutoff is None else float(cutoff)
    return None
