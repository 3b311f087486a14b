"""TabTransformer: embedded categories -> Transformer -> joined with the numbers -> MLP."""

from __future__ import annotations

from typing import ClassVar

import torch
from tab_transformer_pytorch.tab_transformer_pytorch import Transformer
from torch import Tensor, nn

from bishop_ray.data.table import TableSpec
from bishop_ray.models.base import Network, NumericKind
from bishop_ray.models.embeddings import CategoryEmbedding
from bishop_ray.models.validation import check_rate, check_whole


class TabTransformer(Network):
    """TabTransformer (Huang et al. 2020, "TabTransformer: Tabular Data Modeling Using Contextual Embeddings").

    Categories, not one-hot, are embedded with an eighth of the width shared by their column (appendix A), pass through
    the Transformer of ``tab_transformer_pytorch`` (without its hyper-connections: one residual stream, heads of width
    ``d_model / n_heads``) and meet the numbers in an MLP with SELU and batch norm (appendix B.1). A table without
    categories gets that MLP alone. Deviations: the library's blocks normalise before each part and gate their
    feed-forward part (the paper: after it, plain); numbers, which come standardised, are not normalised once more
    across the columns of a row, as that takes away a table's common scale, and all of a single column; no pre-training.
    The embedding of code 0 (missing or unseen) starts at zero.

    Args:
        spec: The table.
        d_model: Width of an embedded category, a multiple of `n_heads`.
        n_layers: Transformer layers.
        n_heads: Attention heads.
        first_factor: First hidden width of the MLP, in units of its input.
        second_factor: Second hidden width, in the same units.
        dropout: Rate on attention weights, in the feed-forward parts and after each hidden layer of the MLP.

    Raises:
        ValueError: An argument out of range; the message names it.
    """

    numeric: ClassVar[NumericKind] = "normal"

    def __init__(
        self,
        spec: TableSpec,
        *,
        d_model: int = 32,
        n_layers: int = 6,
        n_heads: int = 8,
        first_factor: int = 4,
        second_factor: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        check_whole(1, d_model=d_model, n_layers=n_layers, n_heads=n_heads)
        check_whole(1, first_factor=first_factor, second_factor=second_factor)
        check_rate(dropout=dropout)
        if d_model % n_heads:
            raise ValueError(f"d_model must be a multiple of n_heads ({n_heads}); found {d_model}")
        self.spec = spec
        self.categories: CategoryEmbedding | None = None
        if spec.n_cat:
            self.categories = _embedding(spec, d_model)
            self.transformer = Transformer(
                dim=d_model,
                depth=n_layers,
                heads=n_heads,
                dim_head=d_model // n_heads,
                attn_dropout=dropout,
                ff_dropout=dropout,
                num_residual_streams=1,
            )
        width = spec.n_num + spec.n_cat * d_model
        layers: list[nn.Module] = []
        last = width
        for hidden in (first_factor * width, second_factor * width):
            layers += [nn.Linear(last, hidden), nn.SELU(), nn.BatchNorm1d(hidden), nn.Dropout(dropout)]
            last = hidden
        self.head = nn.Sequential(*layers, nn.Linear(last, spec.n_out))

    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        """(B, N), (B, C) -> (B, K); see `Network.forward`."""
        x = x_num
        if self.categories is not None:
            context = self.transformer(self.categories(x_cat))  # (B, C, D)
            x = torch.cat([x_num, context.flatten(1)], dim=1)  # (B, N + C * D)
        out: Tensor = self.head(x)
        return out


@torch.no_grad()
def _embedding(spec: TableSpec, width: int) -> CategoryEmbedding:
    """Embedded categories with the row of code 0 at zero; no weight decay on them."""
    table = CategoryEmbedding(spec.cat_cardinalities, width, share_div=8)
    table.weight[table.offsets] = 0.0
    for parameter in table.parameters():
        parameter.no_weight_decay = True  # type: ignore[attr-defined]
    return table
