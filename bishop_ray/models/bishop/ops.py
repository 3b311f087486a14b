"""BiSHop's dropout and feed-forward layer.

PyTorch draws one number per entry there, one after the other, and keeps a mask of the entries' own type: in the
default configuration that was a ninth of a training step. A byte per entry is enough, eight of them from each number
that is drawn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_LEVELS = 256
_COARSE = 8 / _LEVELS
"""Below this rate a step of 1/256 would change it too much."""


class _ByteDropout(torch.autograd.Function):
    """Sets each entry to zero with probability `dropped` / 256 and scales the others; keeps a byte per entry."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: int) -> Tensor:
        draws = torch.empty(-(-x.numel() // 8), dtype=torch.int64, device=x.device).random_(-(2**63), None)
        kept = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        torch.ge(draws.view(torch.uint8)[: x.numel()].view(x.shape), dropped, out=kept)
        ctx.scale = _LEVELS / (_LEVELS - dropped)
        ctx.save_for_backward(kept)
        return (x * kept).mul_(ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return (grad * kept).mul_(ctx.scale), None


class Dropout(nn.Dropout):
    """`nn.Dropout` with the rate rounded to 1/256 on CPUs; the expectation of what is kept is exactly the input.

    Random numbers come from PyTorch's global generator. Rates below 1/32, other devices and tracing take PyTorch's own.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Any shape -> the same shape and type."""
        plain = type(input) is Tensor and input.device.type == "cpu" and not torch.compiler.is_compiling()
        if not (plain and self.training and _COARSE <= self.p < 1.0 and input.numel()):
            return super().forward(input)
        out: Tensor = _ByteDropout.apply(input, round(self.p * _LEVELS))  # type: ignore[no-untyped-call]
        return out


class _GeluLinear(torch.autograd.Function):
    """``GELU(h) Wᵀ + b``; the activated hidden values are computed again instead of kept, half of what was stored."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return F.linear(F.gelu(hidden), weight.to(hidden.dtype), bias.to(hidden.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        grad = grad.to(hidden.dtype)
        rows = grad.reshape(-1, grad.shape[-1])
        d_hidden = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            d_hidden = torch.ops.aten.gelu_backward(grad @ weight.to(hidden.dtype), hidden)
        if ctx.needs_input_grad[1]:
            d_weight = (rows.mT @ F.gelu(hidden).reshape(-1, hidden.shape[-1])).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            d_bias = rows.sum(0).to(weight.dtype)
        return d_hidden, d_weight, d_bias


class FeedForward(nn.Sequential):
    """D -> `d_hidden` -> D with GELU."""

    def __init__(self, d_model: int, d_hidden: int) -> None:
        super().__init__(nn.Linear(d_model, d_hidden), nn.GELU(), nn.Linear(d_hidden, d_model))

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        first, _, second = self
        assert isinstance(second, nn.Linear)
        out: Tensor = _GeluLinear.apply(first(x), second.weight, second.bias)  # type: ignore[no-untyped-call]
        return out
