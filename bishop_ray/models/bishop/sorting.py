"""Exact α-entmax for α = 1.5 and α = 2 by sorting, from the `entmax` package (https://github.com/deep-spin/entmax)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
