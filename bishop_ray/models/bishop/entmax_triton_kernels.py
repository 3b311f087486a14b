"""Triton kernels of α-entmax.

A program holds ROWS whole rows in registers, as a tile (PER_LANE, ROWS, LANES) with PER_LANE * LANES >= S: a lane has
PER_LANE entries of one row. Scores are read once and probabilities written once.
All arithmetic is float32. Only plain operations are used (no libdevice), so that the same source runs in Triton's
interpreter; what keeps its precision near zero, log1p and expm1, is written with Kahan's quotients, which cancel the
rounding of ``1 + x`` and of ``exp``. The mathematics is that of `entmax`, with ``a = α - 1``.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

_TINY = tl.constexpr(1.1754943508222875e-38)
_ROUNDING = tl.constexpr(2.0**-21)


@triton.jit
def _log1p_with(x: tl.tensor, u: tl.tensor) -> tl.tensor:
    """``log(1 + x)`` to full relative precision, given ``u = 1 + x`` as rounded."""
    near = u == 1.0
    return tl.where(near, x, x * (tl.log(u) / tl.where(near, 1.0, u - 1.0)))


@triton.jit
def _expm1(x: tl.tensor) -> tl.tensor:
    """``exp(x) - 1`` to full relative precision; also where ``exp`` is a hardware approximation."""
    u = tl.exp(x)
    near = u == 1.0
    return tl.where(near, x, (u - 1.0) * (x / tl.where(near, 1.0, tl.log(u))))


@triton.jit
def _rows(ROWS: tl.constexpr) -> tl.tensor:
    """Row numbers (ROWS,) of this program, in 64 bits: their offsets may need it."""
    return tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)


@triton.jit
def _columns(PER_LANE: tl.constexpr, LANES: tl.constexpr) -> tl.tensor:
    """Column numbers (PER_LANE, 1, LANES): neighbours lie in neighbouring lanes, so that their loads join."""
    return tl.arange(0, PER_LANE)[:, None, None] * LANES + tl.arange(0, LANES)[None, None, :]


@triton.jit
def _total(tile: tl.tensor) -> tl.tensor:
    """Sum of each row, (PER_LANE, ROWS, LANES) -> (1, ROWS, 1); within a lane first."""
    return tl.sum(tl.sum(tile, axis=0, keep_dims=True), axis=2, keep_dims=True)


@triton.jit(do_not_specialize=["n_rows"])
def forward_kernel(
    scores_ptr: tl.tensor,
    alpha_ptr: tl.tensor,
    p_ptr: tl.tensor,
    n_rows: tl.tensor,
    length: tl.tensor,
    ALPHA_STRIDE: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    PER_LANE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Probabilities of ROWS rows, ``p_i = [1 + x_i + t]_+^(1/a)``: Newton's method on ``(Σ p_i)^a`` from t = 0 down.

    That function of t is convex and increasing, so that t falls monotonically. A row whose step is only rounding keeps
    its t: what a row gives does not depend on its neighbours. STEPS bounds the number of evaluations.
    """
    rows = _rows(ROWS)
    columns = _columns(PER_LANE, LANES)
    inside = (rows < n_rows)[None, :, None] & (columns < length)
    offsets = (rows * length)[None, :, None] + columns
    scores = tl.load(scores_ptr + offsets, mask=inside, other=float("-inf")).to(tl.float32)
    alpha = tl.load(alpha_ptr + rows * ALPHA_STRIDE, mask=rows < n_rows, other=2.0)
    a = alpha.to(tl.float32)[None, :, None] - 1.0
    top = tl.max(tl.max(scores, axis=0, keep_dims=True), axis=2, keep_dims=True)
    scaled = (scores - tl.where(top == float("-inf"), 0.0, top)) * a
    power = 1.0 / a
    t = tl.zeros((1, ROWS, 1), tl.float32)
    p = tl.zeros((PER_LANE, ROWS, LANES), tl.float32)
    total = tl.zeros((1, ROWS, 1), tl.float32)
    left = STEPS
    while left > 0:
        x = scaled + t
        # A NaN is not "off", so that it reaches the sums and makes its row NaN.
        off = x <= -1.0
        x = tl.where(off, 0.0, x)
        u = x + 1.0
        p = tl.where(off, 0.0, tl.exp(_log1p_with(x, u) * power))
        total = tl.maximum(_total(p), _TINY, propagate_nan=tl.PropagateNan.ALL)
        slope = tl.maximum(_total(p / u), _TINY)
        step = _expm1(-a * tl.log(total)) * (-total / slope)
        moves = step > (a - t) * _ROUNDING
        t = tl.where(moves, t - step, t)
        left = tl.where(tl.max(moves.to(tl.int32)) > 0, left - 1, 0)
    tl.store(p_ptr + offsets, (p / total).to(p_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _alpha_slope(p: tl.tensor, log_p: tl.tensor, w: tl.tensor, a: tl.tensor) -> tl.tensor:
    """``∂p_i/∂α`` at a fixed threshold: ``-p log²p (e^x - 1 - x)/x²`` with x = -a log p, by its series for small x."""
    x = -a * log_p
    series = 1.0 / 39916800.0
    series = series * x + 1.0 / 3628800.0
    series = series * x + 1.0 / 362880.0
    series = series * x + 1.0 / 40320.0
    series = series * x + 1.0 / 5040.0
    series = series * x + 1.0 / 720.0
    series = series * x + 1.0 / 120.0
    series = series * x + 1.0 / 24.0
    series = series * x + 1.0 / 6.0
    series = series * x + 0.5
    return tl.where(x < 1.0, -p * log_p * log_p * series, (p - w + x * p) / (a * a))


@triton.jit(do_not_specialize=["n_rows"])
def backward_kernel(
    p_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    alpha_ptr: tl.tensor,
    d_scores_ptr: tl.tensor,
    d_alpha_ptr: tl.tensor,
    n_rows: tl.tensor,
    length: tl.tensor,
    ALPHA_STRIDE: tl.constexpr,
    NEED_ALPHA: tl.constexpr,
    ROWS: tl.constexpr,
    PER_LANE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Gradients of ROWS rows from the probabilities alone: ``w = p^(1-a)`` is made again.

    The gradient of α is written per row where α is given per row (ALPHA_STRIDE 1), else one sum per program.
    """
    rows = _rows(ROWS)
    columns = _columns(PER_LANE, LANES)
    inside = (rows < n_rows)[None, :, None] & (columns < length)
    offsets = (rows * length)[None, :, None] + columns
    p = tl.load(p_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    alpha = tl.load(alpha_ptr + rows * ALPHA_STRIDE, mask=rows < n_rows, other=2.0)
    a = alpha.to(tl.float32)[None, :, None] - 1.0
    off = p <= 0.0
    log_p = tl.log(tl.where(off, 1.0, p))
    w = tl.where(off, 0.0, tl.exp((1.0 - a) * log_p))
    slope = tl.maximum(_total(w), _TINY, propagate_nan=tl.PropagateNan.ALL)
    centred = grad - _total(w * grad) / slope
    tl.store(d_scores_ptr + offsets, (w * centred).to(d_scores_ptr.dtype.element_ty), mask=inside)
    if NEED_ALPHA:
        d_alpha = tl.reshape(_total(_alpha_slope(p, log_p, w, a) * centred), (ROWS,))
        if ALPHA_STRIDE:
            tl.store(d_alpha_ptr + rows, d_alpha, mask=rows < n_rows)
        else:
            tl.store(d_alpha_ptr + tl.program_id(0), tl.sum(d_alpha, axis=0))
