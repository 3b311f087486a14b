"""Exact α-entmax for α = 1.5 and α = 2 by sorting, from the `entmax` package (https://github.com/deep-spin/entmax)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bishop_ray.models.bishop import entmax_torch, entmax_triton


def sorted_entmax(scores: Tensor, alpha: float) -> Tensor:
    """α-entmax along the last axis, differentiable: (..., S) -> (..., S) with S >= 1, α 1.5 or 2.

    Infinite and NaN scores give what `entmax.entmax` gives. Solved in at least float32: half precision is too coarse
    for the package's sums.
    """
    from entmax import entmax15, sparsemax  # type: ignore[attr-defined,unused-ignore]

    work = scores.to(torch.promote_types(scores.dtype, torch.float32))
    # The package indexes out of bounds where a row has no finite maximum, which ends a CUDA process.
    top = work.detach().amax(-1, keepdim=True)
    bad = ~torch.isfinite(top)
    outcome = torch.where(bad, torch.where(top == -math.inf, 0.0, math.nan), 1.0).to(work)
    solve = sparsemax if alpha == 2.0 else entmax15
    p: Tensor = solve(work.masked_fill(bad, 0.0), -1) * outcome
    return p.to(scores.dtype)


ALPHA_MIN = 1.0 + 1e-6
"""The smallest α that is solved: α-entmax equals softmax to within 1e-6 there."""
ACTIVATIONS = ("entmax", "entmax_fixed", "sparsemax", "softmax")
"""Names that `make_activation` knows."""


def _columns(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Any shape -> (S, R) contiguous, the axis `dim` first."""
    return x.movedim(dim, 0).reshape(x.shape[dim], -1).to(dtype).contiguous()


def _from_columns(columns: Tensor, like: Tensor, dim: int) -> Tensor:
    """(S, R) -> the shape and data type of `like`, contiguous."""
    return columns.view(like.movedim(dim, 0).shape).movedim(0, dim).to(like.dtype).contiguous()


def _from_rows(rows: Tensor, like: Tensor, dim: int) -> Tensor:
    """(R, S) -> the shape of `like`, contiguous."""
    return rows.view(like.movedim(dim, -1).shape).movedim(-1, dim).contiguous()


def _per_row(alpha: Tensor, like: Tensor, dim: int) -> Tensor:
    """α as (1,), or (R,) when rows have their own."""
    if alpha.numel() == 1:
        return alpha.reshape(1)
    shape = list(like.shape)
    shape[dim] = 1
    return alpha.expand(shape).movedim(dim, -1).reshape(-1)


def _fused(rows: Tensor) -> bool:
    """Whether the kernels take these tensors; a compiler fuses the plain operations itself."""
    return not torch.compiler.is_compiling() and entmax_triton.available(rows)


class _Entmax(torch.autograd.Function):
    @staticmethod
    def vmap(_: Any, in_dims: tuple[int | None, ...], scores: Tensor, alpha: Tensor, dim: int) -> tuple[Tensor, int]:
        """One call for the whole batch: α is then a number per row."""
        of_scores, of_alpha, _ = in_dims
        rank = scores.ndim if of_scores is None else scores.ndim - 1
        dim = dim % rank
        batch = alpha.shape[of_alpha] if of_scores is None and of_alpha is not None else scores.shape[of_scores or 0]
        scores = scores.expand(batch, *scores.shape) if of_scores is None else scores.movedim(of_scores, 0)
        if of_alpha is not None:
            alpha = alpha.movedim(of_alpha, 0)
            alpha = alpha.reshape(batch, *[1] * (rank - alpha.ndim + 1), *alpha.shape[1:])
        return _Entmax.apply(scores, alpha, dim + 1), 0  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(scores: Tensor, alpha: Tensor, dim: int) -> Tensor:
        per_row = _per_row(alpha.to(scores.device), scores, dim)
        last = scores.movedim(dim, -1)
        if _fused(last):
            return _from_rows(entmax_triton.forward(last.reshape(-1, last.shape[-1]), per_row), scores, dim)
        work = torch.promote_types(scores.dtype, torch.float32)
        a = per_row.to(work).reshape(1, -1) - 1.0
        return _from_columns(entmax_torch.solve(_columns(scores, dim, work), a), scores, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        _, alpha, ctx.dim = inputs
        # Probabilities alone: what follows keeps them too, so that nothing more is stored.
        ctx.save_for_backward(output, alpha)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        probabilities, alpha = ctx.saved_tensors
        dim, need_alpha = ctx.dim, ctx.needs_input_grad[1]
        per_row = _per_row(alpha.to(grad.device), grad, dim)
        last = probabilities.movedim(dim, -1)
        if _fused(last):
            flat = (-1, last.shape[-1])
            upstream = grad.movedim(dim, -1).reshape(flat)
            rows, summed = entmax_triton.backward(last.reshape(flat), upstream, per_row, need_alpha)
            d_scores = _from_rows(rows, grad, dim)
        else:
            work = torch.promote_types(grad.dtype, torch.float32)
            p, upstream = _columns(probabilities, dim, work), _columns(grad, dim, work)
            a = per_row.to(work).reshape(1, -1) - 1.0
            columns, entries = entmax_torch.gradients(p, upstream, a, need_alpha)
            d_scores = _from_columns(columns, grad, dim)
            summed = entries.sum(0) if entries is not None else None  # (R,)
        return d_scores, None if summed is None else _to_alpha(summed, alpha, grad, dim), None


def _to_alpha(summed: Tensor, alpha: Tensor, like: Tensor, dim: int) -> Tensor:
    """The gradient in α from that of each row (R,), or of all together (1,)."""
    if alpha.numel() == 1:
        return summed.sum().reshape(alpha.shape).to(alpha)
    shape = list(like.shape)
    del shape[dim]
    return summed.view(shape).unsqueeze(dim).sum_to_size(alpha.shape).to(alpha)


def entmax(scores: Tensor, alpha: Tensor | float, dim: int = -1) -> Tensor:
    """α-entmax of `scores` along `dim`; differentiable once, in `scores` and in `alpha`.

    Args:
        scores: Any shape. ``-inf`` marks an entry that gets exactly 0. A row of ``-inf`` only gives zeros (nothing is
            retrieved); a NaN or ``+inf`` makes its row NaN. Solved in float32, or float64 for float64 input.
        alpha: In (1, 2]: a number, a tensor with one element, or one value per row (size 1 along `dim`, broadcastable).
        dim: The axis that sums to one; size 0 gives an empty result.

    Returns:
        The shape and data type of `scores`.

    Raises:
        ValueError: A number `alpha` outside (1, 2]. Tensors are not checked, for that would wait for the device.
    """
    if not isinstance(alpha, Tensor):
        _check_alpha(alpha)
        alpha = torch.full((), alpha, dtype=torch.float64, device=scores.device)
    if scores.numel() == 0:
        # In the graph with zero gradients, so that workers with no rows still agree on which parameters have one.
        return scores * alpha.to(scores)
    result: Tensor = _Entmax.apply(scores, alpha, dim)  # type: ignore[no-untyped-call]
    return result


def _check_alpha(alpha: float) -> None:
    if not ALPHA_MIN <= alpha <= 2.0:
        raise ValueError(f"alpha must lie in (1, 2] (at least {ALPHA_MIN}); found {alpha}")


class Activation(nn.Module):
    """Scores to association weights along the last axis: (..., S) -> (..., S), each row sums to one."""

    @property
    def alpha(self) -> float:
        """The current α, 1 for softmax."""
        raise NotImplementedError


class LearnedEntmax(Activation):
    """Entmax with one learnable α, kept in (1, 2].

    ``α = 2 - (1 - 1e-6) σ(-raw)``: both ends are reached without leaving the range, and all derivatives are finite.
    With ``free=True`` the parameter is α itself, as in the authors' code; it is clamped into the range on use, so that
    it can leave it without giving NaN. The parameter is marked ``no_weight_decay``.

    Args:
        alpha: Starting value in (1, 2).
        free: α itself is the parameter.

    Raises:
        ValueError: `alpha` outside (1, 2), or at 2 when not `free` (no finite parameter gives it).
    """

    def __init__(self, alpha: float = 1.5, free: bool = False) -> None:
        super().__init__()
        _check_alpha(alpha)
        self.free = free
        if not free and alpha >= 2.0:
            raise ValueError(f"a learnable alpha must start in (1, 2); found {alpha}")
        start = alpha if free else math.log(alpha - 1.0) - math.log(2.0 - alpha)
        self.raw = nn.Parameter(torch.tensor(start))
        self.raw.no_weight_decay = True  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Copies of parameters lose their attributes.
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.raw.no_weight_decay = True  # type: ignore[attr-defined]

    def value(self) -> Tensor:
        """α as a scalar tensor, differentiable."""
        if self.free:
            return self.raw.clamp(ALPHA_MIN, 2.0)
        return 2.0 - (2.0 - ALPHA_MIN) * torch.sigmoid(-self.raw)

    @property
    def alpha(self) -> float:
        """The current α."""
        return float(self.value().detach())

    def forward(self, scores: Tensor) -> Tensor:
        """(..., S) -> (..., S)."""
        return entmax(scores, self.value())


class FixedEntmax(Activation):
    """Entmax with a constant α.

    α = 2 (sparsemax) and α = 1.5 are solved exactly, by the sorting algorithms of the `entmax` package; any other α by
    `entmax` of this module, which also says what infinite and NaN scores give.

    Raises:
        ValueError: `alpha` outside (1, 2].
    """

    def __init__(self, alpha: float) -> None:
        super().__init__()
        _check_alpha(alpha)
        self._alpha = alpha

    @property
    def alpha(self) -> float:
        """The constant."""
        return self._alpha

    def forward(self, scores: Tensor) -> Tensor:
        """(..., S) -> (..., S)."""
        if self._alpha not in (1.5, 2.0) or scores.numel() == 0:
            return entmax(scores, self._alpha)
        return sorted_entmax(scores, self._alpha)


class Softmax(Activation):
    """The dense limit α = 1."""

    @property
    def alpha(self) -> float:
        """Always 1."""
        return 1.0

    def forward(self, scores: Tensor) -> Tensor:
        """(..., S) -> (..., S)."""
        return scores.softmax(-1)


def make_activation(name: str, fixed_alpha: float = 1.5, free_alpha: bool = False) -> Activation:
    """A fresh activation by its name: "entmax" (learnable α), "entmax_fixed", "sparsemax" or "softmax".

    Raises:
        ValueError: Unknown name, or `fixed_alpha` outside (1, 2].
    """
    if name == "entmax":
        return LearnedEntmax(free=free_alpha)
    if name == "entmax_fixed":
        return FixedEntmax(fixed_alpha)
    if name == "sparsemax":
        return FixedEntmax(2.0)
    if name == "softmax":
        return Softmax()
    raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; found {name!r}")
