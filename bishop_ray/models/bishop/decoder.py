"""Learned positions read the encoder's outputs level by level; every level emits S numbers per entry of A."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bishop_ray.models.bishop.bishop_config import BlockOptions
from bishop_ray.models.bishop.block import make_block
from bishop_ray.models.bishop.hopfield import Association
from bishop_ray.models.bishop.ops import Dropout


class DecoderLevel(nn.Module):
    """A block on the decoder's cells, GSH from them to one encoder output, and the level's contribution."""

    def __init__(self, options: BlockOptions, n_patches: int, stride: int) -> None:
        super().__init__()
        d_model = options.d_model
        self.block = make_block(options, n_patches)
        self.cross = Association(options)
        self.norm_in = nn.LayerNorm(d_model)
        self.feed_forward = options.new_feed_forward(d_model)
        self.norm_out = nn.LayerNorm(d_model)
        self.emit = nn.Linear(d_model, stride)
        self.dropout = Dropout(options.dropout)

    def forward(self, x: Tensor, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """(1 or B, A, P, D) cells, (B, A, P_h, D) encoded -> (B, A, P, D) cells, (B, A, P, L) contribution."""
        x = self.block(x)
        x = self.norm_in(x + self.dropout(self.cross(x, encoded)))
        x = self.norm_out(x + self.feed_forward(x))
        return x, self.emit(x)


class Decoder(nn.Module):
    """Levels 0 to H_enc, the first on learned positions; level h reads encoder output h; contributions are summed.

    The first block sees nothing of the rows, so without dropout it is computed once for the whole batch, and with
    `shared_start` always: rows of a batch then share that block's dropout.
    """

    def __init__(
        self,
        options: BlockOptions,
        n_axis: int,
        n_patches: int,
        stride: int,
        n_levels: int,
        shared_start: bool = False,
    ) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(n_axis, n_patches, options.d_model))
        self.levels = nn.ModuleList(DecoderLevel(options, n_patches, stride) for _ in range(n_levels))
        self.shared_start = shared_start or options.dropout == 0.0

    def forward(self, encoded: list[Tensor]) -> Tensor:
        """Encoder outputs, each (B, A, P_h, D) -> (B, A, S)."""
        n_rows = encoded[0].shape[0]
        shared = self.shared_start or not self.training
        x = self.position.expand(1 if shared else n_rows, -1, -1, -1)  # (1 or B, A, P, D)
        total: Tensor | None = None
        for level, memory in zip(self.levels, encoded, strict=True):
            x, contribution = level(x, memory)
            total = contribution if total is None else total + contribution
        assert total is not None
        return total.flatten(2)  # (B, A, P * L = S)


class LinearReadout(nn.Module):
    """Without decoder: one linear map of the last encoder output (authors' code with ``d_layer = 0``)."""

    def __init__(self, n_patches: int, d_model: int, n_decoded: int) -> None:
        super().__init__()
        self.linear = nn.Linear(n_patches * d_model, n_decoded)

    def forward(self, encoded: list[Tensor]) -> Tensor:
        """Encoder outputs, each (B, A, P_h, D) -> (B, A, S)."""
        out: Tensor = self.linear(encoded[-1].flatten(2))
        return out
