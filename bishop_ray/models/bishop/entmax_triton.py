"""α-entmax on CUDA in one kernel per direction: when it can be used, and how it is called.

Triton is imported with the first call only: this module can be imported without it and without a GPU. No call waits
for the device: α is read by the kernel, and the gradient of α is reduced from partial sums in a fixed order.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os

import torch
from torch import Tensor

MAX_LENGTH = 512
"""The longest row that is held in registers."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_WARP = 32
_PER_LANE = 8


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, in its interpreter: its own switch, set before it is first imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def available(scores: Tensor) -> bool:
    """Whether `forward` and `backward` take these scores, rows along the last axis: (..., S).

    True for float32, float16 and bfloat16 on a CUDA device with 1 <= S <= 512 and at least one row, where Triton is
    installed and knows the processor (compute capability 7.0; bfloat16 8.0). In Triton's interpreter (environment
    variable ``TRITON_INTERPRET=1``) tensors on the CPU are taken too.
    """
    if scores.dtype not in _DTYPES or scores.numel() == 0 or scores.ndim == 0 or scores.shape[-1] > MAX_LENGTH:
        return False
    if not scores.is_cuda:
        return scores.device.type == "cpu" and _interpreted() and _installed()
    needed = (8, 0) if scores.dtype == torch.bfloat16 else (7, 0)
    return _installed() and _capability(scores.device) >= needed


def _shape_of_programs(n_rows: int, length: int) -> tuple[int, dict[str, int]]:
    """Number of programs, and the tile (PER_LANE, ROWS, LANES) of each: entries of a lane, rows, lanes of a row.

    One program is one warp, so that no sum and no decision waits for another warp. A lane holds several entries of one
    row: what is computed per row is then computed by few lanes, and most of a sum needs no exchange between them.
    """
    block = 1 << (length - 1).bit_length()
    lanes = min(max(block // _PER_LANE, 2), _WARP, block)
    rows = _WARP // lanes
    return -(-n_rows // rows), {"ROWS": rows, "PER_LANE": block // lanes, "LANES": lanes, "num_warps": 1}


def _steps(length: int) -> int:
    """The number of evaluations that is enough for any row of `length` entries.

    Newton's method on a convex increasing function cuts the product of value and slope by 4 at each step. The value
    ``(q - 1)/a`` starts below n and is done at float32's 2^-24, the slope falls from n at most to 1: log2(n) + 12 steps
    and the evaluation at their end. Random rows take 3 to 9; rows built against the method, at α = 2, took 14 of the 22
    for n = 512.
    """
    return (length - 1).bit_length() + 13


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, whatever its arguments live on."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def forward(scores: Tensor, alpha: Tensor) -> Tensor:
    """α-entmax of the rows of `scores`: (R, S) -> (R, S) of the same data type, solved in float32.

    Args:
        scores: (R, S), as `available` asks. ``-inf`` gives exactly 0, a row of ``-inf`` zeros, a NaN or ``+inf`` makes
            its row NaN.
        alpha: In (1, 2], on the same device: one element for all rows, or (R,). Not checked, not copied to the host.
    """
    from bishop_ray.models.bishop.entmax_triton_kernels import forward_kernel

    n_rows, length = scores.shape
    scores, alpha = scores.contiguous(), alpha.contiguous()
    p = torch.empty_like(scores)
    programs, shape = _shape_of_programs(n_rows, length)
    with _on(scores.device):
        forward_kernel[(programs,)](scores, alpha, p, n_rows, length, int(alpha.numel() > 1), _steps(length), **shape)
    return p


def backward(p: Tensor, grad: Tensor, alpha: Tensor, need_alpha: bool) -> tuple[Tensor, Tensor | None]:
    """Gradients with respect to the scores, (R, S) of `grad`'s type, and to `alpha`, of its shape and type.

    The derivative ``p^(1-a)`` is made again from `p` as it was stored: in half precision with that type's rounding, and
    an entry that was rounded to 0 counts as outside the support.

    Args:
        p: (R, S), what `forward` gave.
        grad: (R, S), the gradient with respect to `p`.
        alpha: One element or (R,), as given to `forward`.
        need_alpha: Whether the gradient of `alpha` is wanted; else None is returned for it.
    """
    from bishop_ray.models.bishop.entmax_triton_kernels import backward_kernel

    n_rows, length = p.shape
    grad, alpha = grad.contiguous(), alpha.contiguous()
    per_row = alpha.numel() > 1
    d_scores = torch.empty_like(grad)
    programs, shape = _shape_of_programs(n_rows, length)
    sums = (
        torch.empty(n_rows if per_row else programs, dtype=torch.float32, device=p.device) if need_alpha else d_scores
    )
    with _on(p.device):
        backward_kernel[(programs,)](
            p, grad, alpha, d_scores, sums, n_rows, length, int(per_row), int(need_alpha), **shape
        )
    if not need_alpha:
        return d_scores, None
    d_alpha = sums if per_row else sums.sum(0, keepdim=True)
    return d_scores, d_alpha.reshape(alpha.shape).to(alpha.dtype)
