"""α-entmax (Peters et al. 2019, Correia et al. 2019) with a learnable α: function, gradient, modules.

    p_i = [(α-1) z_i - τ]_+ ^ (1/(α-1)),    Σ p_i = 1        (paper, definition of entmax)

The solver works with ``a = α - 1`` and ``c = -(τ + 1)/a - max z``, so that with ``s = z - max z``

    p_i(c) = [1 + a (s_i + c)]_+ ^ (1/a) = exp(log1p(a (s_i + c)) / a)

which keeps full relative precision down to the softmax limit a -> 0. The root is found for the norm
``q(c) = (Σ p_i)^a = ||1 + a (s + c)||_{1/a}``: it is convex and increasing in c, piecewise linear at α = 2 and linear
in the limit α -> 1, so Newton's method from the upper end c = 0 falls monotonically to the root, for every α in three
to nine evaluations up to 512 entries; c also stays inside its bracket [(n^-a - 1)/a, 0].
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bishop_ray.models.bishop.sorting import sorted_entmax

ALPHA_MIN = 1.0 + 1e-6
"""The smallest α that is solved: α-entmax equals softmax to within 1e-6 there."""

ACTIVATIONS = ("entmax", "entmax_fixed", "sparsemax", "softmax")
"""Names that `make_activation` knows."""

_MAX_STEPS = 40
_SERIES = [1.0 / math.factorial(k + 2) for k in range(14)]


def _shares(shifted: Tensor, c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """``p_i(c)`` and its derivative ``p_i^(1-a)``; both zero off the support."""
    base = (shifted + c).mul_(a).clamp_(min=-1.0)
    p = torch.log1p(base).div_(a).exp_()
    return p, p / base.add_(1.0).clamp_(min=torch.finfo(base.dtype).tiny)


def _solve(scores: Tensor, a: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Probabilities and their derivative with respect to the threshold, see the module's docstring."""
    info = torch.finfo(scores.dtype)
    top = scores.amax(dim, keepdim=True)
    shifted = scores - top.masked_fill(top == -math.inf, 0.0)
    lower = torch.expm1(-a * math.log(scores.shape[dim])) / a
    c = torch.zeros_like(top)
    for _ in range(_MAX_STEPS):
        p, w = _shares(shifted, c, a)
        total = p.sum(dim, keepdim=True).clamp_(min=info.tiny)
        slope = w.sum(dim, keepdim=True).clamp_(min=info.tiny)
        step = -torch.expm1(-a * total.log()) * total / (a * slope)
        # Rounding alone moves c by a few units in the last place; a row of NaN compares False and stops nothing.
        if not bool((step > 4 * info.eps * (1.0 - c)).any()):
            break
        c = torch.clamp(c - step, max=0.0).maximum(lower)
    else:
        p, w = _shares(shifted, c, a)
        total = p.sum(dim, keepdim=True).clamp_(min=info.tiny)
    return p / total, w


def _alpha_slope(p: Tensor, w: Tensor, a: Tensor) -> Tensor:
    """``∂p_i/∂α`` at a fixed threshold c: ``-(p^(1-a) - p + a p log p) / a²``.

    With x = -a log p this is ``-p log²p · φ(x)``, φ(x) = (e^x - 1 - x)/x²; the plain form cancels for small x (α -> 1),
    where φ's power series is used instead.
    """
    plain: Tensor = (p - w + a * torch.special.entr(p)) / (a * a)
    if a.numel() == 1 and float(a) > 0.25:
        return plain
    log_p = p.clamp(min=torch.finfo(p.dtype).tiny).log()
    x = log_p * -a
    phi = torch.full_like(x, _SERIES[-1])
    for coefficient in reversed(_SERIES[:-1]):
        phi.mul_(x).add_(coefficient)
    slope: Tensor = torch.where(x < 0.5, -p * log_p * log_p * phi, plain)
    return slope


class _Entmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, alpha: Tensor, dim: int) -> Tensor:
        work = torch.promote_types(scores.dtype, torch.float32)
        a = alpha.detach().to(scores.device, work) - 1.0
        p, w = _solve(scores.detach().to(work), a, dim)
        ctx.dim, ctx.alpha_like = dim, alpha
        ctx.save_for_backward(p, w, a)
        return p.to(scores.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        p, w, a = ctx.saved_tensors
        upstream = grad.to(p.dtype)
        slope = w.sum(ctx.dim, keepdim=True).clamp_(min=torch.finfo(p.dtype).tiny)
        # The implicit derivative of the threshold makes both gradients see the upstream one centred by w.
        centred = upstream - (w * upstream).sum(ctx.dim, keepdim=True) / slope
        d_scores = (w * centred).to(grad.dtype) if ctx.needs_input_grad[0] else None
        d_alpha = None
        if ctx.needs_input_grad[1]:
            summed = (_alpha_slope(p, w, a) * centred).sum_to_size(ctx.alpha_like.shape)
            d_alpha = summed.to(ctx.alpha_like)
        return d_scores, d_alpha, None


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
        alpha = torch.tensor(alpha, dtype=torch.float64)
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
