"""Forward and backward passes in micro-batches that fit into memory."""

from __future__ import annotations

import gc
import logging
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from bishop_ray.errors import TrainingFailed
from bishop_ray.models.base import Network
from bishop_ray.training.device_table import Resident

EVAL_ROWS = 1024
"""Rows of one forward pass without gradients, where memory allows.

Measured on one CPU thread, microseconds per row at 128, 512, 1024, 2048, 8192: MLP 7.2, 6.0, 6.1, 6.0, 7.3; the small
BiSHop 282, 187, 172, 169, 257.
"""
_CPU_OUT_OF_MEMORY = ("DefaultCPUAllocator", "can't allocate memory")
logger = logging.getLogger(__name__)


class Passes:
    """Runs the network; when memory runs out, again and from then on in pieces of half the rows.

    The gradient of a batch in pieces is the whole batch's: each piece counts by its rows. Only what a network computes
    across the rows of a batch (batch norm, attention between rows) sees the fewer rows of a piece, as it does on
    several ranks, and a failed attempt may have moved running statistics once more. Ranks halve independently: no pass
    holds a collective operation.

    Attributes:
        network: The network, on its device.
        precision: "fp32", or "bf16": the forward pass under autocast; outputs, losses and all that follows are float32.
        micro_batch: Most rows of a pass with gradients, 0 for any number.
        eval_rows: Most rows of a pass without.
    """

    def __init__(self, network: Network, precision: str) -> None:
        self.network, self.precision = network, precision
        self.micro_batch, self.eval_rows = 0, EVAL_ROWS
        self._device = next(network.parameters()).device

    def autocast(self) -> AbstractContextManager[None]:
        """The context of a forward pass."""
        if self.precision == "fp32":
            return nullcontext()
        context: AbstractContextManager[None] = torch.autocast(self._device.type, torch.bfloat16)
        return context

    def gradient(self, data: Resident, index: Tensor, share: float = 1.0) -> Tensor:
        """Leaves the gradient of a batch, times `share`, in parameters that have none yet, or zeros.

        Args:
            data: The rows.
            index: (B,) int64, B >= 1: those of the batch.
            share: Their weight.

        Returns:
            Mean loss of the batch with penalty, times `share`: scalar.

        Raises:
            TrainingFailed: Not enough memory for one row.
        """
        while True:
            try:
                return self.attempt(data, index, share)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            # Outside of the handler: the exception holds the frames of the failed pass, and these its tensors.
            self.micro_batch = _half(min(self.micro_batch or len(index), len(index)))
            for parameter in self.network.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()  # in place: a large one must not come to lie in two places
            self._free(f"training passes of at most {self.micro_batch} rows")

    def attempt(self, data: Resident, index: Tensor, share: float) -> Tensor:
        """`gradient`, at the present size of pieces and whatever memory says."""
        total: Tensor | None = None
        for piece in _pieces(index, self.micro_batch):
            x_num, x_cat, y = data.take(piece)
            with self.autocast():
                out = self.network(x_num, x_cat)
            if data.weight is None:
                loss = self.network.loss(out.float(), y)
            else:
                loss = self.network.loss(out.float(), y, data.weight.index_select(0, piece))
            penalty = self.network.penalty()
            if penalty is not None:
                loss = loss + penalty
            weight = share * len(piece) / len(index)
            if weight != 1.0:
                loss = loss * weight
            loss.backward()  # type: ignore[no-untyped-call]
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    @torch.no_grad()
    def outputs(self, data: Resident, rows: slice) -> Tensor:
        """Outputs of `rows` in evaluation mode, (R, K) float32, on the device.

        Raises:
            TrainingFailed: Not enough memory for one row.
        """
        network, start = self.network.eval(), rows.start
        done: list[Tensor] = []
        while not done or start < rows.stop:
            stop = min(start + self.eval_rows, rows.stop)
            try:
                with self.autocast():
                    done.append(network(data.x_num[start:stop], data.x_cat[start:stop]).float())
                start = stop
                continue
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            self.eval_rows = _half(stop - start)
            self._free(f"validation passes of at most {self.eval_rows} rows")
        return torch.cat(done)

    def _free(self, then: str) -> None:
        gc.collect(1)  # cycles of the failed pass are young
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        logger.warning("out of memory; from now on %s", then)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device or the CPU's allocator had not enough memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _CPU_OUT_OF_MEMORY)


def _half(rows: int) -> int:
    """Rows of the next attempt after one with `rows` failed."""
    if rows <= 1:
        raise TrainingFailed("out of memory with a batch of 1 row")
    return -(-rows // 2)


def _pieces(index: Tensor, most: int) -> tuple[Tensor, ...]:
    """`index` in as few parts of at most `most` as there can be, of nearly equal length; 0 for one part."""
    if not most or len(index) <= most:
        return (index,)
    return torch.tensor_split(index, -(-len(index) // most))
