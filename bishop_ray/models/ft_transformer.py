"""FT-Transformer: one token per column and one for the whole row -> Transformer -> head on the latter."""

from __future__ import annotations

from typing import ClassVar

import torch
from rtdl_revisiting_models import FTTransformer as Tokens
from torch import Tensor, nn

from bishop_ray.data.table import TableSpec
from bishop_ray.models.base import Network, NumericKind
from bishop_ray.models.validation import check_rate, check_whole


class FTTransformer(Network):
    """The FT-Transformer of Gorishniy et al. 2021 ("Revisiting Deep Learning Models for Tabular Data", section 3.3).

    The network is that of its authors' package ``rtdl_revisiting_models``: a learned token per number (scaled by it)
    and per category, so no one-hot inputs; PreNorm without the first norm, ReGLU. Numbers are mapped to normal ranks,
    as in both that paper and Grinsztajn et al. 2022. As in the paper, token weights have no weight decay. The token of
    code 0 (missing or unseen) starts at zero, so that a level training never met adds nothing but the column's bias.

    Args:
        spec: The table.
        n_blocks: Transformer blocks.
        d_token: Width of a token, a multiple of `n_heads`.
        n_heads: Attention heads.
        d_ffn_factor: Hidden width of a block's feed-forward part, in units of `d_token`.
        attention_dropout: Rate on attention weights.
        ffn_dropout: Rate inside the feed-forward part.
        residual_dropout: Rate at the end of each residual branch.

    Raises:
        ValueError: An argument out of range; the message names it.
    """

    numeric: ClassVar[NumericKind] = "quantile"

    def __init__(
        self,
        spec: TableSpec,
        *,
        n_blocks: int = 3,
        d_token: int = 192,
        n_heads: int = 8,
        d_ffn_factor: float = 4 / 3,
        attention_dropout: float = 0.2,
        ffn_dropout: float = 0.1,
        residual_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_whole(1, n_blocks=n_blocks, d_token=d_token, n_heads=n_heads)
        check_rate(attention_dropout=attention_dropout, ffn_dropout=ffn_dropout, residual_dropout=residual_dropout)
        if d_token % n_heads:
            raise ValueError(f"d_token must be a multiple of n_heads ({n_heads}); found {d_token}")
        if d_token * d_ffn_factor < 1:
            raise ValueError(f"d_ffn_factor must be >= 1 / d_token = {1 / d_token:g}; found {d_ffn_factor!r}")
        self.spec = spec
        self.body = Tokens(
            n_cont_features=spec.n_num,
            cat_cardinalities=list(spec.cat_cardinalities),
            d_out=spec.n_out,
            n_blocks=n_blocks,
            d_block=d_token,
            attention_n_heads=n_heads,
            attention_dropout=attention_dropout,
            ffn_d_hidden_multiplier=d_ffn_factor,
            ffn_dropout=ffn_dropout,
            residual_dropout=residual_dropout,
        )
        self._start_tokens()

    @torch.no_grad()
    def _start_tokens(self) -> None:
        for name, module in self.body.named_children():
            for parameter in module.parameters() if name.endswith(("_embedding", "_embeddings")) else ():
                parameter.no_weight_decay = True
        for table in self.body.modules():
            if isinstance(table, nn.Embedding):
                table.weight[0] = 0.0

    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        """(B, N), (B, C) -> (B, K); see `Network.forward`."""
        out: Tensor = self.body(x_num if self.spec.n_num else None, x_cat if self.spec.n_cat else None)
        return out
