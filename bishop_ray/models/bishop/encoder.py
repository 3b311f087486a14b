"""Patches with learned positions, then levels of blocks, each but the first on merged patches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bishop_ray.models.bishop.bishop_config import BlockOptions
from bishop_ray.models.bishop.block import make_block


class PatchEmbedding(nn.Module):
    """Cuts T into P = ceil(T/L) patches of L, maps each to D, adds a learned position, LayerNorm.

    Where L does not divide T, the first position is repeated in front, as in the authors' code.
    """

    def __init__(self, n_axis: int, n_positions: int, stride: int, d_model: int) -> None:
        super().__init__()
        self.stride = stride
        self.pad = -n_positions % stride
        self.n_patches = (n_positions + self.pad) // stride
        self.projection = nn.Linear(stride, d_model)
        self.position = nn.Parameter(torch.randn(n_axis, self.n_patches, d_model))
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        """(B, A, T) -> (B, A, P, D)."""
        if self.pad:
            x = torch.cat([x[..., :1].expand(-1, -1, self.pad), x], dim=-1)
        patches = self.projection(x.reshape(*x.shape[:2], self.n_patches, self.stride))  # (B, A, P, D)
        out: Tensor = self.norm(patches + self.position)
        return out


class PatchMerge(nn.Module):
    """Joins r neighbouring patches: LayerNorm and a linear map of their concatenation.

    Fewer than r patches are repeated up to r; a remainder is filled with the last patches (authors' code).
    """

    def __init__(self, d_model: int, n_patches: int, n_merge: int) -> None:
        super().__init__()
        self.n_merge = n_merge
        self.n_patches = -(-n_patches // n_merge)
        self.register_buffer("source", self._source(n_patches, n_merge), persistent=False)
        self.norm = nn.LayerNorm(n_merge * d_model)
        self.linear = nn.Linear(n_merge * d_model, d_model)

    source: Tensor

    @staticmethod
    def _source(n_patches: int, n_merge: int) -> Tensor:
        """Which patch stands at each place after repeating or filling."""
        # Lists: on the meta device, where costs are predicted, tensor arithmetic of this kind imports for a second.
        if n_patches < n_merge:
            return torch.tensor([place % n_patches for place in range(n_merge)])
        missing = -n_patches % n_merge
        return torch.tensor([*range(n_patches), *range(n_patches - missing, n_patches)])

    def forward(self, x: Tensor) -> Tensor:
        """(B, A, P, D) -> (B, A, ceil(P/r), D)."""
        if len(self.source) != x.shape[2]:
            x = x[:, :, self.source]
        joined = x.reshape(*x.shape[:2], self.n_patches, self.n_merge * x.shape[3])  # (B, A, ceil(P/r), r * D)
        out: Tensor = self.linear(self.norm(joined))
        return out


class EncoderLevel(nn.Module):
    """One level: merge (not at the first level), then a block."""

    def __init__(self, options: BlockOptions, n_patches: int, n_merge: int) -> None:
        super().__init__()
        self.merge = PatchMerge(options.d_model, n_patches, n_merge) if n_merge > 1 else None
        self.n_patches = self.merge.n_patches if self.merge is not None else n_patches
        self.block = make_block(options, self.n_patches)

    def forward(self, x: Tensor) -> Tensor:
        """(B, A, P, D) -> (B, A, P', D)."""
        out: Tensor = self.block(x if self.merge is None else self.merge(x))
        return out


class Encoder(nn.Module):
    """Levels 1 to `n_levels`; level 1 keeps the P patches, every later one merges `n_merge` of them."""

    def __init__(self, options: BlockOptions, n_patches: int, n_merge: int, n_levels: int) -> None:
        super().__init__()
        levels: list[EncoderLevel] = []
        for index in range(n_levels):
            levels.append(EncoderLevel(options, n_patches, 1 if index == 0 else n_merge))
            n_patches = levels[-1].n_patches
        self.levels = nn.ModuleList(levels)
        self.n_patches = n_patches

    def forward(self, x: Tensor) -> list[Tensor]:
        """(B, A, P, D) -> the input and the output of each level, each (B, A, P_h, D)."""
        outputs = [x]
        for level in self.levels:
            outputs.append(level(outputs[-1]))
        return outputs
