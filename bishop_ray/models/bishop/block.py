"""The bi-directional block: within each entry of A across its patches, then across A at each patch position."""

from __future__ import annotations

from torch import Tensor, nn

from bishop_ray.models.bishop.bishop_config import BlockOptions
from bishop_ray.models.bishop.hopfield import Association, GSHPooling
from bishop_ray.models.bishop.ops import Dropout

MODULES = ("bishop", "mlp")
"""Kinds of block; "mlp" is the ablation without BiSHopModule."""
_ABLATION_WIDTH = 512


class _Tail(nn.Module):
    """Residual, LayerNorm, feed-forward with residual, LayerNorm: the second half of both directions (section 3.2)."""

    def __init__(self, options: BlockOptions) -> None:
        super().__init__()
        self.norm_in = nn.LayerNorm(options.d_model)
        self.feed_forward = options.new_feed_forward()
        self.norm_out = nn.LayerNorm(options.d_model)
        self.dropout = Dropout(options.dropout)

    def forward(self, cells: Tensor, found: Tensor) -> Tensor:
        """Cells and what was found for them, both (..., D) -> (..., D)."""
        x = self.norm_in(cells + self.dropout(found))
        out: Tensor = self.norm_out(x + self.dropout(self.feed_forward(x)))
        return out


class ColumnBlock(nn.Module):
    """Column-wise block: GSH self-association over the P patches of each entry of A."""

    def __init__(self, options: BlockOptions) -> None:
        super().__init__()
        self.association = Association(options)
        self.tail = _Tail(options)

    def forward(self, x: Tensor) -> Tensor:
        """(B, A, P, D) -> (B, A, P, D)."""
        out: Tensor = self.tail(x, self.association(x, x))
        return out


class RowBlock(nn.Module):
    """Row-wise block: M prototypes pool the A cells of a patch position, the cells read the M summaries."""

    def __init__(self, options: BlockOptions, n_patches: int) -> None:
        super().__init__()
        self.pool = GSHPooling(options, n_patches)
        self.association = Association(options)
        self.tail = _Tail(options)

    def forward(self, x: Tensor) -> Tensor:
        """(B, A, P, D) -> (B, A, P, D)."""
        cells = x.transpose(1, 2).contiguous()  # (B, P, A, D)
        out: Tensor = self.tail(cells, self.association(cells, self.pool(cells)))
        return out.transpose(1, 2)  # (B, A, P, D)


class BiSHopModule(nn.Module):
    """Column-wise, then row-wise (paper, section "Bi-Directional Sparse Hopfield Module")."""

    def __init__(self, options: BlockOptions, n_patches: int) -> None:
        super().__init__()
        self.column = ColumnBlock(options)
        self.row = RowBlock(options, n_patches)

    def forward(self, x: Tensor) -> Tensor:
        """(B, A, P, D) -> (B, A, P, D)."""
        out: Tensor = self.row(self.column(x))
        return out


class CellMLP(nn.Module):
    """Ablation "w/o BiSHopModule": an MLP of hidden width 512 on every cell alone, with residual and LayerNorm."""

    def __init__(self, options: BlockOptions) -> None:
        super().__init__()
        self.feed_forward = options.new_feed_forward(_ABLATION_WIDTH)
        self.norm = nn.LayerNorm(options.d_model)
        self.dropout = Dropout(options.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, A, P, D) -> (B, A, P, D)."""
        out: Tensor = self.norm(x + self.dropout(self.feed_forward(x)))
        return out


def make_block(options: BlockOptions, n_patches: int) -> nn.Module:
    """The block that ``options.module`` names, for `n_patches` patches."""
    return CellMLP(options) if options.module == "mlp" else BiSHopModule(options, n_patches)
