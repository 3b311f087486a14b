"""Embeddings of numeric and categorical columns shared by networks; one-hot encoding.

Letters: B rows, R training rows, N numerical columns, C categorical columns, E embedding width.

Letters: B rows, N numerical columns, C categorical columns, U levels of all categorical columns together.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bishop_ray._compat.torch import assert_async

_OVERFLOW = 1e9


def quantile_edges(values: NDArray[np.floating], n_bins: int) -> NDArray[np.float64]:
    """Edges of `n_bins` bins of equal share per column, linear interpolation, computed in float64.

    Args:
        values: (R, N), R >= 1.
        n_bins: E.

    Returns:
        (N, E + 1), ascending; the first and last edge are the column's minimum and maximum.

    Raises:
        ValueError: No rows, or a value that is NaN or infinite.
    """
    if len(values) == 0:
        raise ValueError("quantile edges need at least one training row; found none")
    shares = np.linspace(0.0, 1.0, n_bins + 1)
    edges = np.empty((values.shape[1], n_bins + 1))
    # By column: the table may be as large as memory, a float64 copy of it twice that.
    for index in range(values.shape[1]):
        column = values[:, index].astype(np.float64)
        if not np.isfinite(column).all():
            raise ValueError("quantile edges need finite numbers; found NaN or infinity")
        edges[index] = np.maximum.accumulate(np.quantile(column, shares, overwrite_input=True))
    return edges


class PiecewiseLinear(nn.Module):
    """Piecewise-linear encoding (paper, "Numerical Embedding"; Gorishniy et al. 2022): e_g in [0, 1] inside bin g.

    A bin without width is a step at its edge. With `extrapolate` the first bin is not bounded below and the last not
    above (the paper's equation); otherwise all are bounded (the authors' code). Edges are a buffer: they travel with
    the state.

    Args:
        n_columns: N.
        n_bins: E.
        extrapolate: See above.
    """

    edges: Tensor
    lowest: Tensor
    highest: Tensor

    def __init__(self, n_columns: int, n_bins: int, extrapolate: bool = True) -> None:
        super().__init__()
        # A list: on the meta device, where costs are predicted, `linspace` imports for a third of a second.
        start = torch.tensor([place / n_bins for place in range(n_bins + 1)]).expand(n_columns, -1).clone()
        self.register_buffer("edges", start)
        lowest, highest = torch.zeros(n_bins), torch.ones(n_bins)
        if extrapolate:
            # Bounds that only keep float32 from overflowing where a narrow end bin meets a distant value.
            lowest[0], highest[-1] = -_OVERFLOW, _OVERFLOW
        self.register_buffer("lowest", lowest, persistent=False)
        self.register_buffer("highest", highest, persistent=False)

    def observe(self, values: NDArray[np.floating]) -> None:
        """Takes the bin edges from (R, N) training values.

        Raises:
            ValueError: As `quantile_edges`.
        """
        edges = quantile_edges(values, self.edges.shape[1] - 1)
        self.edges.copy_(torch.from_numpy(edges))

    def forward(self, x: Tensor) -> Tensor:
        """(B, N) -> (B, N, E)."""
        left, right = self.edges[:, :-1], self.edges[:, 1:]
        width = right - left
        x = x.unsqueeze(-1)  # (B, N, 1)
        # Below the resolution of the edges a width is rounding noise.
        flat = width <= 4 * torch.finfo(width.dtype).eps * torch.maximum(left.abs(), right.abs())
        inside = (x - left) / width.masked_fill(flat, 1.0)
        bounded = torch.minimum(torch.maximum(inside, self.lowest), self.highest)
        return torch.where(flat, (x >= left).to(x.dtype), bounded)


class CategoryEmbedding(nn.Module):
    """One table per column, packed into a single matrix with offsets: (B, C) codes -> (B, C, E).

    With ``share_div`` > 0 the last ``E // share_div`` positions are a learned vector of the column, the same for all
    its categories (TabTransformer's column embedding; the paper names the shared part first, its code puts it last).
    ``share_div=0`` is a plain table per column.

    Args:
        cardinalities: Rows per column, code 0 (unknown or missing) counted.
        width: E.
        share_div: See above.
        std: Standard deviation of the normal start, truncated at two deviations. The authors' 0.01 is lost below the
            learned positions, which start at 1: a table of 359 categorical columns then learned nothing in 6 epochs.
    """

    sizes: Tensor
    offsets: Tensor

    def __init__(self, cardinalities: tuple[int, ...], width: int, share_div: int = 8, std: float = 1.0) -> None:
        super().__init__()
        n_shared = width // share_div if share_div else 0
        self.register_buffer("sizes", torch.tensor(cardinalities), persistent=False)
        starts = [0, *accumulate(cardinalities)][:-1]
        self.register_buffer("offsets", torch.tensor(starts), persistent=False)
        self.weight = nn.Parameter(torch.empty(sum(cardinalities), width - n_shared))
        self.shared = nn.Parameter(torch.empty(len(cardinalities), n_shared)) if n_shared else None
        for table in self.parameters():
            nn.init.trunc_normal_(table, std=std, a=-2 * std, b=2 * std)

    def forward(self, codes: Tensor) -> Tensor:
        """(B, C) int64 -> (B, C, E).

        Raises:
            IndexError: A code outside its column's table (CPU; on other devices the device asserts).
        """
        self._check(codes)
        rows = nn.functional.embedding(codes + self.offsets, self.weight)
        if self.shared is None:
            return rows
        return torch.cat([rows, self.shared.expand(len(codes), -1, -1)], dim=-1)

    def _check(self, codes: Tensor) -> None:
        """A code beyond its table would silently read the next column's rows."""
        bad = (codes < 0) | (codes >= self.sizes)
        if codes.device.type != "cpu":
            assert_async(~bad.any())
        elif bool(bad.any()):
            row, column = bad.nonzero()[0].tolist()
            found = int(codes[row, column])
            raise IndexError(
                f"categorical column {column}: code must be in [0, {int(self.sizes[column])}); found {found}"
            )


class RepeatedNumber(nn.Module):
    """Numbers as they are, at every position of the embedding (ablation without numerical embedding)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """(B, N) -> (B, N, E)."""
        return x.unsqueeze(-1).expand(-1, -1, self.width)


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
            assert_async(~bad.any())
        elif bool(bad.any()):
            row, column = bad.nonzero()[0].tolist()
            size, found = int(self.sizes[column]), int(codes[row, column])
            raise IndexError(f"categorical column {column}: code must be in [0, {size}); found {found}")
