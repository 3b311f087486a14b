"""SAINT: attention between the cells of a row, and between rows.

Letters: B rows, M context rows, N numerical and C categorical columns, F = 1 + N + C cells of a row (the readout
first), D width of a cell, H heads, W width of a head, K outputs.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bishop_ray.data.table import Table, TableSpec
from bishop_ray.models.base import Network, NumericKind
from bishop_ray.models.embeddings import CategoryEmbedding

_WIDE, _WIDE_CELL, _HIDDEN, _HEAD = 100, 8, 100, 1000
_PIECE = 1 << 26
"""Numbers in the largest activation outside training: a wide table's rows are predicted in pieces."""
Memory = tuple[Tensor, Tensor]
"""Keys and values of the context rows in one layer, (H, M, W) each."""


class SAINT(Network):
    """Self-attention and intersample attention transformer (Somepalli et al., 2021), trained on the labels only.

    A layer is attention over a row's cells, a feed-forward part per cell, attention over rows (each row flattened to
    one vector), a feed-forward part per row; the readout's cell goes to an MLP. In training the rows of a batch attend
    to each other. A prediction must not depend on the rows that happen to be asked for together: outside training each
    row attends to itself and to a fixed sample of training rows, which `observe` keeps in buffers and which attend only
    to each other. Validation sees the same mode. So the saved state holds up to `n_context` encoded training rows,
    without targets.

    Numbers come as normal quantiles, as in the benchmark whose space is searched (the paper standardises); categories
    have embeddings (no one-hot input).

    Deviations: no contrastive pre-training. The flattened row's feed-forward part has at most `row_ff_max` hidden
    units: four times the row's width, as in the authors' code, means 3 * 10^8 weights at 40 columns of width 128.
    Residuals skip the normalisation, which their code also applies to the skipped branch. As in their code, cells are
    at most 8 wide on tables of more than 100 columns.

    Args:
        spec: The table.
        depth: Layers.
        dim: D.
        heads: H; a head is 16 wide over cells, 64 over rows.
        dropout: Rate inside the feed-forward parts (attention weights have none, as in the authors' code).
        n_context: M, best near the batch size.
        row_ff_max: See above.

    Raises:
        ValueError: An argument out of range; the message names it.
    """

    numeric: ClassVar[NumericKind] = "quantile"

    context_num: Tensor
    context_cat: Tensor
    absent: Tensor

    def __init__(
        self,
        spec: TableSpec,
        *,
        depth: int = 1,
        dim: int = 32,
        heads: int = 4,
        dropout: float = 0.1,
        n_context: int = 128,
        row_ff_max: int = 512,
    ) -> None:
        super().__init__()
        sizes = {"depth": depth, "dim": dim, "heads": heads, "n_context": n_context, "row_ff_max": row_ff_max}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be >= 1; found {value}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1); found {dropout}")
        self.spec = spec
        width = min(dim, _WIDE_CELL) if spec.n_num + spec.n_cat > _WIDE else dim
        n_cells = 1 + spec.n_num + spec.n_cat
        self.cells = Cells(spec, width)
        self.layers = nn.ModuleList(Layer(n_cells, width, heads, dropout, row_ff_max) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, _HEAD), nn.ReLU(), nn.Linear(_HEAD, spec.n_out))
        self.register_buffer("context_num", torch.zeros(n_context, spec.n_num))
        self.register_buffer("context_cat", torch.zeros(n_context, spec.n_cat, dtype=torch.int64))
        self.register_buffer("absent", torch.ones(n_context, dtype=torch.bool))
        self._piece = max(1, _PIECE // (n_cells * width * 8))

    def observe(self, train: Table) -> None:
        """Keeps a fixed sample of the training rows as context; all of them where there are no more."""
        kept = np.sort(np.random.default_rng(0).permutation(len(train))[: len(self.absent)])
        self.context_num[: len(kept)] = torch.as_tensor(train.x_num[kept])
        self.context_cat[: len(kept)] = torch.as_tensor(train.x_cat[kept])
        self.absent.copy_(torch.arange(len(self.absent)) >= len(kept))

    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        """(B, N), (B, C) -> (B, K); see `Network.forward`."""
        if self.training:
            return self._read(x_num, x_cat)[0]
        _, memories = self._read(self.context_num, self.context_cat, self.absent)
        pieces = zip(torch.split(x_num, self._piece), torch.split(x_cat, self._piece), strict=True)
        return torch.cat([self._read(num, cat, self.absent, memories)[0] for num, cat in pieces])

    def _read(
        self, x_num: Tensor, x_cat: Tensor, absent: Tensor | None = None, memories: list[Memory] | None = None
    ) -> tuple[Tensor, list[Memory]]:
        """(B, N), (B, C) -> (B, K), and per layer the rows' own keys and values; see `RowAttention`."""
        x, own = self.cells(x_num, x_cat), []  # (B, F, D)
        for level, layer in enumerate(self.layers):
            x, memory = layer(x, absent, None if memories is None else memories[level])
            own.append(memory)
        return self.head(x[:, 0]), own


class Cells(nn.Module):
    """A vector per cell: the readout's own, each number through its own small MLP, embedded categories.

    Args:
        spec: The table.
        width: D.
    """

    def __init__(self, spec: TableSpec, width: int) -> None:
        super().__init__()
        self.readout = nn.Parameter(torch.randn(width))
        bound = _HIDDEN**-0.5
        self.scale = nn.Parameter(torch.empty(spec.n_num, _HIDDEN).uniform_(-1, 1))
        self.shift = nn.Parameter(torch.empty(spec.n_num, _HIDDEN).uniform_(-1, 1))
        self.weight = nn.Parameter(torch.empty(spec.n_num, _HIDDEN, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(spec.n_num, width).uniform_(-bound, bound))
        self.categories: CategoryEmbedding | None = None
        if spec.n_cat:
            self.categories = CategoryEmbedding(spec.cat_cardinalities, width, share_div=0)
            with torch.no_grad():
                # An unseen level keeps its start: better nothing than a random vector.
                self.categories.weight[self.categories.offsets] = 0.0

    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        """(B, N), (B, C) -> (B, F, D)."""
        hidden = torch.relu(x_num.unsqueeze(-1) * self.scale + self.shift)  # (B, N, 100)
        numbers = torch.einsum("bnh,nhd->bnd", hidden, self.weight) + self.bias
        parts = [self.readout.expand(len(x_num), 1, -1), numbers]
        if self.categories is not None:
            parts.append(self.categories(x_cat))
        return torch.cat(parts, dim=1)


class Layer(nn.Module):
    """Attention over cells, feed-forward per cell, attention over rows, feed-forward per row (paper, section 3.1).

    Args:
        n_cells: F.
        width: D.
        heads: H.
        dropout: Rate.
        row_ff_max: Bound of the last part's hidden width.
    """

    def __init__(self, n_cells: int, width: int, heads: int, dropout: float, row_ff_max: int) -> None:
        super().__init__()
        row = n_cells * width
        self.cell_attention = CellAttention(width, heads)
        self.cell_ff = _feed_forward(width, 4 * width, dropout)
        self.row_attention = RowAttention(row, heads)
        self.row_ff = _feed_forward(row, min(4 * row, row_ff_max), dropout)

    def forward(self, x: Tensor, absent: Tensor | None, memory: Memory | None) -> tuple[Tensor, Memory]:
        """(B, F, D) -> the same shape, and the rows' own keys and values; see `RowAttention`."""
        x = x + self.cell_attention(x)
        x = x + self.cell_ff(x)
        rows = x.flatten(1)  # (B, F * D)
        seen, own = self.row_attention(rows, absent, memory)
        rows = rows + seen
        rows = rows + self.row_ff(rows)
        return rows.view_as(x), own


class CellAttention(nn.Module):
    """Pre-normalised multi-head attention over the cells of each row, heads 16 wide: (B, F, D) -> (B, F, D)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * heads * 16, bias=False)
        self.out = nn.Linear(heads * 16, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, F, D) -> (B, F, D)."""
        qkv = self.project(self.norm(x)).view(*x.shape[:2], 3, self.heads, 16)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, F, 16) each
        seen = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return out


class RowAttention(nn.Module):
    """Pre-normalised multi-head attention over rows of width F * D, heads 64 wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * heads * 64, bias=False)
        self.out = nn.Linear(heads * 64, width)

    def forward(self, x: Tensor, absent: Tensor | None, memory: Memory | None) -> tuple[Tensor, Memory]:
        """What each row gets from others, (B, F * D), and its own keys and values.

        Args:
            x: (B, F * D).
            absent: (M,), True where the attended row is a filler; None: all count.
            memory: Rows to attend to beside oneself; None: the rows of `x`, oneself among them.
        """
        q, k, v = self.project(self.norm(x)).view(len(x), 3, self.heads, 64).permute(1, 2, 0, 3)  # (H, B, 64) each
        keys, values = (k, v) if memory is None else memory
        scores = q @ keys.transpose(1, 2)  # (H, B, M)
        if absent is not None:
            scores = scores.masked_fill(absent, -1e9)  # finite: before `observe` all rows are absent
        if memory is not None:
            scores = torch.cat([scores, (q * k).sum(-1, keepdim=True)], dim=-1)
        weights = torch.softmax(scores / 8, dim=-1)
        seen = weights[..., : values.shape[1]] @ values
        if memory is not None:
            seen = seen + weights[..., -1:] * v
        return self.out(seen.transpose(0, 1).flatten(1)), (k, v)


class _GEGLU(nn.Module):
    """(..., 2 n) -> (..., n): the first half gated by the second."""

    def forward(self, x: Tensor) -> Tensor:
        value, gate = x.chunk(2, dim=-1)
        return value * F.gelu(gate)


def _feed_forward(width: int, hidden: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 2 * hidden), _GEGLU(), nn.Dropout(dropout), nn.Linear(hidden, width)
    )
