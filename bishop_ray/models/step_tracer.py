"""Tracer of one training step: FLOP and bytes per operator.

What autograd keeps and what lives only for a moment count as they do in a real run, because it is the same autograd.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from bishop_ray._compat.torch import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    LOCAL_SCALAR,
    UncompiledMode,
    device_constructors,
    function_modes,
    schema,
    storage_key,
)


class Trace(UncompiledMode):  # type: ignore[no-untyped-call]
    """Counts matrix products and follows the bytes of living storages, of all operations within.

    Attributes:
        flops: So far.
        live: Bytes alive now.
        peak: Most bytes alive at once.
        at_start: Bytes that were noted before the first operation.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.live = self.peak = self.at_start = 0
        self._sizes: dict[int, int] = {}
        self._known: dict[Any, _Result] = {}

    def __enter__(self) -> Trace:
        self.at_start = self.live
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def note(self, tensor: Tensor) -> bool:
        """Counts the tensor's storage until it is freed; False if it was counted already: a view."""
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._sizes:
            return False
        self._sizes[key] = storage.nbytes()
        self.live += self._sizes[key]
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key)
        return True

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is LOCAL_SCALAR:
            return 0  # a value that is asked for, for a record: there are none
        kind = _kind(func)
        # Most operations repeat one with the same shapes. Those need not run: shapes take most of their time.
        if kind == "in place":
            return args[0]
        key = _key(func, args, kwargs) if kind == "fresh" else None
        found = self._known.get(key) if key is not None else None
        if found is not None:
            return self._repeat(found)
        out = func(*args, **kwargs)
        formula = _FLOPS.get(func.overloadpacket)
        flops = formula(*args, **kwargs, out_val=out) if formula is not None else 0
        self.flops += flops
        outs = out if isinstance(out, tuple | list) else (out,)
        new = [self.note(tensor) if isinstance(tensor, Tensor) else tensor is None for tensor in outs]
        if key is not None and all(new):
            tensors = tuple(None if t is None else (t.shape, t.stride(), t.dtype) for t in outs)
            self._known[key] = _Result(tensors, flops, isinstance(out, Tensor))
        return out

    def _repeat(self, found: _Result) -> Any:
        self.flops += found.flops
        made = [None if shown is None else self._new(*shown) for shown in found.tensors]
        return made[0] if found.single else tuple(made)

    def _new(self, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        self.note(tensor)
        return tensor


class _Result(NamedTuple):
    """What an operation gave: shape, strides and type of each tensor, its products, whether it gave just one."""

    tensors: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype] | None, ...]
    flops: int
    single: bool


@cache
def _kind(func: Any) -> str:
    """What an operation does: "in place" changes values alone, "fresh" gives new tensors alone; else ""."""
    shown, name = schema(func), func.overloadpacket.__name__
    if shown.is_mutable:
        own = name.endswith("_") and len(shown.returns) == 1 and torch.Tag.inplace_view not in func.tags
        return "in place" if own and name not in ("resize_", "set_") else ""
    new = [item.alias_info is None for item in shown.returns]
    return "fresh" if new and all(new) else ""


def _key(*values: Any) -> Any:
    """Something hashable that is equal for operations with equal results, or None."""
    try:
        key = tuple(map(_shown, values))
        hash(key)
    except TypeError:
        return None
    return key


def _shown(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(map(_shown, value))
    if isinstance(value, dict):
        return tuple((name, _shown(item)) for name, item in value.items())
    return type(value), value


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    flops: int = sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
    return flops


def _attention_backward_flops(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    shapes = (grad.shape, query.shape, key.shape, value.shape)
    flops: int = sdpa_backward_flop_count(*shapes)  # type: ignore[no-untyped-call]
    return flops


_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    CPU_ATTENTION: _attention_flops,
    CPU_ATTENTION_BACKWARD: _attention_backward_flops,
}
_CONSTRUCTORS = device_constructors()
_PRODUCTS = frozenset(
    {
        F.linear, F.bilinear, torch.einsum, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm,
        torch.bmm, Tensor.bmm, torch.baddbmm, torch.addmm, torch.addbmm,
    }
)  # fmt: skip
"""What autocast runs in the lower precision."""


class Kernels(TorchFunctionMode):
    """Runs what the device would run: fused attention, and under `bf16` matrix products in that type.

    The meta device has neither: attention would be its plain formula with all weights in memory, and `torch.autocast`
    leaves its tensors as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bf16 = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.bf16 and (func in _PRODUCTS or func is F.scaled_dot_product_attention):
            args = tuple(_lower(value) for value in args)
            kwargs = {name: _lower(value) for name, value in kwargs.items()}
        if func in _CONSTRUCTORS and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        if func is F.scaled_dot_product_attention:
            return CPU_ATTENTION(*args, **kwargs)[0]
        return func(*args, **kwargs)


def _lower(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype is torch.float32:
        return value.to(torch.bfloat16)
    return type(value)(map(_lower, value)) if isinstance(value, tuple | list) else value


def recomputed(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """``function(*args)``, of which autograd keeps the arguments alone: it is computed again for the gradients.

    ``torch.utils.checkpoint``, also while `Kernels` is on: a function mode is off in the backward pass otherwise.
    """
    out: Tensor = checkpoint(function, *args, use_reentrant=False, context_fn=_same_modes)
    return out


def _same_modes() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), _Again(function_modes())


class _Again(ExitStack):
    """Enters modes at its own entry."""

    def __init__(self, modes: list[TorchFunctionMode]) -> None:
        super().__init__()
        self._modes = modes

    def __enter__(self) -> _Again:
        for mode in self._modes:
            self.enter_context(mode)
        return self
