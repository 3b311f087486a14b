"""The two contracts of a model. Both are built as ``Class(spec, **hparams)``: the signature holds all defaults.

Letters: B rows of a batch, N numerical and C categorical columns, K outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from bishop_ray.data.table import Table, TableSpec, TaskType

NumericKind = Literal["normal", "quantile", "raw", "native"]
"""See ``data/numeric.py``."""
Array = NDArray[np.float32]
WIDE = 8192
"""Mean numbers per parameter from which a pass over all of them costs more than an operation for each."""
_SMALL = TableSpec(TaskType.BINARY, 2, (3,), 2)


def is_wide(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether the trained parameters are large: then ``training/optimizer.py`` adds up their gradients in place."""
    return sum(p.numel() for p in parameters) > WIDE * len(parameters)


class Network(nn.Module, ABC):
    """A PyTorch network trained by ``training/loop.py``.

    Sizes come from the constructor, so that a saved state always fits; `observe` only fills buffers.
    """

    numeric: ClassVar[NumericKind] = "normal"
    """How the Preprocessor hands over numbers."""
    takes_weights: ClassVar[bool] = True
    """Whether training heeds `Table.weight`; `loss` does."""

    spec: TableSpec

    @classmethod
    def cannot(cls, spec: TableSpec, rows: int) -> str:
        """Why the model cannot be trained on `rows` rows of such a table, or ""."""
        return ""

    @classmethod
    def check(cls, **hparams: Any) -> None:
        """Nothing, if the constructor takes these hyperparameters; weights are not allocated.

        Override it where the arguments can be checked without building anything: search spaces ask for every value.

        Raises:
            ValueError: As the constructor does.
        """
        build: Any = cls
        with torch.device("meta"):
            build(_SMALL, **hparams)

    @abstractmethod
    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        """(B, N) float, (B, C) int64 -> (B, K) logits, or the standardised target. B = 0 is allowed."""

    def observe(self, train: Table) -> None:
        """Fills buffers from the training rows (quantile bins); called once, before training."""

    def loss(self, out: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Mean loss of the rows of a training batch: what `forward` gave, (B,), and (B,) row weights -> scalar.

        With weights it is the sum of weight times loss over B, not over the sum of the batch's weights: so the gradient
        of a batch stays an unbiased estimate of the whole table's, whose weights have mean 1.

        Override it together with `forward` where training looks at more than a row's one output; in evaluation mode
        `forward` gives (B, K) all the same, and validation always takes the loss below.
        """
        how = "mean" if weight is None else "none"
        if self.spec.task.is_classification:
            found = F.cross_entropy(out, y, reduction=how)
        else:
            found = F.mse_loss(out[:, 0], y, reduction=how)
        return found if weight is None else (found * weight).mean()

    def penalty(self) -> Tensor | None:
        """A scalar added to the loss of the last forward pass, or None."""
        return None

    def diagnostics(self) -> dict[str, float]:
        """Numbers worth a curve per epoch, read after a validation pass: name -> value."""
        return {}

    @torch.no_grad()
    def predict(self, x_num: Array, x_cat: NDArray[np.int64], batch_size: int = 1024) -> Array:
        """Class probabilities (R, K), or the standardised target (R, 1), as float32; leaves the mode unchanged."""
        if was_training := self.training:
            self.eval()  # not else: walking all modules costs a lone row a twentieth of its time
        device = next(self.parameters()).device
        parts = []
        try:
            for start in range(0, len(x_num), batch_size):
                rows = slice(start, start + batch_size)
                num = torch.tensor(x_num[rows], device=device)
                cat = torch.tensor(x_cat[rows], device=device)
                out = self(num, cat).float()
                parts.append((out.softmax(-1) if self.spec.task.is_classification else out).cpu())
        finally:
            if was_training:
                self.train()
        return torch.cat(parts).numpy() if parts else np.zeros((0, self.spec.n_out), np.float32)


class Estimator(ABC):
    """A model of another library that trains itself (boosters, forests, foundation models).

    The attributes below `spec` are set by whoever trains, between the constructor and `fit`.
    """

    numeric: ClassVar[NumericKind] = "native"
    reports: ClassVar[int] = 1
    """Into how many equal chunks of rounds `fit` divides a full training; 1 for models without rounds."""
    takes_weights: ClassVar[bool] = False
    """Whether `fit` and `refit` heed `Table.weight` of the training rows; those of validation rows count alike."""

    spec: TableSpec
    n_threads: int = 1
    """CPU threads that fitting and predicting may use."""
    device: str = "cpu"
    """"cpu" or "cuda"."""
    seed: int = 0
    rounds: int = 1
    """Rounds that `predict` uses, from 1. `fit` leaves it at the best round by validation loss; a smaller number may be
    set afterwards, and survives `save`."""

    @classmethod
    def cannot(cls, spec: TableSpec, rows: int) -> str:
        """Why the model cannot be trained on `rows` rows of such a table, or ""."""
        return ""

    @classmethod
    def check(cls, **hparams: Any) -> None:
        """Nothing, if the constructor takes these hyperparameters; else its ValueError."""
        build: Any = cls
        build(_SMALL, **hparams)

    @abstractmethod
    def fit(self, train: Table, val: Table, on_round: Callable[[int, Array], bool]) -> None:
        """Trains, with early stopping on the validation loss.

        Args:
            train: R rows.
            val: Validation rows, encoded alike.
            on_round: Called with the rounds so far and the prediction of the validation rows (as `predict`) after
                every chunk of ``max rounds / reports`` rounds but not at the end; True ends the training. Never called
                by models without rounds.
        """

    @abstractmethod
    def refit(self, train: Table, rounds: int) -> None:
        """Trains for exactly `rounds` rounds, without validation rows; models without rounds ignore the number."""

    @abstractmethod
    def predict(self, x_num: Array, x_cat: NDArray[np.int64]) -> Array:
        """Class probabilities (R, K), or the standardised target (R, 1), as float32; R = 0 is allowed.

        A row's prediction does not depend on the other rows.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the fitted model into the existing, empty `folder`, in the library's own format that runs no code."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, on a machine without GPU; nothing in it is executed.

        Raises:
            UserError: A missing, damaged or untrusted file; names it.
        """
