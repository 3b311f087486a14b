"""ResNet: one-hot inputs -> linear layer -> residual blocks with batch norm -> head."""

from __future__ import annotations

from typing import ClassVar

from rtdl_revisiting_models import ResNet as Blocks
from torch import Tensor

from bishop_ray.data.table import TableSpec
from bishop_ray.models.base import Network, NumericKind
from bishop_ray.models.embeddings import OneHot
from bishop_ray.models.validation import check_rate, check_whole


class ResNet(Network):
    """The ResNet of Gorishniy et al. 2021 ("Revisiting Deep Learning Models for Tabular Data", section 3.2).

    Blocks and head are those of its authors' package ``rtdl_revisiting_models``: batch norm and ReLU, where Grinsztajn
    et al. 2022 also try layer norm and take ReGLU. Numbers are mapped to normal ranks, as there. Categories are
    one-hot, as the BiSHop paper has its deep baselines; Grinsztajn et al. embed them and search the width of that.

    Args:
        spec: The table.
        n_blocks: Residual blocks.
        d_block: Width between blocks.
        d_hidden_factor: Width inside a block, in units of `d_block`.
        hidden_dropout: Rate inside a block.
        residual_dropout: Rate at a block's end.

    Raises:
        ValueError: An argument out of range; the message names it.
    """

    numeric: ClassVar[NumericKind] = "quantile"

    def __init__(
        self,
        spec: TableSpec,
        *,
        n_blocks: int = 8,
        d_block: int = 256,
        d_hidden_factor: float = 2.0,
        hidden_dropout: float = 0.2,
        residual_dropout: float = 0.2,
    ) -> None:
        super().__init__()
        check_whole(1, n_blocks=n_blocks, d_block=d_block)
        check_rate(hidden_dropout=hidden_dropout, residual_dropout=residual_dropout)
        if d_block * d_hidden_factor < 1:
            raise ValueError(f"d_hidden_factor must be >= 1 / d_block = {1 / d_block:g}; found {d_hidden_factor!r}")
        self.spec = spec
        self.inputs = OneHot(spec.n_num, spec.cat_cardinalities)
        self.body = Blocks(
            d_in=self.inputs.width,
            d_out=spec.n_out,
            n_blocks=n_blocks,
            d_block=d_block,
            d_hidden_multiplier=d_hidden_factor,
            dropout1=hidden_dropout,
            dropout2=residual_dropout,
        )

    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        """(B, N), (B, C) -> (B, K); see `Network.forward`."""
        out: Tensor = self.body(self.inputs(x_num, x_cat))
        return out
