"""Which precision a network's forward pass runs in: float32, or bfloat16 where the processor has it and it pays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bishop_ray._compat.torch import DispatchMode
from bishop_ray.models.base import Network
from bishop_ray.training.device_table import Resident
from bishop_ray.training.micro_batch import Passes

PROBE_ROWS = 8
PER_NUMBER, PER_PRODUCT = 16.0, 1.5e6
"""What bfloat16 costs on a CPU, in multiplications that it must save: see `bf16_pays`."""
_PRODUCTS = {
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten.bmm.default: 0,
    torch.ops.aten.baddbmm.default: 1,
}
"""Matrix products, and where their first factor stands among the arguments."""


def resolve_precision(asked: str, network: Network, data: Resident, batch_size: int) -> str:
    """What was asked for, or what "auto" is here: "fp32" or "bf16".

    "auto" is bfloat16 on a CUDA device that has it, and on a CPU with AVX512-bf16 or AMX where `bf16_pays`.
    """
    if asked != "auto":
        return asked
    if data.x_num.device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    has = torch.cpu.get_capabilities()
    fast = has.get("avx512_bf16", False) or has.get("amx_tile", False)
    return "bf16" if fast and bf16_pays(network, data, batch_size) else "fp32"


@torch.no_grad()
def bf16_pays(network: Network, data: Resident, batch_size: int) -> bool:
    """Whether bfloat16 is faster on a CPU, from the shapes of the matrix products of a batch alone.

    bfloat16 saves time per multiplication and costs time per number that is converted and per operation. Measured on
    one thread of a CPU with AVX512-bf16: networks of small matrices lose a third (an MLP of width 64), those near the
    limits gain nothing (BiSHop of width 32, SAINT), those far above gain half and more (BiSHop of width 256 at batch
    32: 1.55 times as fast; an MLP of width 256 at batch 1024: 1.8 times).

    Looks at a forward pass of a few rows; leaves the network in evaluation mode.
    """
    rows = min(PROBE_ROWS, len(data), batch_size)
    meter = _ProductMeter(batch_size / rows)
    with meter:
        Passes(network, "fp32").outputs(data, slice(0, rows))
    return meter.work > PER_NUMBER * meter.numbers + PER_PRODUCT * meter.products


class _ProductMeter(DispatchMode):  # type: ignore[no-untyped-call]
    """Counts what the matrix products of a pass do.

    Attributes:
        work: Multiplications.
        numbers: Read and written.
        products: Operations.
    """

    def __init__(self, scale: float) -> None:
        """Counts for `scale` times the rows that it sees."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = self.numbers = 0.0
        self.products = 0
        self._scale = scale

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and takes note of it."""
        out = func(*args, **(kwargs or {}))
        if func in _PRODUCTS:
            left, right = args[_PRODUCTS[func] :][:2]
            self._note(left, right, out)
        return out

    def _note(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        self.products += 1
        self.work += self._scale * out.numel() * left.shape[-1]
        # The second factor of a plain product is a weight, the same for any number of rows.
        weight = right.ndim == 2
        self.numbers += self._scale * (left.numel() + out.numel()) + right.numel() * (1.0 if weight else self._scale)
