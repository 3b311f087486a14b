"""The generalized sparse modern Hopfield (GSH) model: associations of networks, and plain memory retrieval.

Paper, section "Generalized Sparse Modern Hopfield Model"; letters in the package's docstring.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bishop_ray.models.bishop.bishop_config import BlockOptions
from bishop_ray.models.bishop.entmax import entmax
from bishop_ray.models.bishop.ops import Dropout


def _weights(scores: Tensor, alpha: float) -> Tensor:
    return scores.softmax(-1) if alpha == 1.0 else entmax(scores, alpha)


def retrieve(query: Tensor, memory: Tensor, alpha: float = 1.5, beta: float = 1.0, steps: int = 1) -> Tensor:
    """Memory retrieval: ``steps`` times x <- Ξ entmax(β Ξᵀ x) (paper, retrieval dynamics; nothing is learned).

    Args:
        query: (..., D) states x to start from.
        memory: (S, D) stored patterns, one per row; (..., S, D) for a memory of its own per (L, D) block of queries.
        alpha: In [1, 2]; 1 is the dense model (softmax).
        beta: Inverse temperature, > 0.
        steps: Number of updates, >= 0.

    Returns:
        (..., D) states.

    Raises:
        ValueError: `alpha`, `beta` or `steps` out of range.
    """
    _check_retrieval(alpha, beta)
    if steps < 0:
        raise ValueError(f"steps must be >= 0; found {steps}")
    for _ in range(steps):
        query = _weights(beta * (query @ memory.mT), alpha) @ memory
    return query


def energy(query: Tensor, memory: Tensor, alpha: float = 1.5, beta: float = 1.0) -> Tensor:
    """Energy ``E(x) = -Ψ*(β Ξᵀ x) / β + <x, x> / 2``; it never rises along `retrieve`.

    Differs from the paper in two places, for its form can rise: 1/β stands before Ψ*, and the Tsallis entropy
    ``Ψ^α(p) = Σ (p - p^α) / (α (α - 1))`` is added to <p, z>, not subtracted: Ψ*(z) = <p, z> + Ψ^α(p) at p = entmax(z).

    Args:
        query: (..., D).
        memory: (S, D).
        alpha: In [1, 2].
        beta: > 0.

    Returns:
        (...) energies.

    Raises:
        ValueError: `alpha` or `beta` out of range.
    """
    _check_retrieval(alpha, beta)
    scores = beta * (query @ memory.mT)
    p = _weights(scores, alpha)
    if alpha == 1.0:
        entropy = torch.special.entr(p).sum(-1)
    else:
        # p - p^α = -p expm1((α - 1) log p); p = 0 contributes nothing.
        log_p = p.clamp(min=torch.finfo(p.dtype).tiny).log()
        entropy = -(p * torch.expm1((alpha - 1.0) * log_p)).sum(-1) / (alpha * (alpha - 1.0))
    conjugate = (p * scores).sum(-1) + entropy
    result: Tensor = (query * query).sum(-1) / 2 - conjugate / beta
    return result


def _check_retrieval(alpha: float, beta: float) -> None:
    if not 1.0 <= alpha <= 2.0:
        raise ValueError(f"alpha must lie in [1, 2]; found {alpha}")
    if not beta > 0:
        raise ValueError(f"beta must be > 0; found {beta}")


class Association(nn.Module):
    """GSH: ``Z = entmax(β R W_Q W_Kᵀ Yᵀ) Y W_K W_V`` with H heads and an output projection.

    β = 1/sqrt(head width). Keys are computed once and also give the values; with ``hopfield_values`` off ``V = Y W_V``.
    With ``mix_heads`` the (H, L) axes are flattened in that order, as in the authors' code, which spreads heads over
    cells; otherwise heads are concatenated per cell (the paper).

    Attributes:
        record: Set to take the share of non-zero weights at the next forward pass in evaluation mode.
        nonzero: That share, None before the first one.
    """

    def __init__(self, options: BlockOptions, project_query: bool = True) -> None:
        super().__init__()
        self.options = options
        d_model, d_heads = options.d_model, options.d_heads
        self.query = nn.Linear(d_model, d_heads) if project_query else nn.Identity()
        self.key = nn.Linear(d_model, d_heads)
        self.value = nn.Linear(d_heads if options.hopfield_values else d_model, d_heads)
        self.output = nn.Linear(d_heads, d_model)
        self.activation = options.new_activation()
        self.dropout = Dropout(options.dropout)
        self.record = False
        self.nonzero: float | None = None

    def _heads(self, x: Tensor) -> Tensor:
        """(..., S, H * d) -> (..., H, S, d)."""
        return x.reshape(*x.shape[:-1], self.options.n_heads, self.options.d_head).transpose(-2, -3)

    def forward(self, query: Tensor, memory: Tensor) -> Tensor:
        """(..., L, D) queries, (..., S, D) memories -> (..., L, D); leading axes broadcast."""
        keys = self.key(memory)
        values = self._heads(self.value(keys if self.options.hopfield_values else memory))  # (..., H, S, d)
        if memory.shape[-2] == 1:
            weights = self._single(query, memory)
        else:
            beta = 1.0 / math.sqrt(self.options.d_head)
            weights = self.activation(self._heads(self.query(query) * beta) @ self._heads(keys).mT)  # (..., H, L, S)
        self._note(weights)
        weights = self.dropout(weights)
        found = weights * values if memory.shape[-2] == 1 else weights @ values  # (..., H, L, d)
        if not self.options.mix_heads:
            found = found.transpose(-2, -3)
        rows = found.reshape(*found.shape[:-3], query.shape[-2], self.options.d_heads)
        out: Tensor = self.output(rows)
        return out

    def _single(self, query: Tensor, memory: Tensor) -> Tensor:
        """(..., H, L, 1) ones: a lone memory has weight 1 whatever the scores, which need not be computed.

        Parameters of the scores stay in the graph with zero gradients, for workers that compare gradients by parameter.
        """
        leading = torch.broadcast_shapes(query.shape[:-2], memory.shape[:-2])  # type: ignore[no-untyped-call]
        unused = [*self.query.parameters(), *self.activation.parameters()]
        zero = sum((0.0 * parameter.sum() for parameter in unused), start=memory.new_zeros(()))
        return (1.0 + zero).expand(*leading, self.options.n_heads, query.shape[-2], 1)

    def _note(self, weights: Tensor) -> None:
        if self.record and not self.training and weights.numel():
            self.nonzero = float((weights.detach() > 0).float().mean())
            self.record = False


class GSHPooling(nn.Module):
    """GSHPooling: M learned prototypes per patch position gather what A cells hold.

    Prototypes pass a query projection as in the authors' code; ``pool_query_projection=False`` gives the paper's form,
    where they live in the associative space themselves.
    """

    def __init__(self, options: BlockOptions, n_patches: int) -> None:
        super().__init__()
        projected = options.pool_query_projection
        self.association = Association(options, project_query=projected)
        width = options.d_model if projected else options.d_heads
        self.prototypes = nn.Parameter(torch.randn(n_patches, options.n_pool, width))

    def forward(self, cells: Tensor) -> Tensor:
        """(B, P, A, D) -> (B, P, M, D)."""
        pooled: Tensor = self.association(self.prototypes, cells)
        return pooled


class GSHLayer(nn.Module):
    """GSHLayer: memories are parameters, apart from the input (paper: W_Q and Y identities, W_K the stored patterns).

    ``Z = entmax(β R W_Kᵀ) W_K W_V``, β = 1/sqrt(D).

    Args:
        d_model: D, width of the queries and of the stored patterns.
        n_patterns: S.
        d_out: Width of the result.
        options: Where the activation comes from.
    """

    def __init__(self, d_model: int, n_patterns: int, d_out: int, options: BlockOptions) -> None:
        super().__init__()
        self.patterns = nn.Parameter(torch.randn(n_patterns, d_model))
        self.value = nn.Linear(d_model, d_out, bias=False)
        self.activation = options.new_activation()

    def forward(self, query: Tensor) -> Tensor:
        """(..., D) -> (..., d_out)."""
        beta = 1.0 / math.sqrt(query.shape[-1])
        weights = self.activation(beta * query @ self.patterns.mT)
        found: Tensor = weights @ self.value(self.patterns)
        return found
