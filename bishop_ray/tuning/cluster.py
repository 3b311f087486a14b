"""Where trials run: joining or starting Ray, and how many trials fit."""

from __future__ import annotations

import logging
import math
import os
import secrets
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from bishop_ray.config import Resources
from bishop_ray.errors import SourceUnavailable, UserError

# Read by Ray when it is imported or started: our own table and records replace Tune's printers and loggers.
QUIET = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
}


@dataclass(frozen=True)
class Cluster:
    """What there is: CPUs and GPUs in all, and on the largest node (0: one node has them all)."""

    cpus: float
    gpus: float
    node_cpus: float = 0.0
    node_gpus: float = 0.0


def connect(address: str = "") -> Cluster:
    """Joins the cluster of `address` or ``RAY_ADDRESS`` (set inside a Ray job); else starts Ray in this process.

    Raises:
        SourceUnavailable: No cluster answers at the address.
    """
    from bishop_ray.training.groups import TRAIN_ENVIRONMENT

    for name, value in (QUIET | TRAIN_ENVIRONMENT).items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    import ray

    target = address or os.environ.get("RAY_ADDRESS", "")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    options["runtime_env"] = {"env_vars": {**TRAIN_ENVIRONMENT, **_import_path()}}
    if not ray.is_initialized():
        try:
            if target:
                ray.init(address=target, **options)
            else:
                _own_token()
                ray.init(address="local", include_dashboard=False, **options)
        except (ConnectionError, ValueError) as error:
            reason = (str(error).splitlines() or [""])[0]
            expected = "expected HOST:PORT, ray://HOST:PORT or auto"
            raise SourceUnavailable(f"no Ray cluster answers at {target!r} ({expected}): {reason}") from None
    logging.getLogger("ray").setLevel(logging.ERROR)
    total = ray.cluster_resources()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    largest = {name: max((float(node.get(name, 0)) for node in nodes), default=0.0) for name in ("CPU", "GPU")}
    return Cluster(float(total.get("CPU", 0)), float(total.get("GPU", 0)), largest["CPU"], largest["GPU"])


def _own_token() -> None:
    """Gives the Ray of this process a token of its own.

    Ray would write one to ``~/.ray/auth_token``, which changes how every later ``ray start`` of this user behaves.
    """
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    if "RAY_AUTH_MODE" not in os.environ and "RAY_AUTH_TOKEN" not in os.environ and not path.exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _import_path() -> dict[str, str]:
    """Lets workers import this package where it is not installed: from a clone that was started by path.

    Inside a Ray job the job's own environment does that, on every node.
    """
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ or _installed():
        return {}
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _installed() -> bool:
    try:
        metadata.version("bishop-ray")
    except metadata.PackageNotFoundError:
        return False
    return True


def trial_resources(cluster: Cluster, cpus: float | None, gpus: float | None, workers: int) -> Resources:
    """Resources of a trial: as asked, else one CPU, and a quarter of a GPU where there are any.

    A quarter, since BiSHop's many small kernels do not fill a card; half where a card has fewer than four CPUs.

    Raises:
        UserError: The cluster can never give it; names what was asked and what there is.
    """
    if gpus is None:
        gpus = (0.25 if cluster.cpus / cluster.gpus >= 4 else 0.5) if cluster.gpus else 0.0
        gpus = gpus if workers == 1 else float(bool(cluster.gpus))
    resources = Resources(1.0 if cpus is None else cpus, gpus, workers)
    for what, asked, there in (
        ("CPUs", resources.cpus * workers, cluster.cpus),
        ("GPUs", resources.gpus * workers, cluster.gpus),
    ):
        if asked > there:
            raise UserError(f"a trial asks for {asked:g} {what} ({workers} worker(s)); the cluster has {there:g}")
    for what, asked, there in (
        ("CPUs", resources.cpus, cluster.node_cpus or cluster.cpus),
        ("GPUs", resources.gpus, cluster.node_gpus or cluster.gpus),
    ):
        if asked > there:
            raise UserError(f"a worker asks for {asked:g} {what}; the largest node has {there:g}")
    return resources


def concurrency(cluster: Cluster, resources: Resources, asked: int | None) -> int:
    """Trials at a time: as many as fit, at most what was asked."""
    fits = math.floor(cluster.cpus / (resources.cpus * resources.workers) + 1e-9)
    if resources.gpus:
        per_gpu = 1 / resources.gpus if resources.gpus < 1 else 0
        on_gpus = cluster.gpus * math.floor(per_gpu + 1e-9) if per_gpu else cluster.gpus // resources.gpus
        fits = min(fits, int(on_gpus // resources.workers))
    return max(1, min(fits, asked or fits))


def slot_kind(resources: Resources) -> str:
    """The kind of slot a trial takes: "gpu" or "cpu"."""
    return "gpu" if resources.gpus else "cpu"


def shared_slots(cluster: Cluster, wanted: Iterable[Resources], asked: int | None) -> dict[str, int]:
    """Trials at a time by kind of slot, when trials on GPUs and on CPUs run side by side.

    Trials on GPUs come first, since they are the scarcer kind, but leave room for one trial on CPUs.

    Args:
        cluster: What there is.
        wanted: What trials hold, one entry per kind at least.
        asked: Trials at a time that were asked for, of both kinds together.
    """
    kinds: dict[str, Resources] = {}
    for resources in wanted:  # of each kind the largest: models trained by several workers share slots with others
        held = kinds.setdefault(kind := slot_kind(resources), resources)
        if concurrency(cluster, resources, None) < concurrency(cluster, held, None):
            kinds[kind] = resources
    if len(kinds) == 1:
        return {kind: concurrency(cluster, resources, asked) for kind, resources in kinds.items()}
    on_gpu, on_cpu = kinds["gpu"], kinds["cpu"]
    by_gpu, by_cpu = on_gpu.cpus * on_gpu.workers, on_cpu.cpus * on_cpu.workers
    room = max(1, math.floor((cluster.cpus - by_cpu) / by_gpu + 1e-9))
    gpus = min(concurrency(cluster, on_gpu, None), room)
    cpus = max(1, math.floor((cluster.cpus - gpus * by_gpu) / by_cpu + 1e-9))
    if asked:
        gpus = max(1, min(gpus, asked - 1))
        cpus = max(1, min(cpus, asked - gpus))
    return {"gpu": gpus, "cpu": cpus}
