"""Ray Train worker groups, for trials of several workers or whole GPUs.

https://docs.ray.io/en/latest/train/user-guides/hyperparameter-optimization.html
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from bishop_ray.config import TrialConfig
from bishop_ray.errors import TrainingFailed
from bishop_ray.paths import write_whole
from bishop_ray.training.job import STOP_REASON, ReportCallback, train_here
from bishop_ray.training.system import peaks

if TYPE_CHECKING:
    from ray.train import FailureConfig, RunConfig


TIME_LIMIT = "time limit"
"""Stop reason of a training that ended at its own deadline, with everything it had reached."""
DRIVER_CPUS = 0.01
"""What a trial that only waits for its Ray Train workers holds; Tune refuses 0."""
ABORT_SECONDS = 10.0
"""How long an interrupted worker group may take to end."""
RESTARTS = 3
"""How often a trial goes on from its checkpoint after the death of a process; lost spot nodes are not counted."""
FAILED = "failed.txt"
"""In a training's checkpoint folder: why it cannot go on."""
UNUSED = ("DatasetsCallback", "PlacementGroupCleanerCallback")
"""Parts of Ray Train that start a process each per training: for Ray Data, and for what `release_group` does."""
_GROUP_KEY = b"bishop_ray:placement_group:"
# Train's own bookkeeping costs seconds per trial with its defaults; none of it is read here.
TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
}


def reported(result: ReportCallback, late: bool) -> dict[str, Any]:
    """One report as Tune gets it.

    Args:
        result: The epoch or chunk.
        late: The training is asked to stop after it, because its time is over.
    """
    import torch.distributed as dist

    workers = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
    reason = result.stop_reason
    if reason == "stopped" or (late and not reason):
        reason = TIME_LIMIT
    return {**result.metrics(), **peaks(), "workers": workers, "epoch": result.epoch, STOP_REASON: reason}


def fit_trainer(
    job: TrialConfig, data: Any, checkpoint: Path, run: RunConfig, save_to: Path | None = None, deadline: float = 0.0
) -> None:
    """Trains `job` in a Ray Train worker group and waits for it; arguments as `train_here`.

    Raises:
        TrainingFailed: The training cannot go on.
        TrainingFailedError: Ray Train's: workers died, or raised something else, again and again.
    """
    from ray.exceptions import GetTimeoutError, RayActorError
    from ray.train import ScalingConfig

    # The trial around this worker group holds DRIVER_CPUS: without the subtraction one trial fewer would fit.
    held = DRIVER_CPUS / job.resources.workers if run.callbacks else 0.0
    resources: dict[str, float] = {"CPU": job.resources.cpus - held}
    if job.resources.gpus:
        resources["GPU"] = job.resources.gpus
    config = {"job": job, "data": data, "checkpoint": checkpoint, "save_to": save_to, "deadline": deadline}
    config["name"] = run.name
    trainer = lean_trainer()(
        _train_worker,
        train_loop_config=config,
        scaling_config=ScalingConfig(
            num_workers=job.resources.workers, use_gpu=job.resources.gpus > 0, resources_per_worker=resources
        ),
        run_config=run,
    )
    try:
        trainer.fit()
    except KeyboardInterrupt:
        if trainer.controller is not None:
            with suppress(RayActorError, GetTimeoutError):  # it ends itself, without an answer
                ray.get(trainer.controller.abort.remote(), timeout=ABORT_SECONDS)
        raise
    finally:
        release_group(run.name or "")
    note = checkpoint / FAILED
    if note.is_file():
        reason = note.read_text("utf-8")
        note.unlink()
        raise TrainingFailed(reason)


def lean_trainer() -> Any:
    """Ray Train's `TorchTrainer` without what costs a process per training and is not used here.

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


def _train_worker(config: dict[str, Any]) -> None:
    """What each Ray Train worker runs."""
    import torch
    from ray import train

    _remember_group(config["name"])
    if torch.cuda.is_available():
        from ray.train.torch import get_device

        torch.cuda.set_device(get_device())

    def report(result: ReportCallback) -> bool:
        late = overdue(config["deadline"])
        train.report(reported(result, late))
        return late

    try:
        train_here(config["job"], ray.get(config["data"]), config["checkpoint"], report, config["save_to"])
    except TrainingFailed as error:
        # All workers come here together. Ray Train would start the group again, to fail the same way.
        if train.get_context().get_world_rank() == 0:
            write_whole(config["checkpoint"] / FAILED, str(error))


def restarts() -> FailureConfig:
    """What Ray Train does about workers that die: they go on from the checkpoint."""
    from ray.train import FailureConfig

    return FailureConfig(max_failures=RESTARTS)


def overdue(deadline: float) -> bool:
    """Whether a Unix time has passed; 0 never has."""
    return bool(deadline) and time.time() > deadline


def _remember_group(name: str) -> None:
    """Leaves the id of this worker's placement group where the driver of the study finds it."""
    group = ray.util.get_current_placement_group()
    if group is not None:
        ray.experimental.internal_kv._internal_kv_put(_GROUP_KEY + name.encode(), group.id.hex().encode())


def release_group(name: str) -> None:
    """Gives back the resources of a stopped trial's worker group.

    Stopping a trial kills the controller of its Ray Train run, whose placement group then stays reserved unless Ray's
    State API answers, which it does not without a dashboard. Removing a group twice is harmless.
    """
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    key = _GROUP_KEY + name.encode()
    group = ray.experimental.internal_kv._internal_kv_get(key)
    if group:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group.decode()))))
        ray.experimental.internal_kv._internal_kv_del(key)
