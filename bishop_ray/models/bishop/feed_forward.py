"""The feed-forward parts of the blocks, which keep less for the backward pass than their layers would."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


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
