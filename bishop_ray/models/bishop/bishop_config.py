"""What every block of one BiSHop shares."""

from __future__ import annotations

from dataclasses import dataclass

from bishop_ray.models.bishop.entmax import Activation, make_activation
from bishop_ray.models.bishop.ops import FeedForward


@dataclass(frozen=True)
class BlockOptions:
    """Sizes and switches of the blocks; `BiSHop` documents and checks them.

    Attributes:
        d_model: D.
        n_heads: H; each head is ``d_model // n_heads`` wide.
        d_ff: Hidden width of the feed-forward parts.
        n_pool: M.
        dropout: Rate on association weights and on what enters a residual sum.
        activation: Name of `make_activation`.
        fixed_alpha: α of "entmax_fixed".
        free_alpha: The parameter is α itself.
        hopfield_values: Values are projected keys (K W_V); otherwise projected memories, as in plain attention.
        mix_heads: The authors' flattening, see `Association`.
        pool_query_projection: Prototypes pass a query projection.
        module: "bishop" or "mlp".
    """

    d_model: int
    n_heads: int
    d_ff: int
    n_pool: int
    dropout: float = 0.0
    activation: str = "entmax"
    fixed_alpha: float = 1.5
    free_alpha: bool = False
    hopfield_values: bool = True
    mix_heads: bool = False
    pool_query_projection: bool = True
    module: str = "bishop"

    @property
    def d_head(self) -> int:
        """Width of one head."""
        return self.d_model // self.n_heads

    @property
    def d_heads(self) -> int:
        """Width of all heads together; smaller than D where H does not divide it."""
        return self.d_head * self.n_heads

    def new_activation(self) -> Activation:
        """A fresh activation: each association learns its own α."""
        return make_activation(self.activation, self.fixed_alpha, self.free_alpha)

    def new_feed_forward(self, d_hidden: int | None = None) -> FeedForward:
        """D -> `d_hidden` (default ``d_ff``) -> D with GELU."""
        return FeedForward(self.d_model, d_hidden or self.d_ff)
