"""Ray Train worker groups, for trials of several workers or whole GPUs.

https://docs.ray.io/en/latest/train/user-guides/hyperparameter-optimization.html
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from bishop_ray._compat.ray import lean_trainer, release_group, remember_group
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


def _train_worker(config: dict[str, Any]) -> None:
    """What each Ray Train worker runs."""
    import torch
    from ray import train

    remember_group(config["name"])
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
