"""One-hot inputs of networks that read a row as one vector.

Letters: B rows, N numerical columns, C categorical columns, U levels of all categorical columns together.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor, nn


class OneHot(nn.Module):
    """Numbers followed by the levels of every categorical column as 0/1: (B, N), (B, C) -> (B, N + U).

    Code 0 (missing or unseen) is all zeros in its column's block: weights of a column that training never filled
    would add noise to every row with an unseen level. No information is lost, a known level has exactly one 1.

    Args:
        n_num: N.
        cardinalities: Codes per categorical column, code 0 counted; U is the sum of these less one each.

    Attributes:
        width: N + U, the width of the output.
    """

    sizes: Tensor
    starts: Tensor

    def __init__(self, n_num: int, cardinalities: tuple[int, ...]) -> None:
        super().__init__()
        levels = [size - 1 for size in cardinalities]
        self.n_levels = sum(levels)
        self.width = n_num + self.n_levels
        self.register_buffer("sizes", torch.tensor(cardinalities, dtype=torch.int64), persistent=False)
        starts = [0, *accumulate(levels)][: len(levels)]
        self.register_buffer("starts", torch.tensor(starts, dtype=torch.int64), persistent=False)

    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        """(B, N) float, (B, C) int64 -> (B, N + U) float.

        Raises:
            IndexError: A code outside its column's range (CPU; on other devices the device asserts).
        """
        if not len(self.sizes):
            return x_num
        self._check(x_cat)
        # Position 0 takes every code 0 and is cut off.
        ones = x_num.new_zeros(len(x_cat), 1 + self.n_levels)
        ones.scatter_(1, torch.where(x_cat > 0, x_cat + self.starts, 0), 1.0)
        return torch.cat([x_num, ones[:, 1:]], dim=1)

    def _check(self, codes: Tensor) -> None:
        """A code beyond its column's range would silently switch on a level of the next column."""
        bad = (codes < 0) | (codes >= self.sizes)
        if codes.device.type != "cpu":
            torch._assert_async(~bad.any())
        elif bool(bad.any()):
            row, column = bad.nonzero()[0].tolist()
            size, found = int(self.sizes[column]), int(codes[row, column])
            raise IndexError(f"categorical column {column}: code must be in [0, {size}); found {found}")
