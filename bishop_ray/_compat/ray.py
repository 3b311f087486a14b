"""Private parts of Ray: Core, Tune, Train and Serve."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator
from typing import Any

VERIFIED = "2.60.0"
"""The version that all of this was read and tried in; ``pyproject.toml`` allows its minor series alone."""
_NOWHERE = dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")
"""The discard port of this machine, as the proxy of a process that has nothing to ask of others."""
UNUSED = ("DatasetsCallback", "PlacementGroupCleanerCallback")
"""Parts of Ray Train that start a process each per training: for Ray Data, and for what `release_group` does."""
_GROUP_KEY = b"bishop_ray:placement_group:"


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """A Ray that is started within listens on 127.0.0.1 only, all of its processes, and calls nobody.

    By itself it listens on every interface, guarded by its token alone, and replaces a loopback address that it is
    given by the machine's own (`ray._private.services.resolve_ip_for_localhost`). It stays on loopback where it holds
    clusters to be impossible, as on macOS and Windows: that is what this tells it, in this process and for the start.

    Its dashboard's process, started without a dashboard too, asks the metadata addresses of cloud providers where it
    is, for a usage report that is switched off (`ray._common.usage.usage_lib.get_cloud_from_metadata_requests`). That
    process alone is given a proxy that is not there; on loopback it uses none.

    Seen in Ray 2.60.0.
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


def reread_access() -> None:
    """Has Ray read its variables, the token among them, from the environment again.

    It reads them when it is imported, and has no public way to join another cluster with another token later. Seen in
    Ray 2.60.0.
    """
    raylet: Any = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def available_by_node() -> dict[str, dict[str, float]]:
    """What is free on each node, by its id.

    The public `ray.available_resources` adds up all nodes, and the State API needs a dashboard. Seen in Ray 2.60.0.
    """
    from ray._private import state

    found: dict[str, dict[str, float]] = state.available_resources_per_node()
    return found


def keep_out_of_logs() -> None:
    """Tells Ray Tune not to hand credentials of a cloud to trials as settings, which every node logs in plain text.

    Tune copies them from this process's environment (`ray.tune.execution.class_cache`). Trials need no copy: a Ray of
    its own inherits the environment, and the nodes of a cluster have roles or credentials of their own. Seen in Ray
    2.60.0.
    """
    from ray.tune.execution import class_cache

    names = class_cache.ENV_VARS_TO_PROPAGATE
    class_cache.ENV_VARS_TO_PROPAGATE = {name for name in names if not re.search("KEY|TOKEN|SECRET|PASSWORD", name)}


class TuneProcesses:
    """The processes of a search's trials, which the controller has that Tune hands to schedulers.

    Schedulers have no public way to end a process, to fail a trial that hangs, or to see whether a trial waits for
    resources or starts. What they are handed is a wrapper that warns of every name but a few
    (`ray.tune.execution.tune_controller.TrialRunnerWrapper`). Seen in Ray 2.60.0.

    Args:
        wrapper: The argument of a scheduler's methods.
    """

    def __init__(self, wrapper: Any) -> None:
        self._controller = wrapper._tune_controller

    def end(self) -> None:
        """Ends all of them at once and gives their resources back."""
        self._controller._actor_manager.cleanup()

    def fail(self, trial: Any, reason: str) -> None:
        """Fails a trial as if it had raised `reason`: its process is ended, callbacks hear of it."""
        from ray.tune import TuneError

        self._controller._process_trial_failure(trial, TuneError(reason))

    def starting(self, trials: list[Any]) -> list[Any]:
        """Those of `trials` whose process has its resources and is being started."""
        processes, manager = self._controller._trial_to_actor, self._controller._actor_manager
        return [t for t in trials if t in processes and manager.is_actor_started(processes[t])]

    def let_wait(self, count: int) -> None:
        """Lets so many trials wait for a process at a time."""
        self._controller.update_max_pending_trials(count)


def forget_averages(trial: Any) -> None:
    """Frees the averages that Tune keeps of every metric of every trial: most of what a driver would grow by.

    Its `Trial` has them in a record of its own and offers no way to be rid of them. Seen in Ray 2.60.0.
    """
    metadata = trial.run_metadata
    metadata.metric_analysis.clear()
    metadata.metric_n_steps.clear()
    metadata.invalidate_cache()


def lean_trainer() -> Any:
    """Ray Train's `TorchTrainer` without what costs a process per training and is not used here.

    It offers no choice of its default callbacks, nor of its signal handler. Seen in Ray 2.60.0.
    https://docs.ray.io/en/latest/train/api/doc/ray.train.torch.TorchTrainer.html
    """
    from ray.train.torch import TorchTrainer

    class Trainer(TorchTrainer):
        """Leaves Ctrl-C as it is. Ray's own handler ends the process with exit code 0, and stays after the training."""

        controller: Any = None

        def _create_default_callbacks(self) -> list[Any]:
            parts = super()._create_default_callbacks()  # type: ignore[misc]
            return [part for part in parts if type(part).__name__ not in UNUSED]

        def _register_sigint_handler(self, controller: Any) -> None:
            self.controller = controller

    return Trainer


def remember_group(name: str) -> None:
    """Leaves the id of this worker's placement group where the driver of the study finds it, see `release_group`.

    Ray's own store of short values has no public face. Seen in Ray 2.60.0.

    Args:
        name: Of the Ray Train run.
    """
    import ray
    from ray.experimental import internal_kv

    group = ray.util.get_current_placement_group()
    if group is not None:
        internal_kv._internal_kv_put(_GROUP_KEY + name.encode(), group.id.hex().encode())


def release_group(name: str) -> None:
    """Gives back the resources of a stopped trial's worker group.

    Stopping a trial kills the controller of its Ray Train run, whose placement group then stays reserved unless Ray's
    State API answers, which it does not without a dashboard. Removing a group twice is harmless. Seen in Ray 2.60.0.

    Args:
        name: Of the Ray Train run.
    """
    import ray
    from ray.experimental import internal_kv
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    key = _GROUP_KEY + name.encode()
    group = internal_kv._internal_kv_get(key)
    if group:
        remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group.decode()))))
        internal_kv._internal_kv_del(key)


def replica_on_loopback() -> None:
    """Keeps the port on which a replica of Ray Serve hears other deployments on 127.0.0.1.

    Serve opens it on every interface, guarded by Ray's token alone (`ray.serve._private.replica`); nobody uses it while
    Serve's own calls are no gRPC, which is its default. Seen in Ray 2.60.0.
    """
    replica: Any = importlib.import_module("ray.serve._private.replica")
    opened = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: opened(server, "127.0.0.1:0")


def serve_address() -> tuple[str, int] | None:
    """Host and port that Ray Serve's proxies were told to listen on; None where no Serve runs.

    `ray.serve.status` does not name them, and the details that do need a dashboard. Seen in Ray 2.60.0.
    """
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    if client is None:
        return None
    options = client.http_config
    return str(options.host), int(options.port)


def next_rung(scheduler: Any, trial_id: str, epoch: int) -> tuple[int, int, float | None] | None:
    """The rung at which Tune's ASHA compares a trial's report of `epoch`, None for a report that it passes by.

    Tune keeps a trial's bracket and its rungs to itself. Seen in Ray 2.60.0.

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
