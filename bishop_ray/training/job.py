"""One training in this process: its settings, shared data and result; no Ray, no MLflow."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from bishop_ray.config import Params, Resources, StudyConfig, TrainConfig, TrialConfig
from bishop_ray.data.table import Table, TableSpec
from bishop_ray.models import MODELS
from bishop_ray.training.system import begin_peaks

if TYPE_CHECKING:
    from bishop_ray.models.base import Estimator, Network


STOP_REASON = "stop_reason"
PREDICTOR, VALIDATION = "predictor", "validation.npy"
"""What a finished training leaves in its folder: the model, and its float32 (R, K) predictions of validation rows."""


class ReportCallback(Protocol):
    """One epoch of a network, or one chunk of rounds of an estimator."""

    @property
    def epoch(self) -> int:
        """From 1."""

    @property
    def stop_reason(self) -> str:
        """Why training ends here, or ""."""

    def metrics(self) -> dict[str, float]:
        """All numbers under flat names."""


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
        precision: See `TrainConfig`.
    """

    model: str
    metric: str
    max_epochs: int
    seed: int
    resources: Resources
    trainer: str
    folder: str
    data: Any
    precision: str = "auto"

    @classmethod
    def of(cls, study: StudyConfig, folder: str = "", data: Any = None, **changes: Any) -> TrialSettings:
        """Those of a study: what it has under the same name, but for `changes`."""
        own = {"folder": folder, "data": data} | changes
        return cls(**{f.name: getattr(study, f.name) for f in fields(cls) if f.name not in own} | own)

    @property
    def is_network(self) -> bool:
        """Whether our own loop trains the model."""
        return MODELS[self.model].kind == "network"

    @property
    def through_ray_train(self) -> bool:
        """Whether trials run in a Ray Train worker group; models of other libraries never do (layout.md decision 3)."""
        if not self.is_network:
            return False
        if self.trainer == "auto":
            return self.resources.workers > 1 or self.resources.gpus >= 1
        return self.trainer == "ray"

    def trial(self, params: Params) -> TrialConfig:
        """The full configuration of one training."""
        own = {name: getattr(self, name) for name in TrainConfig.names() if hasattr(self, name)}
        return TrialConfig.from_params(self.model, params, self.resources, **own)

    def all_params(self, params: Params) -> dict[str, Any]:
        """Everything that decides a training, defaults included, as ``model.NAME`` and ``train.NAME``."""
        from bishop_ray.models import model_class

        signature = inspect.signature(model_class(self.model).__init__).parameters
        model = {n: p.default for n, p in signature.items() if n not in ("self", "spec")} | params["model"]
        train = asdict(self.trial(params).train)
        if not self.is_network:
            train = {name: train[name] for name in ("metric", "seed")}
        return {f"model.{n}": v for n, v in model.items()} | {f"train.{n}": v for n, v in train.items()}


def model_folder(study: Path | str, number: int) -> Path:
    """Where trial `number` of the study in that folder leaves its `PREDICTOR` and `VALIDATION`."""
    return Path(study) / "models" / f"{number:04d}"


def trial_folder(settings: TrialSettings, number: int) -> Path:
    """Where trial `number` keeps its checkpoint."""
    return Path(settings.folder) / "trials" / f"{number:04d}"


def train_here(
    job: TrialConfig,
    data: StudyData,
    checkpoint: Path,
    on_epoch: Callable[[ReportCallback], bool],
    save_to: Path | None = None,
) -> None:
    """Trains in this process; with several Ray Train workers each calls it.

    Args:
        job: What to train.
        data: Train and validation rows.
        checkpoint: Folder of a network's full checkpoint; training goes on from it when it exists.
        on_epoch: Called after each epoch or chunk of rounds; True asks for a stop.
        save_to: Folder for `PREDICTOR` and `VALIDATION` (rank 0 writes them), or None.
    """
    from bishop_ray.models.base import Network

    begin_peaks()
    model = _create(job, data.spec)
    if isinstance(model, Network):
        from bishop_ray.training.loop import fit_network

        fitted = fit_network(
            model,
            data.train,
            data.validation,
            job.train,
            on_epoch,
            resume_from=checkpoint,
            checkpoint_to=checkpoint,
            identity={"model": job.model, "params": job.params["model"], **data.train.weight_key()},
            target_scale=data.target_scale,
        )
        last, rounds, seconds = fitted.last, fitted.last.best_epoch, fitted.seconds
        facts = {STOP_REASON: last.stop_reason, "epochs": last.epoch, "rounds": rounds, "fit_seconds": seconds}
    else:
        from bishop_ray.training.fit_estimator import fit_estimator

        began = time.perf_counter()
        ended = fit_estimator(
            model, data.train, data.validation, job.train.metric, on_epoch, target_scale=data.target_scale
        )
        seconds = time.perf_counter() - began
        facts = {STOP_REASON: ended.stop_reason, "epochs": ended.epoch, "rounds": model.rounds, "fit_seconds": seconds}
    if save_to is not None and _rank() == 0:
        _save(model, job, data, save_to, facts)


def refit_here(job: TrialConfig, data: StudyData, rounds: int, save_to: Path) -> None:
    """Trains for exactly `rounds` epochs or rounds on `data.train`, with nothing to select by, and saves the model.

    Args:
        job: What to train.
        data: Its training rows hold the validation rows too; a network's learning-rate schedule looks at the loss of
            `data.validation` all the same.
        rounds: Epochs or rounds of the training this one repeats.
        save_to: As in `train_here`.
    """
    from bishop_ray.models.base import Network

    model = _create(job, data.spec)
    began = time.perf_counter()
    if isinstance(model, Network):
        from bishop_ray.training.loop import fit_network

        config = replace(job.train, max_epochs=rounds, patience=rounds)
        fit_network(
            model, data.train, data.validation, config, lambda _: False, target_scale=data.target_scale, keep_last=True
        )
    else:
        model.refit(data.train, rounds)
    facts = {STOP_REASON: "refit", "rounds": rounds, "fit_seconds": time.perf_counter() - began}
    _save(model, job, data, save_to, facts)


def _create(job: TrialConfig, spec: TableSpec) -> Network | Estimator:
    """The fresh model, seeded, with its share of the machine."""
    import torch

    from bishop_ray.models import create_model
    from bishop_ray.models.base import Estimator

    threads = max(1, int(job.resources.cpus))
    torch.set_num_threads(threads)
    torch.manual_seed(job.train.seed)
    model = create_model(job.model, spec, job.params["model"])
    if isinstance(model, Estimator):
        model.n_threads, model.seed = threads, job.train.seed
        model.device = "cuda" if job.resources.gpus and torch.cuda.is_available() else "cpu"
    return model


def _save(model: Network | Estimator, job: TrialConfig, data: StudyData, folder: Path, facts: dict[str, Any]) -> None:
    """Writes predictions first, so that whoever sees the predictor sees them too."""
    from torch import nn

    from bishop_ray.data.preprocess import Preprocessor
    from bishop_ray.predictor import Predictor

    if isinstance(model, nn.Module):
        model.cpu()
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / VALIDATION, model.predict(data.validation.x_num, data.validation.x_cat).astype(np.float32))
    info = {"seed": job.train.seed, "metric": job.train.metric, **facts}
    Predictor(Preprocessor.from_dict(data.preprocessor), model, job.model, job.params["model"], info).save(
        folder / PREDICTOR
    )


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
