"""Configuration records of studies, trials and trainings. Frozen; they check themselves and hold no rows."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from bishop_ray.data.refs import DatasetRef
from bishop_ray.errors import UserError

if TYPE_CHECKING:
    from bishop_ray.data.split import SplitProtocol


NO_LIMIT = 100_000
"""Trials of a study that only a time budget ends."""
PRECISIONS = ("auto", "fp32", "bf16")
Params = dict[str, Any]
"""Hyperparameters by section and name: ``{"model": {...}, "train": {...}}``."""


@dataclass(frozen=True)
class TrainConfig:
    """How a network is trained; the only home of these defaults (paper, appendix "Training Details").

    Attributes:
        max_epochs: Upper bound of epochs.
        patience: Epochs without a lower validation loss before training stops.
        batch_size: Rows of one optimizer step over all workers.
        lr: Initial learning rate.
        weight_decay: L2 penalty (Adam) or decoupled decay (AdamW); never on entmax's alpha.
        optimizer: "adam" or "adamw".
        clip_norm: Gradient norm limit, 0 for none (the authors' code clips at 1).
        plateau_factor: ReduceLROnPlateau's; its patience and least change are `plateau_patience` and `plateau_eps`.
        metric: The selection metric, a name of ``bishop_ray/metrics``.
        seed: Seed of initialisation, row order and dropout.
        precision: Of the forward pass in training and validation: "fp32", "bf16", or "auto": "bf16" where the device
            has it and it is faster (``training/precision.py``). Weights, losses and later predictions are float32.
        cuda_graphs: Launch a whole step of one process on a GPU at once (``training/cuda_graphs.py``).
    """

    max_epochs: int = 200
    patience: int = 20
    batch_size: int = 32
    lr: float = 5e-5
    weight_decay: float = 0.0
    optimizer: str = "adam"
    clip_norm: float = 1.0
    plateau_factor: float = 0.1
    plateau_patience: int = 10
    plateau_eps: float = 1e-6
    metric: str = "accuracy"
    seed: int = 0
    precision: str = "auto"
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        for name in ("max_epochs", "patience", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1; found {getattr(self, name)}")
        if not self.lr > 0:
            raise ValueError(f"lr must be > 0; found {self.lr}")
        for name in ("weight_decay", "clip_norm", "plateau_patience", "plateau_eps"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0; found {getattr(self, name)}")
        if not 0 < self.plateau_factor < 1:
            raise ValueError(f"plateau_factor must lie between 0 and 1; found {self.plateau_factor}")
        if self.optimizer not in ("adam", "adamw"):
            raise ValueError(f"optimizer must be 'adam' or 'adamw'; found {self.optimizer!r}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}; found {self.precision!r}")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """All field names: the keys a search space may use under ``train``."""
        return tuple(f.name for f in fields(cls))


@dataclass(frozen=True)
class Resources:
    """What one trial gets.

    Attributes:
        cpus: CPUs per worker.
        gpus: GPUs per worker.
        workers: Number of workers (layout: Ray Train when >= 2).
        packed: A trial asks for the share of a GPU (at least `gpus`) or of a node's memory that it is said to need.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    workers: int = 1
    packed: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UserError(f"--workers-per-trial must be >= 1; found {self.workers}")
        if self.cpus <= 0:
            raise UserError(f"--cpus-per-trial must be > 0; found {self.cpus:g}")
        if self.gpus < 0:
            raise UserError(f"--gpus-per-trial must be >= 0; found {self.gpus:g}")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise UserError(f"--gpus-per-trial above 1 must be whole; found {self.gpus:g}")


@dataclass(frozen=True)
class TrialConfig:
    """One training: model, hyperparameters, and how."""

    model: str
    params: Params
    train: TrainConfig
    resources: Resources = Resources()

    @classmethod
    def from_params(cls, model: str, params: Params, resources: Resources = Resources(), **train: Any) -> TrialConfig:
        """Joins suggested parameters with the settings of the study; the latter win."""
        return cls(model, params, TrainConfig(**{**params.get("train", {}), **train}), resources)


@dataclass(frozen=True)
class StudyConfig:
    """One search: a dataset, a model and a budget.

    Attributes:
        ref: The dataset.
        model: Registry name of the model.
        space: Name or file of the search space.
        trials: Trials asked for, finished ones of an earlier run counted.
        max_epochs: Epochs per trial.
        metric: Selection metric, or "" for the default of the dataset's task.
        split: How rows are split.
        sampler: "tpe", "random" or "gp".
        scheduler: "asha" or "none".
        seed: Seed of split, sampler and trials.
        eval_seeds: Trainings of the best configuration for the test score.
        trainer: "auto", "ray" or "inprocess" (layout.md decision 3).
        resources: Per trial.
        max_concurrent: Trials at a time.
        storage: Folder shared by all nodes.
        tracking_uri: MLflow address.
        time_budget: Seconds for the whole command, 0 for no limit; kept as a fact of the run.
        study_db: Optuna database URL, "" for a journal file in `storage`.
        trial_limit: Seconds of a trial, 0 for none: it stops at the report after that; silent for as long, it failed.
        fresh: Start over although the study exists.
        refit: Train the winner on train and validation rows before it is registered.
        precision: See `TrainConfig`.
        warm_start: Whose configurations are tried early: "none", "paper" or "mlflow" (`search.warm_start`).
        doctor: Look for leaks, repeated rows and ids in the table before a new study (`search.dataset.check_table`).
    """

    ref: DatasetRef
    model: str
    space: str
    trials: int
    max_epochs: int
    metric: str
    split: SplitProtocol
    sampler: str = "tpe"
    scheduler: str = "asha"
    seed: int = 0
    eval_seeds: int = 3
    trainer: str = "auto"
    resources: Resources = Resources()
    max_concurrent: int = 1
    storage: str = ""
    tracking_uri: str = field(default="", repr=False)
    time_budget: float = 0.0
    study_db: str = field(default="", repr=False)
    trial_limit: float = 0.0
    fresh: bool = False
    refit: bool = False
    precision: str = "auto"
    warm_start: str = "none"
    doctor: bool = True

    def __post_init__(self) -> None:
        for name, flag in (("trials", "--trials"), ("max_epochs", "--max-epochs"), ("eval_seeds", "--eval-seeds")):
            if getattr(self, name) < 1:
                raise UserError(f"{flag} must be >= 1; found {getattr(self, name)}")
        if self.trainer == "inprocess" and self.resources.workers > 1:
            raise UserError(f"--trainer inprocess has one worker; found --workers-per-trial {self.resources.workers}")

    @property
    def name(self) -> str:
        """Deterministic: the same command finds its study again."""
        return f"{self.ref.key}-{self.model}-s{self.seed}"


@dataclass(frozen=True)
class StudyResult:
    """What a study ended with, as shown in the leaderboard.

    Attributes:
        dataset: Key of the dataset.
        model: Registry name.
        metric: Selection metric.
        trials: Trials by state, e.g. ``{"complete": 3, "pruned": 5}``.
        best_trial: Number of the winner.
        val_score: Its best validation score in the search.
        test_mean: Test score of the winner, mean over the evaluation seeds.
        test_std: Deviation over the seeds.
        test_scores: Per seed.
        linear: Test score of a linear model on the same rows.
        mean: Test score of the constant prediction.
        registered: Name of the registered model.
        version: Its version.
        seconds: Wall time of all runs of this study.
        rows: Rows of train, validation, test.
        params: The winner's parameters, flat.
        parent_run: MLflow run of the study.
        champion: Whether the version is the champion of its name.
        verdict: Why it is champion or not, "yes: ..." or "no: ..."; "refused: ..." where it got no alias at all.
        reused: The study was finished before.
        fit_seconds: Of the training that was registered.
        predict_ms: Milliseconds to predict 1,000 rows of a raw table with it.
        size_bytes: Of its files.
        trained_on: "train", or "train and validation" after a refit.
    """

    dataset: str
    model: str
    metric: str
    trials: dict[str, int]
    best_trial: int
    val_score: float
    test_mean: float
    test_std: float
    test_scores: list[float]
    linear: float
    mean: float
    registered: str
    version: str
    seconds: float
    rows: list[int]
    params: dict[str, Any]
    parent_run: str
    champion: bool = True
    verdict: str = ""
    reused: bool = False
    fit_seconds: float = 0.0
    predict_ms: float = 0.0
    size_bytes: int = 0
    trained_on: str = "train"


@dataclass(frozen=True)
class Skipped:
    """A model that was not tried on a dataset, and why: no failure."""

    dataset: str
    model: str
    reason: str
