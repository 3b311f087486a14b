"""Dropout at a tenth of its usual price on CPUs.

PyTorch draws one number per entry there, one after the other, and keeps a mask of the entries' own type: in the
default configuration that was a ninth of a training step. A byte per entry is enough, eight of them from each number
that is drawn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

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
