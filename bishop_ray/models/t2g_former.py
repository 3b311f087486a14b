"""T2G-Former: features exchange information along a learned graph, a readout node collects it level by level.

Letters: B rows, N numerical and C categorical columns, F = 1 + N + C nodes (the readout first), Q querying nodes,
D model width, H heads, K outputs.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bishop_ray.data.table import TableSpec
from bishop_ray.models.base import Network, NumericKind
from bishop_ray.models.embeddings import CategoryEmbedding
from bishop_ray.models.step_tracer import recomputed

_WEIGHTS = 1 << 24
"""Attention weights of one layer at a time: rows of a wide table pass in pieces, computed again for their gradients."""


class T2GFormer(Network):
    """T2G-Former (Yan et al., AAAI 2023): tokens, graph-estimated attention blocks, cross-level readout, linear head.

    Numbers come as normal quantiles, as in the authors' experiments and the BiSHop paper's; categories have embeddings
    (no one-hot input). Pre-normalisation, ReGLU and the starting distributions follow the authors' code.

    Deviations: a head is ``d_embedding // n_heads`` wide, so that every width of the printed space builds (the authors
    step by 8). A node without any edge collects nothing; in the authors' code it collects from all nodes alike. The
    topology's gradient misses their factor 10,000, which Adam cancels but the clipping of gradients would not. Key
    compression and freezing the topology late, options that are off in their code, are left out.

    Args:
        spec: The table.
        n_layers: Blocks.
        d_embedding: D.
        n_heads: H, at most D.
        residual_dropout: Rate at the end of both residual branches.
        attention_dropout: Rate of the graph's weights.
        ffn_dropout: Rate inside the feed-forward parts.
        ffn_factor: Hidden width of the feed-forward parts, in D.
        embedding_lr: Learning rate of the column embeddings that make the topology.

    Raises:
        ValueError: An argument out of range; the message names it.
    """

    numeric: ClassVar[NumericKind] = "quantile"

    def __init__(
        self,
        spec: TableSpec,
        *,
        n_layers: int = 3,
        d_embedding: int = 192,
        n_heads: int = 8,
        residual_dropout: float = 0.0,
        attention_dropout: float = 0.2,
        ffn_dropout: float = 0.1,
        ffn_factor: float = 4 / 3,
        embedding_lr: float = 1e-2,
    ) -> None:
        super().__init__()
        _check(n_layers, d_embedding, n_heads, ffn_factor, embedding_lr)
        for name, rate in (("residual", residual_dropout), ("attention", attention_dropout), ("ffn", ffn_dropout)):
            if not 0 <= rate < 1:
                raise ValueError(f"{name}_dropout must lie in [0, 1); found {rate}")
        self.spec, self.n_heads = spec, n_heads
        self.tokens = Tokens(spec, d_embedding)
        n_nodes = 1 + spec.n_num + spec.n_cat
        self.blocks = nn.ModuleList()
        for level in range(n_layers):
            attention = GraphAttention(n_nodes, d_embedding, n_heads, attention_dropout, embedding_lr)
            d_hidden = int(d_embedding * ffn_factor)
            self.blocks.append(Block(attention, d_hidden, ffn_dropout, residual_dropout, first=level == 0))
        self.head = nn.Sequential(nn.LayerNorm(d_embedding), nn.ReLU(), nn.Linear(d_embedding, spec.n_out))

    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        """(B, N), (B, C) -> (B, K); see `Network.forward`."""
        step = max(1, _WEIGHTS // (self.n_heads * (1 + self.spec.n_num + self.spec.n_cat) ** 2))
        pieces = zip(torch.split(x_num, step), torch.split(x_cat, step), strict=True)
        if len(x_num) <= step or not torch.is_grad_enabled():
            return torch.cat([self._forward(*piece) for piece in pieces])
        return torch.cat([recomputed(self._forward, *piece) for piece in pieces])

    def _forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        x = self.tokens(x_num, x_cat)  # (B, F, D)
        for level, block in enumerate(self.blocks, 1):
            # Nothing but the readout is read from the last block.
            x = block(x, 1 if level == len(self.blocks) else x.shape[1])  # (B, Q, D)
        out: Tensor = self.head(x[:, 0])
        return out

    def topology(self) -> list[Tensor]:
        """Per block (H, F, F) bool: whether a node (row) collects from another (column)."""
        return [block.attention.edges() for block in self.blocks if isinstance(block, Block)]

    def diagnostics(self) -> dict[str, float]:
        """``edges/LEVEL``: share of the possible edges that are on."""
        possible = max(1, self.n_heads * (self.spec.n_num + self.spec.n_cat) ** 2)
        return {f"edges/{i}": float(edges.sum()) / possible for i, edges in enumerate(self.topology(), 1)}


class Tokens(nn.Module):
    """A vector per node: the readout's own, numbers times a vector, embedded categories; columns have a bias.

    Args:
        spec: The table.
        width: D.
    """

    def __init__(self, spec: TableSpec, width: int) -> None:
        super().__init__()
        bound = width**-0.5
        self.readout = nn.Parameter(torch.empty(width).uniform_(-bound, bound))
        self.numbers = nn.Parameter(torch.empty(spec.n_num, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(spec.n_num + spec.n_cat, width).uniform_(-bound, bound))
        self.categories: CategoryEmbedding | None = None
        if spec.n_cat:
            self.categories = CategoryEmbedding(spec.cat_cardinalities, width, share_div=0, std=bound / 3**0.5)
            with torch.no_grad():
                # Unseen levels have nothing but their column's bias, not a random vector.
                self.categories.weight[self.categories.offsets] = 0.0
        for parameter in self.parameters():
            parameter.no_weight_decay = True  # type: ignore[attr-defined]

    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        """(B, N), (B, C) -> (B, F, D)."""
        columns = x_num.unsqueeze(-1) * self.numbers  # (B, N, D)
        if self.categories is not None:
            columns = torch.cat([columns, self.categories(x_cat)], dim=1)
        return torch.cat([self.readout.expand(len(x_num), 1, -1), columns + self.bias], dim=1)


class Block(nn.Module):
    """Graph attention and a ReGLU feed-forward part, each normalised before and added to what it got.

    Args:
        attention: The graph attention.
        d_hidden: Hidden width of the feed-forward part.
        ffn_dropout: Rate inside it.
        residual_dropout: Rate after both parts.
        first: The first block does not normalise its input (authors' code).
    """

    def __init__(
        self, attention: GraphAttention, d_hidden: int, ffn_dropout: float, residual_dropout: float, *, first: bool
    ) -> None:
        super().__init__()
        width = attention.width
        self.attention = attention
        self.norm = nn.Identity() if first else nn.LayerNorm(width)
        self.ffn_norm = nn.LayerNorm(width)
        self.expand, self.shrink = nn.Linear(width, 2 * d_hidden), nn.Linear(d_hidden, width)
        self.ffn_dropout, self.residual_dropout = nn.Dropout(ffn_dropout), nn.Dropout(residual_dropout)

    def forward(self, x: Tensor, n_queries: int) -> Tensor:
        """(B, F, D) -> the first `n_queries` nodes after the block, (B, Q, D)."""
        x = x[:, :n_queries] + self.residual_dropout(self.attention(self.norm(x), n_queries))
        value, gate = self.expand(self.ffn_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.residual_dropout(self.shrink(self.ffn_dropout(value * torch.relu(gate))))
        return out


class GraphAttention(nn.Module):
    """Attention along the edges of an FR-Graph (paper, section "Graph Estimator").

    Edge weights depend on the row: ``head(x_i) diag(r) head(x_j)`` with a learned relation r per head (symmetric, one
    projection for both ends). Which edges exist does not: the cosine of two column embeddings, plus a bias, through a
    sigmoid, must exceed 1/2. No node has an edge from itself, none from the readout. The softmax goes over the edges
    that exist. The threshold passes gradients straight through.

    Args:
        n_nodes: F.
        width: D.
        n_heads: H.
        dropout: Rate of the weights.
        embedding_lr: Learning rate of the column embeddings.
    """

    possible: Tensor

    def __init__(self, n_nodes: int, width: int, n_heads: int, dropout: float, embedding_lr: float) -> None:
        super().__init__()
        self.width, self.n_heads, self.d_head = width, n_heads, width // n_heads
        d_inner = n_heads * self.d_head
        self.ends, self.values = nn.Linear(width, d_inner), nn.Linear(width, d_inner)
        self.out = nn.Linear(d_inner, width)
        for layer in (self.ends, self.values, self.out):
            nn.init.zeros_(layer.bias)
        self.relation = nn.Parameter(torch.ones(n_heads, 1, self.d_head))
        self.dropout = nn.Dropout(dropout)
        d_column = math.ceil(2 * math.log2(n_nodes))
        self.column_heads = nn.Parameter(torch.randn(n_heads, n_nodes, d_column))
        self.column_tails = nn.Parameter(torch.randn(n_heads, n_nodes, d_column))
        self.bias = nn.Parameter(torch.zeros(1))
        for embedding in (self.column_heads, self.column_tails):
            embedding.learning_rate = embedding_lr  # type: ignore[attr-defined]
            embedding.no_weight_decay = True  # type: ignore[attr-defined]
        possible = ~torch.eye(n_nodes, dtype=torch.bool)
        possible[:, 0] = False
        self.register_buffer("possible", possible, persistent=False)
        self._open_readout()

    @torch.no_grad()
    def _open_readout(self) -> None:
        """Turns the readout's embedding round where it starts without edges: such a head would never see a column."""
        isolated = ~self.edges()[:, 0].any(dim=-1)  # (H,)
        self.column_heads[:, 0] *= torch.where(isolated, -1.0, 1.0)[:, None]

    def probabilities(self) -> Tensor:
        """Sigmoid of the topology's scores, (H, F, F), also where no edge is possible."""
        heads, tails = F.normalize(self.column_heads, dim=-1), F.normalize(self.column_tails, dim=-1)
        return torch.sigmoid(heads @ tails.transpose(1, 2) + self.bias)

    def edges(self) -> Tensor:
        """(H, F, F) bool: node i (row) collects from node j (column)."""
        return (self.probabilities() > 0.5) & self.possible

    def forward(self, x: Tensor, n_queries: int) -> Tensor:
        """(B, F, D) -> what the first `n_queries` nodes collect, (B, Q, D)."""
        shape = (*x.shape[:2], self.n_heads, self.d_head)
        ends, values = (part(x).view(shape).transpose(1, 2) for part in (self.ends, self.values))  # (B, H, F, D / H)
        soft = self.probabilities()[:, :n_queries]
        edges = (soft > 0.5) & self.possible[:n_queries]  # (H, Q, F)
        some = edges.any(dim=-1, keepdim=True)
        # 0 at every edge that exists, with the gradient of log(edge) at edge = 1, straight through. A node without
        # edges keeps finite scores, so that its softmax has gradients; what it collects is dropped below.
        mask = (soft - soft.detach()).masked_fill(some & ~edges, -math.inf)
        queries = ends[:, :, :n_queries] * (self.relation / self.d_head**0.5)
        # In place: the largest tensors of the network.
        weights = torch.softmax((queries @ ends.transpose(2, 3)).add_(mask), dim=-1)  # (B, H, Q, F)
        collected = (self.dropout(weights) @ values).masked_fill(~some, 0.0)  # (B, H, Q, D / H)
        out: Tensor = self.out(collected.transpose(1, 2).flatten(2))
        return out


def _check(n_layers: int, d_embedding: int, n_heads: int, ffn_factor: float, embedding_lr: float) -> None:
    """Raises ValueError for sizes and rates out of range."""
    if n_layers < 1:
        raise ValueError(f"n_layers must be >= 1; found {n_layers}")
    if not 1 <= n_heads <= d_embedding:
        raise ValueError(f"n_heads must lie between 1 and d_embedding = {d_embedding}; found {n_heads}")
    if not 1 <= d_embedding * ffn_factor < math.inf:
        raise ValueError(f"ffn_factor must be at least 1 / d_embedding = 1 / {d_embedding}; found {ffn_factor}")
    if not 0 < embedding_lr < math.inf:
        raise ValueError(f"embedding_lr must be > 0 and finite; found {embedding_lr}")
