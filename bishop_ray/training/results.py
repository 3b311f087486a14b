"""Results of a training: one epoch, the end, and the state of early stopping."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from bishop_ray.config import TrainConfig


@dataclass(frozen=True)
class EpochResult:
    """What one epoch gave.

    Attributes:
        epoch: From 1.
        train_loss: Mean loss of the epoch's batches (cross-entropy in nats or squared error of the standardised
            target, plus the network's penalty), over all rows.
        val_loss: Mean loss of the validation rows after the epoch, without penalty.
        val_score: The selection metric on the validation rows, larger is better.
        best_val_score: Best score so far.
        best_epoch: Its epoch; among equal scores the one with the lower loss.
        lr: Learning rate of this epoch.
        seconds: Wall time of this epoch, validation included.
        diagnostics: `Network.diagnostics` after validation; ``micro_batch``, the rows of a pass, once memory ran out.
        stop_reason: "" while training goes on; "patience", "max_epochs", or "stopped" when `on_epoch` asked for it.
    """

    epoch: int
    train_loss: float
    val_loss: float
    val_score: float
    best_val_score: float
    best_epoch: int
    lr: float
    seconds: float
    diagnostics: dict[str, float] = field(default_factory=dict)
    stop_reason: str = ""

    def metrics(self) -> dict[str, float]:
        """All numbers under flat names, for a report."""
        numbers = asdict(self)
        for name in ("diagnostics", "stop_reason", "seconds"):
            del numbers[name]
        return {**numbers, "epoch_seconds": self.seconds, **self.diagnostics}


@dataclass(frozen=True)
class FitResult:
    """What a training gave; the network holds the weights of the best epoch.

    Attributes:
        last: The last epoch, with the reason why training ended.
        best_val_loss: Validation loss of the best epoch (`last.best_epoch`).
        seconds: Wall time of all epochs, those before a resume included.
    """

    last: EpochResult
    best_val_loss: float
    seconds: float


@dataclass
class Patience:
    """Early-stopping state, rows of a pass since memory ran out, precision: JSON values, to travel in a checkpoint."""

    best_score: float = -math.inf
    best_loss: float = math.inf
    best_epoch: int = 0
    low_loss: float = math.inf
    low_epoch: int = 0
    seconds: float = 0.0
    micro_batch: int = 0
    precision: str = "fp32"
    last: dict[str, Any] = field(default_factory=dict)

    def note(self, epoch: int, loss: float, score: float) -> None:
        """Takes in the numbers of one validation."""
        if (score, -loss) > (self.best_score, -self.best_loss):
            self.best_score, self.best_loss, self.best_epoch = score, loss, epoch
        if loss < self.low_loss:
            self.low_loss, self.low_epoch = loss, epoch

    def stop_reason(self, epoch: int, config: TrainConfig) -> str:
        """Why training ends after `epoch`, or ""."""
        if epoch - self.low_epoch >= config.patience:
            return "patience"
        return "max_epochs" if epoch >= config.max_epochs else ""


@dataclass(frozen=True)
class RoundResult:
    """What a chunk of rounds of an estimator gave.

    Attributes:
        epoch: Number of the chunk, from 1: the time axis of early stopping.
        rounds: Rounds (trees) so far.
        val_loss: Mean loss of the validation rows (cross-entropy in nats, or squared error of the standardised target).
        val_score: The selection metric on the validation rows, larger is better.
        best_val_score: Best score so far.
        best_epoch: Its chunk.
        best_rounds: Its rounds.
        seconds: Wall time of this chunk, validation included.
        stop_reason: "" while training goes on; "finished", or "stopped" when `on_epoch` asked for it.
    """

    epoch: int
    rounds: int
    val_loss: float
    val_score: float
    best_val_score: float
    best_epoch: int
    best_rounds: int
    seconds: float
    stop_reason: str = ""

    def metrics(self) -> dict[str, float]:
        """All numbers under flat names, for a report."""
        numbers = asdict(self)
        for name in ("stop_reason", "seconds"):
            del numbers[name]
        return {**numbers, "epoch_seconds": self.seconds}
