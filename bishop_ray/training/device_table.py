"""A table on the network's device: shared memory on the CPU, one copy on a CUDA device.

Letters: R rows, N numerical and C categorical columns.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bishop_ray.data.table import Table


def best_device() -> torch.device:
    """The current CUDA device where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Resident:
    """A table as tensors on the device, whole, from which batches are gathered.

    On the CPU the tensors are the table's own memory, so that trials of one node that take it from Ray's object store
    have it once between them. That memory is read-only: nothing may write to these tensors or to views of them.

    Attributes:
        x_num: (R, N) float32.
        x_cat: (R, C) int64.
        y: (R,) of the type asked for.
        weight: (R,) float32, or None.
    """

    def __init__(self, table: Table, y_type: torch.dtype, device: torch.device) -> None:
        self.x_num = _shared(table.x_num, torch.float32).to(device)
        self.x_cat = _shared(table.x_cat, torch.int64).to(device)
        self.y = _shared(table.y, y_type).to(device)
        self.weight = None if table.weight is None else _shared(table.weight, torch.float32).to(device)

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of the rows of `index` (B,) int64: (B, N), (B, C), (B,)."""
        return self.x_num.index_select(0, index), self.x_cat.index_select(0, index), self.y.index_select(0, index)

    def chunks(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All features in pieces of at most `size` rows, as views."""
        return zip(torch.split(self.x_num, size), torch.split(self.x_cat, size), strict=True)


def _shared(values: NDArray[np.generic], kind: torch.dtype) -> Tensor:
    """A tensor over the memory of `values`; a copy only where type or layout must change."""
    with warnings.catch_warnings():
        # Arrays of Ray's object store are read-only, which PyTorch cannot express; see `Resident`.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.ascontiguousarray(values)).to(kind)
