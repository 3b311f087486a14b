"""α-entmax over the columns of a matrix in plain PyTorch.

p_i = [(α-1) z_i - τ]_+ ^ (1/(α-1)),    Σ p_i = 1        (paper, definition of entmax)

The solver works with ``a = α - 1``, ``x = a (z - max z)`` and ``t = a max z - τ - 1``, so that

    p_i(t) = [1 + x_i + t]_+ ^ (1/a) = exp(log1p(x_i + t) / a)

which keeps full relative precision down to the softmax limit a -> 0. The root is found for the norm
``q(t) = (Σ p_i)^a = ||1 + x + t||_{1/a}``: it is convex and increasing in t, piecewise linear at α = 2 and linear in
the limit α -> 1, so Newton's method from the upper end t = 0 falls monotonically to the root, for every α in few
evaluations; t also stays inside its bracket [n^-a - 1, 0]. (Halley's method on q needs more of them, not fewer: at an
edge of the support its third-order term is wrong.) How many at most depends on the row's length alone; nothing is asked
of a device, and the function can be traced.

Rows are solved as columns of an (S, rows) matrix: a reduction over the first axis and a row's number added to each of
its entries are then operations on long vectors. Along a last axis of ten entries they cost five times as much.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LOG2E = math.log2(math.e)
_SERIES_BELOW = 0.25


def evaluations(length: int) -> int:
    """Evaluations of q after which a row of `length` entries, at most 512, is solved.

    Usual rows take 3 to 9. Rows built so that entries leave the support one by one take more, at α near 2; the tests
    have those that are known. Where steps can be looked at, `_SPARE` more are allowed.
    """
    return 5 + math.ceil(math.log2(max(length, 2)))


_SPARE = 8


def _may_look(t: Tensor) -> bool:
    """Whether a number may be read: on the CPU it costs nothing, elsewhere a wait, and while tracing there is none."""
    return type(t) is Tensor and t.device.type == "cpu" and not torch.compiler.is_compiling()


def solve(scores: Tensor, a: Tensor) -> Tensor:
    """Probabilities (S, R) of scores (S, R) along the first axis for a = α - 1 of shape (1, 1) or (1, R)."""
    info = torch.finfo(scores.dtype)
    top = scores.amax(0, keepdim=True)
    x = (scores - top.masked_fill(top == -math.inf, 0.0)) * a
    power = _LOG2E / a
    lower = torch.expm1(-a * math.log(scores.shape[0]))
    t = torch.zeros_like(top)
    look = _may_look(t)
    for left in reversed(range(evaluations(scores.shape[0]) + (_SPARE if look else 0))):
        base = (x + t).clamp(min=-1.0)
        p = torch.log1p(base).mul_(power).exp2_()
        total = p.sum(0, keepdim=True).clamp(min=info.tiny)
        if not left:
            break
        w = p / base.add_(1.0).clamp(min=info.tiny)
        slope = w.sum(0, keepdim=True).clamp(min=info.tiny)
        step = torch.expm1(-a * total.log()) * total / slope
        # Rounding alone moves t by a few units in the last place; a row of NaN compares False and stops nothing.
        if look and not bool((step < (t - a) * (4 * info.eps)).any()):
            break
        t = (t + step).clamp(max=0.0).maximum(lower)
    return p / total


def gradients(p: Tensor, upstream: Tensor, a: Tensor, need_alpha: bool) -> tuple[Tensor, Tensor | None]:
    """Gradients in the scores (S, R) and, per entry and not yet summed, in α (S, R).

    Args:
        p: (S, R) probabilities.
        upstream: (S, R) gradient in them.
        a: (1, 1) or (1, R).
        need_alpha: Whether the second is wanted.
    """
    tiny = torch.finfo(p.dtype).tiny
    log_p = p.clamp(min=tiny).log_()  # on CPUs the logarithm of zero costs six times as much
    w = (log_p * ((1.0 - a) * _LOG2E)).exp2_().mul_(p.sign())  # ∂p/∂t up to 1/a, zero off the support
    slope = w.sum(0, keepdim=True).clamp(min=tiny)
    # The implicit derivative of the threshold makes both gradients see the upstream one centred by w.
    centred = upstream - (w * upstream).sum(0, keepdim=True) / slope
    return w * centred, _alpha_slope(p, w, log_p, a).mul_(centred) if need_alpha else None


def _alpha_slope(p: Tensor, w: Tensor, log_p: Tensor, a: Tensor) -> Tensor:
    """``∂p_i/∂α`` at a fixed threshold: ``-(p^(1-a) - p + a p log p) / a²``.

    With x = -a log p this is ``-p log²p · φ(x)``, φ(x) = (e^x - 1 - x)/x²; the plain form cancels for small x (α -> 1),
    where φ's power series is used instead.
    """
    x = log_p * -a
    terms = 11 if p.dtype == torch.float64 else 5
    phi = torch.full_like(x, 1.0 / math.factorial(terms + 1))
    for k in reversed(range(terms - 1)):
        phi = phi.mul_(x).add_(1.0 / math.factorial(k + 2))
    small = phi.mul_(log_p).mul_(log_p).mul_(p)
    plain = (w - p - p * x) / (a * a)
    # A blend instead of `where`, which is not vectorised on CPUs; both sides are finite everywhere.
    exact = x.sub_(_SERIES_BELOW).sign_().clamp(min=0.0)
    return torch.lerp(small, plain, exact).neg_()
