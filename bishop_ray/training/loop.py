"""THE training loop: plain PyTorch, one process or several, no Ray, no MLflow.

It reports every epoch to `on_epoch` and stops when that says so; it knows nothing of who listens.
Letters: R rows, B rows of a batch, N numerical and C categorical columns, K outputs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from bishop_ray.config import TrainConfig
from bishop_ray.data.table import Table
from bishop_ray.errors import TrainingFailed
from bishop_ray.metrics import check_metric, evaluate
from bishop_ray.models.base import Network
from bishop_ray.training.checkpoint import Saver, has_state, load_state
from bishop_ray.training.cuda_graphs import GraphedStep
from bishop_ray.training.device_table import Resident, best_device
from bishop_ray.training.distributed import Ranks
from bishop_ray.training.micro_batch import Passes
from bishop_ray.training.optimizer import Stepper, find_non_finite, learning_rate
from bishop_ray.training.precision import resolve_precision
from bishop_ray.training.results import EpochResult, FitResult, Patience

__all__ = ["EpochResult", "FitResult", "best_device", "fit_network"]
UNBOUND = ("max_epochs", "patience", "cuda_graphs")
"""Settings in which a training may differ from the checkpoint that it goes on from."""


def fit_network(
    network: Network,
    train: Table,
    val: Table,
    config: TrainConfig,
    on_epoch: Callable[[EpochResult], bool],
    *,
    resume_from: Path | None = None,
    checkpoint_to: Path | None = None,
    identity: dict[str, Any] | None = None,
    target_scale: float = 1.0,
    keep_last: bool = False,
) -> FitResult:
    """Trains `network` in place and leaves it on its device with the weights of the best epoch.

    In an initialised `torch.distributed` group every rank calls this with the same arguments: a step equals that of one
    process, validation covers all rows. A network's running statistics (batch norm) are those of rank 0.

    Row order and dropout follow from (seed, epoch, rank) at the start of each epoch, through torch's global generator:
    a resumed training equals an undisturbed one.

    Args:
        network: Fresh; its `observe` is called here.
        train: Training rows.
        val: Validation rows; never trained on.
        config: How to train.
        on_epoch: Called after each epoch with the network at its weights, on every rank with the same numbers; True
            asks for a stop, rank 0's answer counts. A resumed training with nothing left to do reports its last epoch.
        resume_from: Folder of a checkpoint to go on from, if it holds one.
        checkpoint_to: Folder to keep the newest checkpoint in, written by rank 0.
        identity: JSON values that a checkpoint must share to be resumed, beside network class, spec, rows and config.
        target_scale: Units of the target per unit of `y`, so that `rmse` and `mae` are in the target's own units.
        keep_last: Leave the weights of the last epoch instead of the best one's.

    Raises:
        UserError: The metric does not fit the task; the checkpoint is damaged or of another training.
        TrainingFailed: A loss, gradient or output that is not finite: names epoch and layer.
        ValueError: No training or no validation rows.
    """
    check_metric(config.metric, network.spec.task)
    if not len(train) or not len(val):
        raise ValueError(f"training needs rows to train on and to validate; found {len(train)} and {len(val)}")
    network.observe(train)
    fit = _Fit(network, train, val, config, target_scale)
    fit.identify(identity or {})
    done = fit.resume(resume_from)
    fit.ranks.copy([*network.parameters(), *network.buffers()])
    if config.cuda_graphs and fit.ranks.device.type == "cuda" and fit.ranks.size == 1:
        fit.graphed = GraphedStep(fit.passes, fit.stepper, fit.train, config.batch_size)
    reason = fit.progress.stop_reason(done, config) if done else ""
    if reason:
        on_epoch(fit.result(reason))
    saver = Saver(checkpoint_to) if checkpoint_to is not None and fit.ranks.rank == 0 else None
    while not reason:
        done += 1
        reason = fit.epoch(done)
        stop = on_epoch(fit.result(reason))
        reason = reason or ("stopped" if fit.ranks.agree(float(stop))[0] else "")
        if saver is not None and (reason or saver.due()):
            saver.save(network, fit.stepper, fit.scheduler, fit.best, asdict(fit.progress), fit.identity)
    fit.stepper.release()
    if not keep_last:
        network.load_state_dict(fit.best)
    network.eval()
    return FitResult(fit.result(reason), fit.progress.best_loss, fit.progress.seconds)


class _Fit:
    """Network, data and optimizer of one training, and what one epoch does with them."""

    def __init__(self, network: Network, train: Table, val: Table, config: TrainConfig, scale: float) -> None:
        device = best_device()
        self.network, self.config, self.scale = network.to(device), config, scale
        self.ranks = Ranks(device)
        y_type = torch.int64 if network.spec.task.is_classification else torch.float32
        self.train, self.val, self.y_val = Resident(train, y_type, device), Resident(val, y_type, device), val.y
        precision = resolve_precision(config.precision, self.network, self.train, config.batch_size)
        # Rank 0's: another processor may answer otherwise.
        bf16 = bool(self.ranks.agree(float(precision == "bf16"))[0])
        self.passes = Passes(self.network, "bf16" if bf16 else "fp32")
        self.stepper = Stepper(network, config, self.ranks)
        self.scheduler = ReduceLROnPlateau(
            self.stepper.optimizer,
            factor=config.plateau_factor,
            patience=config.plateau_patience,
            eps=config.plateau_eps,
        )
        self.graphed: GraphedStep | None = None
        self.progress = Patience(precision=self.passes.precision)
        self.best: dict[str, Tensor] = {}
        self.identity: dict[str, Any] = {}

    def result(self, reason: str) -> EpochResult:
        """The last epoch, as it is reported."""
        return replace(EpochResult(**self.progress.last), stop_reason=reason)

    def identify(self, extra: dict[str, Any]) -> None:
        """Says what a checkpoint must agree with; how long to train and how to launch it may differ."""
        config = {k: v for k, v in asdict(self.config).items() if k not in UNBOUND}
        if config["precision"] == "auto":  # what it means here may differ from where the training began
            del config["precision"]
        own = {"network": type(self.network).__name__, "spec": asdict(self.network.spec), "config": config}
        self.identity = {**own, "rows": [len(self.train), len(self.val)], **extra}

    def resume(self, folder: Path | None) -> int:
        """Takes up a checkpoint if there is one; its epoch, or 0.

        Raises:
            RuntimeError: The folder shows ranks different checkpoints: it is not shared.
        """
        epoch = self._load(folder) if folder is not None and has_state(folder) else 0
        first = int(self.ranks.agree(epoch)[0])
        if first != epoch:
            raise RuntimeError(f"rank {self.ranks.rank} finds epoch {epoch} in {folder}, rank 0 epoch {first}")
        return epoch

    def _load(self, folder: Path) -> int:
        self.best, progress = load_state(folder, self.network, self.stepper, self.scheduler, self.identity)
        self.progress = Patience(**progress)
        # A training goes on as it began, whatever this processor would choose.
        self.passes.micro_batch, self.passes.precision = self.progress.micro_batch, self.progress.precision
        return int(self.progress.last["epoch"])

    def epoch(self, number: int) -> str:
        """Trains and validates once; the reason to stop, or ""."""
        started, rate, progress = time.perf_counter(), learning_rate(self.stepper.optimizer), self.progress
        train_loss = self._train(number)
        loss, score = self._validate(number)
        self.scheduler.step(loss)
        progress.note(number, loss, score)
        if progress.best_epoch == number:
            self.best = {name: tensor.clone() for name, tensor in self.network.state_dict().items()}
        seconds = time.perf_counter() - started
        progress.seconds += seconds
        diagnostics = self.network.diagnostics()
        if (rows := self.ranks.least(self.passes.micro_batch or math.inf)) < math.inf:
            progress.micro_batch = int(rows)
            diagnostics = diagnostics | {"micro_batch": rows}
        result = EpochResult(
            number, train_loss, loss, score, progress.best_score, progress.best_epoch, rate, seconds, diagnostics
        )
        progress.last = asdict(result)
        return progress.stop_reason(number, self.config)

    def _train(self, number: int) -> float:
        """One pass over the training rows; the mean loss of its batches."""
        network, rows, device = self.network.train(), len(self.train), self.ranks.device
        torch.manual_seed(_seed(self.config.seed, number, self.ranks.rank))
        order = np.random.default_rng([self.config.seed, number]).permutation(rows)
        batches = torch.split(torch.from_numpy(order).to(device), _batch_sizes(rows, self.config.batch_size))
        total = torch.zeros((), dtype=torch.float64, device=device)
        for batch in batches:
            mine = batch[self.ranks.share(len(batch))]
            loss = self.graphed(mine) if self.graphed is not None else None
            if loss is None:
                if len(mine):  # a small last batch may leave this rank without rows
                    loss = self.passes.gradient(self.train, mine, len(mine) / len(batch))
                self.stepper.step()
            if loss is not None:
                total.add_(loss, alpha=len(batch))
        self.ranks.sum(total)
        mean = float(total) / rows
        if self.stepper.failed() or not math.isfinite(mean):
            seen = (self.train.take(batch)[:2] for batch in batches)
            with self.passes.autocast():
                layer = find_non_finite(network, seen)
            where = layer or f"gradient of {self.stepper.bad_gradient()!r}"
            raise TrainingFailed(f"epoch {number}: non-finite {where} (training loss {mean:g})")
        self.ranks.copy(list(network.buffers()))
        return mean

    @torch.no_grad()
    def _validate(self, number: int) -> tuple[float, float]:
        """Loss and score of all validation rows, the same on every rank."""
        spec = self.network.spec
        own = self.passes.outputs(self.val, self.ranks.share(len(self.val)))
        out = self.ranks.gather(own, len(self.val))  # (R, K)
        wide = out.double()
        if spec.task.is_classification:
            loss = F.cross_entropy(wide, self.val.y)
        else:
            loss = F.mse_loss(wide[:, 0], self.val.y.double())
        if not math.isfinite(loss):
            with self.passes.autocast():
                layer = find_non_finite(self.network, self.val.chunks(self.passes.eval_rows))
            where = layer or "output"
            raise TrainingFailed(f"epoch {number}: non-finite {where} in validation (loss {float(loss):g})")
        prediction = (out.softmax(-1) if spec.task.is_classification else out).cpu().numpy()
        scale = 1.0 if spec.task.is_classification else self.scale
        score = evaluate(self.config.metric, spec.task, self.y_val, prediction, scale=scale)
        agreed = self.ranks.agree(float(loss), score)
        return agreed[0], agreed[1]


def _seed(*parts: int) -> int:
    """One number from several, well mixed."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


def _batch_sizes(rows: int, size: int) -> list[int]:
    """Sizes of an epoch's batches, the small last one kept.

    A last batch of a single row joins the batch before it: batch norm cannot train on one row.
    """
    full, rest = divmod(rows, size)
    sizes = [size] * full + ([rest] if rest else [])
    if rest == 1 and full:
        sizes[-2:] = [size + 1]
    return sizes
