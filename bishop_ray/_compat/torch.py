"""Private parts of PyTorch: dispatch and function modes, operators, operations on lists of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

VERIFIED = "2.13.0"
"""The version that all of this was read and tried in; ``pyproject.toml`` allows its minor series alone."""
DispatchMode = TorchDispatchMode
"""What sees every operation below autograd; `torch.utils` has it in a private module alone. Seen in PyTorch 2.13.0."""
LOCAL_SCALAR: Any = torch.ops.aten._local_scalar_dense.default
"""The operation behind `Tensor.item`; its overload without another name. Seen in PyTorch 2.13.0."""
CPU_ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Fused attention of a CPU, which `scaled_dot_product_attention` chooses there. Seen in PyTorch 2.13.0."""
CPU_ATTENTION_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Its gradient. Seen in PyTorch 2.13.0."""


class UncompiledMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that is not guarded against PyTorch's compiler, whose import takes a second.

    For modes within which nothing compiles. Seen in PyTorch 2.13.0: `TorchDispatchMode.__init_subclass__` asks.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def function_modes() -> list[TorchFunctionMode]:
    """The function modes that are on, outermost first; there is no public list. Seen in PyTorch 2.13.0."""
    modes: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return modes


def device_constructors() -> frozenset[Callable[..., Any]]:
    """Functions that make a tensor on the default device, as `torch.device` as a context knows them.

    Nothing public lists them. Seen in PyTorch 2.13.0.
    """
    return frozenset(_device_constructors())


def storage_key(storage: UntypedStorage) -> int:
    """A number that a storage has as long as it lives, whichever of its tensors is asked.

    `data_ptr` is 0 for all storages of the meta device, and Python objects of one storage come and go. Seen in PyTorch
    2.13.0.
    """
    return int(storage._cdata)


def schema(operator: Any) -> Any:
    """What an operator overload returns and changes; no public name has its schema. Seen in PyTorch 2.13.0."""
    return operator._schema


def assert_async(holds: Tensor) -> None:
    """Fails on the device when a condition does not hold, without waiting for it.

    An `assert` would wait, and a public face there is not. Seen in PyTorch 2.13.0.
    """
    torch._assert_async(holds)


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies each source to its target in one operation; public ones take a tensor each. Seen in PyTorch 2.13.0."""
    torch._foreach_copy_(targets, sources)


def norm_each(tensors: list[Tensor]) -> tuple[Tensor, ...] | list[Tensor]:
    """The 2-norm of each tensor in one operation; public ones take a tensor each. Seen in PyTorch 2.13.0."""
    return torch._foreach_norm(tensors)
