"""Ray cluster: joining or starting it, its slots, its shared storage folder."""

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

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

from bishop_ray._compat.ray import on_loopback
from bishop_ray.config import Resources
from bishop_ray.errors import SourceUnavailable, UserError
from bishop_ray.search.placement import PROCESS, SMALLEST_SHARE, Node, ResourceRequest, memory_class
from bishop_ray.training.system import smallest_gpu

SECONDS = 30.0
"""How long a node may take to answer; one that is busy is taken for good."""


def check_shared(storage: Path) -> None:
    """Leaves a file in `storage` and looks for it from every other node.

    Raises:
        UserError: A node does not see it, or the folder cannot be written; names node and folder.
    """
    here = ray.get_runtime_context().get_node_id()
    others = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    others.pop(here, None)
    if not others:
        return
    mark = storage / f".seen-{secrets.token_hex(8)}"
    try:
        storage.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise UserError(f"--storage: cannot write {storage}: {error.strerror or error}") from None
    try:
        look = ray.remote(num_cpus=0, max_retries=0)(_is_file)
        asked = {look.options(scheduling_strategy=On(node, soft=False)).remote(str(mark)): node for node in others}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=SECONDS)
        for call in answered:
            if not ray.get(call):
                raise UserError(
                    f"--storage: {storage} is not shared: node {others[asked[call]]} does not see what is written "
                    "here; expected a folder that every node mounts at this path"
                )
    finally:
        mark.unlink(missing_ok=True)


def _is_file(path: str) -> bool:
    return Path(path).is_file()


# Read by Ray when it is imported or started: our own table and records replace Tune's printers and loggers.
QUIET = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_FORCE_TRIAL_CLEANUP_S": "10",  # a process that does not end when it should is killed
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
}
GPU_SECONDS = 30.0
"""How long a node may take to tell how large its GPUs are."""


@dataclass(frozen=True)
class Cluster:
    """What there is: CPUs and GPUs in all, on the largest node (0: one node has them all), and by node (if known)."""

    cpus: float
    gpus: float
    node_cpus: float = 0.0
    node_gpus: float = 0.0
    nodes: tuple[Node, ...] = ()


def connect(address: str = "") -> Cluster:
    """Joins the cluster of `address` or ``RAY_ADDRESS`` (set inside a Ray job); else starts Ray in this process.

    Raises:
        SourceUnavailable: No cluster answers at the address.
    """
    from bishop_ray.training.ray_train import TRAIN_ENVIRONMENT

    for name, value in (QUIET | TRAIN_ENVIRONMENT).items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    import ray

    target = address or os.environ.get("RAY_ADDRESS", "")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    if not ray.is_initialized():
        try:
            if target:
                ray.init(address=target, runtime_env={"env_vars": TRAIN_ENVIRONMENT | _import_path()}, **options)
            else:
                _own_token()
                # Processes of an own Ray inherit the environment. A runtime environment in its place would have the
                # trials start in new processes, beside the idle ones that Ray has waiting: seconds on few cores.
                os.environ.update(_import_path())
                os.environ.setdefault("RAY_preload_python_modules", "torch,ray.tune")  # in the waiting processes
                with on_loopback():
                    ray.init(address="local", include_dashboard=False, **options)
        except (ConnectionError, ValueError) as error:
            reason = (str(error).splitlines() or [""])[0]
            expected = "expected HOST:PORT, ray://HOST:PORT or auto"
            raise SourceUnavailable(f"no Ray cluster answers at {target!r} ({expected}): {reason}") from None
    logging.getLogger("ray").setLevel(logging.ERROR)
    total = ray.cluster_resources()
    nodes = cluster_nodes()
    cpus, gpus = max((n.cpus for n in nodes), default=0.0), max((n.gpus for n in nodes), default=0.0)
    return Cluster(float(total.get("CPU", 0)), float(total.get("GPU", 0)), cpus, gpus, nodes)


_gpu_memory: dict[str, int] = {}
"""Bytes of a node's smallest GPU, by the node's id in its cluster: asked once."""


def cluster_nodes() -> tuple[Node, ...]:
    """The nodes of the cluster that this process has joined; each one with GPUs is asked once how large they are."""
    import ray

    alive = [(node["NodeID"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    unknown = [name for name, has in alive if has.get("GPU") and name not in _gpu_memory]
    _gpu_memory.update(zip(unknown, _ask_gpus(unknown), strict=True))
    return tuple(
        Node(float(has.get("CPU", 0)), float(has.get("GPU", 0)), int(has.get("memory", 0)), _gpu_memory.get(name, 0))
        for name, has in alive
    )


def _ask_gpus(nodes: list[str]) -> list[int]:
    """Bytes of the smallest GPU of each node; 0 where none answers in time, as when others hold all of it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    if not nodes:
        return []
    task = ray.remote(smallest_gpu)
    asked = [
        task.options(num_cpus=0, num_gpus=0.01, max_retries=0, scheduling_strategy=On(node, soft=False)).remote()
        for node in nodes
    ]
    answered, silent = ray.wait(asked, num_returns=len(asked), timeout=GPU_SECONDS)
    for call in silent:
        ray.cancel(call, force=True)
    return [int(ray.get(call)) if call in answered else 0 for call in asked]


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


def trial_resources(
    cluster: Cluster, cpus: float | None, gpus: float | None, workers: int, pack: bool = True
) -> Resources:
    """Resources of a trial: as asked, else one CPU, and the least share of a GPU where there are any.

    Args:
        cluster: What there is.
        cpus: CPUs of a worker that the user asks for.
        gpus: GPUs of a worker that the user asks for; 0 where the model has no use for them.
        workers: Of a trial.
        pack: What the user left open may follow from each trial's predicted memory (never with several workers).

    Raises:
        UserError: The cluster can never give it; names what was asked and what there is.
    """
    packed = pack and workers == 1 and bool(cluster.nodes)
    if gpus is None and cluster.gpus:
        packed = packed and any(node.gpu_memory for node in cluster.nodes)
        gpus = _gpu_share(cluster, 1.0 if cpus is None else cpus, packed) if workers == 1 else 1.0
    else:
        packed = packed and not gpus and cpus is None
    resources = Resources(1.0 if cpus is None else cpus, gpus or 0.0, workers, packed)
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


def _gpu_share(cluster: Cluster, cpus: float, packed: bool) -> float:
    """Share of a GPU that a trial gets at least: the smallest one for which there are CPUs.

    Without `packed` a quarter, since BiSHop's many small kernels do not fill a card; half where a card has fewer than
    four CPUs.
    """
    per_gpu = cluster.cpus / cluster.gpus
    if not packed:
        return 0.25 if per_gpu >= 4 else 0.5
    return next((share for share in (SMALLEST_SHARE, 0.25) if share * per_gpu >= cpus), 0.5)


def concurrency(cluster: Cluster, resources: Resources, asked: int | None) -> int:
    """Trials at a time: as many as fit, at most what was asked.

    On CPUs memory counts too: each trial has its share of a node, and the least one holds a process.
    """
    fits = math.floor(cluster.cpus / (resources.cpus * resources.workers) + 1e-9)
    if resources.gpus:
        per_gpu = 1 / resources.gpus if resources.gpus < 1 else 0
        on_gpus = cluster.gpus * math.floor(per_gpu + 1e-9) if per_gpu else cluster.gpus // resources.gpus
        fits = min(fits, int(on_gpus // resources.workers))
    elif resources.packed:
        least = ResourceRequest(resources.cpus, 0.0, memory_class(PROCESS, cluster.nodes, resources.cpus))
        fits = min(fits, least.at_a_time(cluster.nodes))
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
