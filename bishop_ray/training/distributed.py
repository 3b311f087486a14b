"""Collective operations of data-parallel training; no-ops without a process group.

By hand instead of `DistributedDataParallel`: the last batch may leave a rank without rows, and gradients are weighted
by rows, so that a step equals the step of one process over the whole batch. DDP would need its join context for the
first and a rescaled loss for the second, and one flat all-reduce is short.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """The process group of this training, or a group of one.

    Attributes:
        rank: This process's number, 0 for the one that writes.
        size: Number of processes.
    """

    def __init__(self, device: torch.device) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self.device = device
        self.rank = dist.get_rank() if joined else 0
        self.size = dist.get_world_size() if joined else 1

    def share(self, rows: int) -> slice:
        """This rank's contiguous part of `rows` rows; parts differ by at most one row and may be empty."""
        return self._part(rows, self.rank)

    def _part(self, rows: int, rank: int) -> slice:
        return slice(rows * rank // self.size, rows * (rank + 1) // self.size)

    def sum(self, tensor: Tensor) -> None:
        """`tensor` summed over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def gather(self, part: Tensor, rows: int) -> Tensor:
        """(rows, K) on every rank, from each rank's `share` of the rows."""
        if self.size == 1:
            return part
        sizes = [self._part(rows, rank) for rank in range(self.size)]
        lengths = [size.stop - size.start for size in sizes]
        padded = part.new_zeros((max(lengths), *part.shape[1:]))
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded)
        return torch.cat([each[:length] for each, length in zip(parts, lengths, strict=True)])

    def agree(self, *values: float) -> tuple[float, ...]:
        """Rank 0's `values`, exactly, on every rank."""
        if self.size == 1:
            return values
        shared = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.broadcast(shared, src=0)
        return tuple(shared.tolist())

    def least(self, value: float) -> float:
        """The smallest `value` of all ranks."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MIN)
        return float(shared)

    def copy(self, tensors: list[Tensor]) -> None:
        """Rank 0's `tensors` copied over those of the other ranks, in place."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)
