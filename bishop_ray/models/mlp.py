"""MLP: one-hot inputs -> blocks of linear layer, ReLU and dropout -> linear head."""

from __future__ import annotations

from typing import ClassVar

from rtdl_revisiting_models import MLP as Blocks
from torch import Tensor

from bishop_ray.data.table import TableSpec
from bishop_ray.models.base import Network, NumericKind
from bishop_ray.models.embeddings import OneHot
from bishop_ray.models.validation import check_rate, check_whole


class MLP(Network):
    """The MLP of Gorishniy et al. 2021 ("Revisiting Deep Learning Models for Tabular Data", section 3.1).

    Blocks and head are those of its authors' package ``rtdl_revisiting_models``. Numbers are mapped to normal ranks, as
    in Grinsztajn et al. 2022. Categories are one-hot, as the BiSHop paper has its deep baselines; Grinsztajn et al.
    embed them instead and search the width of that.

    Args:
        spec: The table.
        n_blocks: Hidden layers.
        d_block: Their width.
        dropout: Rate after each.

    Raises:
        ValueError: An argument out of range; the message names it.
    """

    numeric: ClassVar[NumericKind] = "quantile"

    def __init__(self, spec: TableSpec, *, n_blocks: int = 4, d_block: int = 256, dropout: float = 0.0) -> None:
        super().__init__()
        check_whole(1, n_blocks=n_blocks, d_block=d_block)
        check_rate(dropout=dropout)
        self.spec = spec
        self.inputs = OneHot(spec.n_num, spec.cat_cardinalities)
        self.body = Blocks(
            d_in=self.inputs.width, d_out=spec.n_out, n_blocks=n_blocks, d_block=d_block, dropout=dropout
        )

    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        """(B, N), (B, C) -> (B, K); see `Network.forward`."""
        out: Tensor = self.body(self.inputs(x_num, x_cat))
        return out
