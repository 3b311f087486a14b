"""How one trial trains: one loop, two backends. The only Ray Train code.

In-process: the trial's own (reused) actor runs the loop. Ray Train: a `TorchTrainer` inside the trial, for trials of
several workers or whole GPUs; a worker group costs 16-20 s to start, so small trials do without
(https://docs.ray.io/en/latest/train/user-guides/hyperparameter-optimization.html).
"""

from __future__ import annotations

import inspect
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from bishop_ray.config import Params, Resources, TrialConfig
from bishop_ray.data.table import Table, TableSpec
from bishop_ray.errors import TrainingFailed

if TYPE_CHECKING:
    from ray.train import RunConfig

    from bishop_ray.training.loop import EpochResult

DRIVER_CPUS = 0.01
"""What a trial that only waits for its Ray Train workers holds; Tune refuses 0."""
FAILURE = "failure"
STOP_REASON = "stop_reason"
_GROUP_KEY = b"bishop_ray:placement_group:"

# Train's own bookkeeping costs seconds per trial with its defaults; none of it is read here.
TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
}


@dataclass(frozen=True)
class StudyData:
    """The encoded rows a search may see: train and validation. The test rows are in no object of the search.

    Attributes:
        spec: Of both tables.
        train: Training rows.
        validation: Validation rows.
        preprocessor: `Preprocessor.to_dict`, fitted on the training rows.
        target_scale: Units of the target per unit of `Table.y`.
    """

    spec: TableSpec
    train: Table
    validation: Table
    preprocessor: dict[str, Any]
    target_scale: float


@dataclass(frozen=True)
class TrialSettings:
    """What all trials of a study share.

    Attributes:
        model: Registry name.
        metric: Selection metric.
        max_epochs: Epochs per trial.
        seed: Training seed.
        resources: Per trial.
        trainer: "auto", "ray" or "inprocess".
        folder: The study's folder, on storage that all nodes share.
        data: Object reference of the `StudyData`.
    """

    model: str
    metric: str
    max_epochs: int
    seed: int
    resources: Resources
    trainer: str
    folder: str
    data: Any

    @property
    def through_ray_train(self) -> bool:
        """Whether trials run in a Ray Train worker group (layout.md decision 3)."""
        if self.trainer == "auto":
            return self.resources.workers > 1 or self.resources.gpus >= 1
        return self.trainer == "ray"

    def trial(self, params: Params) -> TrialConfig:
        """The full configuration of one training."""
        return TrialConfig.from_params(
            self.model, params, self.resources, metric=self.metric, max_epochs=self.max_epochs, seed=self.seed
        )

    def all_params(self, params: Params) -> dict[str, Any]:
        """Everything that decides a training, defaults included, as ``model.NAME`` and ``train.NAME``."""
        from bishop_ray.models import model_class

        signature = inspect.signature(model_class(self.model).__init__).parameters
        model = {n: p.default for n, p in signature.items() if n not in ("self", "spec")} | params["model"]
        train = asdict(self.trial(params).train)
        return {f"model.{n}": v for n, v in model.items()} | {f"train.{n}": v for n, v in train.items()}


def trial_folder(settings: TrialSettings, number: int) -> Path:
    """Where trial `number` keeps its checkpoint."""
    return Path(settings.folder) / "trials" / f"{number:04d}"


def train_driver(config: dict[str, Any], settings: TrialSettings) -> None:
    """The Tune trainable: trains the point of `config` and reports every epoch.

    A diverged training is reported as a failure with its reason, so that the actor can be reused; anything else that
    goes wrong is an exception and Tune's business.
    """
    job = settings.trial(config["params"])
    checkpoint = trial_folder(settings, config["number"])
    if settings.through_ray_train:
        from ray.train import RunConfig
        from ray.tune.integration.ray_train import TuneReportCallback

        trial_id = ray.tune.get_context().get_trial_id()
        # Ray's own annotation of `callbacks` names the class of an older API.
        callbacks: list[Any] = [TuneReportCallback()]
        run = RunConfig(name=trial_id, storage_path=str(Path(settings.folder) / "train"), callbacks=callbacks)
        _fit_trainer(job, settings.data, checkpoint, run)
        return

    def report(result: EpochResult) -> bool:
        ray.tune.report(_reported(result))
        return False

    try:
        train_here(job, ray.get(settings.data), checkpoint, report)
    except TrainingFailed as error:
        ray.tune.report({FAILURE: str(error)})


def _reported(result: EpochResult) -> dict[str, Any]:
    import torch.distributed as dist

    workers = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
    return {**result.metrics(), "workers": workers, "epoch": result.epoch, STOP_REASON: result.stop_reason}


def train_here(
    job: TrialConfig,
    data: StudyData,
    checkpoint: Path,
    on_epoch: Callable[[EpochResult], bool],
    save_to: Path | None = None,
) -> None:
    """Trains in this process; with several Ray Train workers each calls it.

    Args:
        job: What to train.
        data: Train and validation rows.
        checkpoint: Folder of the full checkpoint; training goes on from it when it exists.
        on_epoch: Called after each epoch; True asks for a stop.
        save_to: Folder for the trained `Predictor` (rank 0 writes it), or None.
    """
    import torch

    from bishop_ray.data.preprocess import Preprocessor
    from bishop_ray.models import create_model
    from bishop_ray.models.base import Network
    from bishop_ray.predictor import Predictor
    from bishop_ray.training.loop import fit_network

    torch.set_num_threads(max(1, int(job.resources.cpus)))
    torch.manual_seed(job.train.seed)
    model = create_model(job.model, data.spec, job.params["model"])
    assert isinstance(model, Network)  # estimators arrive with the baselines
    fitted = fit_network(
        model,
        data.train,
        data.validation,
        job.train,
        on_epoch,
        resume_from=checkpoint,
        checkpoint_to=checkpoint,
        identity={"model": job.model, "params": job.params["model"]},
        target_scale=data.target_scale,
    )
    if save_to is not None and _rank() == 0:
        info = {"seed": job.train.seed, STOP_REASON: fitted.last.stop_reason, "epochs": fitted.last.epoch}
        preprocessor = Preprocessor.from_dict(data.preprocessor)
        Predictor(preprocessor, model.cpu(), job.model, job.params["model"], info).save(save_to)


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _fit_trainer(
    job: TrialConfig, data: Any, checkpoint: Path, run: RunConfig, save_to: Path | None = None, deadline: float = 0.0
) -> None:
    """Trains `job` in a Ray Train worker group and waits for it."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    # The trial around this worker group holds DRIVER_CPUS: without the subtraction one trial fewer would fit.
    held = DRIVER_CPUS / job.resources.workers if run.callbacks else 0.0
    resources: dict[str, float] = {"CPU": job.resources.cpus - held}
    if job.resources.gpus:
        resources["GPU"] = job.resources.gpus
    config = {"job": job, "data": data, "checkpoint": checkpoint, "save_to": save_to, "deadline": deadline}
    config["name"] = run.name
    TorchTrainer(
        _train_worker,
        train_loop_config=config,
        scaling_config=ScalingConfig(
            num_workers=job.resources.workers, use_gpu=job.resources.gpus > 0, resources_per_worker=resources
        ),
        run_config=run,
    ).fit()


def _train_worker(config: dict[str, Any]) -> None:
    """What each Ray Train worker runs."""
    import torch
    from ray import train

    _remember_group(config["name"])
    if torch.cuda.is_available():
        from ray.train.torch import get_device

        torch.cuda.set_device(get_device())

    def report(result: EpochResult) -> bool:
        train.report(_reported(result))
        return _overdue(config["deadline"])

    train_here(config["job"], ray.get(config["data"]), config["checkpoint"], report, config["save_to"])


def _overdue(deadline: float) -> bool:
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


def evaluate_seed(settings: TrialSettings, number: int, params: Params, seed: int, deadline: float) -> str:
    """Trains the winning parameters once more with `seed`.

    Args:
        settings: The study's settings.
        number: The winning trial.
        params: Its parameters.
        seed: Training seed.
        deadline: Unix time after which training stops at the next epoch, 0 for none.

    Returns:
        The folder of the trained `Predictor`.
    """
    job = settings.trial(params)
    job = replace(job, train=replace(job.train, seed=seed))
    folder = Path(settings.folder) / "final" / f"{number:04d}-seed-{seed}"
    predictor, checkpoint = folder / "predictor", folder / "checkpoint"
    if _whole(predictor):
        return str(predictor)
    if settings.through_ray_train:
        from ray.train import RunConfig

        run = RunConfig(name=f"final-{os.getpid()}-{number}-{seed}", storage_path=str(Path(settings.folder) / "train"))
        _fit_trainer(job, settings.data, checkpoint, run, predictor, deadline)
    else:
        train_here(job, ray.get(settings.data), checkpoint, lambda _: _overdue(deadline), predictor)
    if _whole(predictor):
        shutil.rmtree(checkpoint, ignore_errors=True)
    return str(predictor)


def _whole(folder: Path) -> bool:
    """Whether a training ended by itself there; one that a deadline cut short goes on when it is asked for again."""
    from bishop_ray.predictor import MANIFEST, Predictor

    return (folder / MANIFEST).is_file() and Predictor.load(folder).info.get(STOP_REASON) != "stopped"
