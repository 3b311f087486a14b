"""What a training step costs, predicted from shapes: matrix products and memory, before anything is allocated.

The network is built on PyTorch's meta device, whose tensors have shapes but no values, and one step is run there:
forward, loss, backward, followed by ``models/step_tracer.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from bishop_ray.data.table import TableSpec
from bishop_ray.models import create_model
from bishop_ray.models.base import Network, is_wide
from bishop_ray.models.step_tracer import Kernels, Trace

PRECISIONS = ("fp32", "bf16")
"""Names that `training_cost` knows."""
_KEPT = 3
"""Copies of the trained weights that ``training/optimizer.py`` keeps beside them: Adam's two moments, the gradient."""


@dataclass(frozen=True)
class Cost:
    """Of one training step.

    Attributes:
        flops: Floating-point operations of the matrix products, forward and backward; a multiply-add counts as 2.
        memory: Peak bytes on the device while ``training/loop.py`` trains: weights, those of the best epoch, gradients,
            the optimizer's state, what autograd keeps, what lives for a moment; without the table.
        parameters: Trained numbers.
    """

    flops: int
    memory: int
    parameters: int


def training_cost(
    model: str, spec: TableSpec, hparams: Mapping[str, Any], batch_size: int, precision: str = "fp32"
) -> Cost:
    """The cost of a training step of `batch_size` rows, the same for the same arguments (and cached).

    Args:
        model: Registry name of a network.
        spec: The table.
        hparams: Arguments of its constructor; those not given have their defaults.
        batch_size: Rows that pass through the network at once: a micro-batch where gradients are accumulated.
        precision: "fp32", or "bf16" for autocast with weights in fp32.

    Raises:
        ValueError: Not a network, no rows, an unknown precision, or hyperparameters the network refuses.
        UnknownName: No such model.
    """
    _check(batch_size, precision)
    return _training_cost(model, spec, tuple(sorted(hparams.items())), batch_size, precision)


def memory(model: str, spec: TableSpec, hparams: Mapping[str, Any], batch_size: int, *, precision: str = "fp32") -> int:
    """Peak bytes of a training step; see `training_cost`."""
    return training_cost(model, spec, hparams, batch_size, precision).memory


def flops(model: str, spec: TableSpec, hparams: Mapping[str, Any], batch_size: int) -> int:
    """Floating-point operations of a training step; see `training_cost`."""
    return training_cost(model, spec, hparams, batch_size).flops


def validation_memory(
    model: str, spec: TableSpec, hparams: Mapping[str, Any], rows: int, *, precision: str = "fp32"
) -> int:
    """Peak bytes of a pass over `rows` validation rows during a training: with what training keeps.

    Passes without gradients keep little, but they see many more rows than a step does.

    Args:
        model: As in `training_cost`.
        spec: As there.
        hparams: As there.
        rows: Rows of one pass.
        precision: As there.

    Raises:
        ValueError: As `training_cost`.
        UnknownName: No such model.
    """
    _check(rows, precision)
    return _validation_memory(model, spec, tuple(sorted(hparams.items())), rows, precision)


def _check(rows: int, precision: str) -> None:
    if rows < 1:
        raise ValueError(f"batch_size must be >= 1; found {rows}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}; found {precision!r}")


_Items = tuple[tuple[str, Any], ...]


@lru_cache(maxsize=4096)
def _training_cost(model: str, spec: TableSpec, hparams: _Items, batch_size: int, precision: str) -> Cost:
    network = _build(model, spec, hparams).train()
    trace = _trace(network, batch_size, precision == "bf16", with_gradients=True)
    if is_wide(_parameters(network)):
        peak = trace.peak - _trained(network)  # the trace has seen the kept gradient
    else:
        # When weights are updated activations are gone, and gradients complete.
        peak = max(trace.peak, trace.at_start + _trained(network))
    return Cost(trace.flops, peak + _kept(network), sum(p.numel() for p in network.parameters()))


@lru_cache(maxsize=4096)
def _validation_memory(model: str, spec: TableSpec, hparams: _Items, rows: int, precision: str) -> int:
    network = _build(model, spec, hparams).eval()
    return _trace(network, rows, precision == "bf16", with_gradients=False).peak + _kept(network)


def _build(model: str, spec: TableSpec, hparams: _Items) -> Network:
    """The network on the meta device."""
    # A part of a network that is built on the CPU all the same draws numbers, which must not shift anybody's seed.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        network = create_model(model, spec, dict(hparams))
    if not isinstance(network, Network):
        raise ValueError(f"only networks have a predicted cost; found {model!r}, which trains itself")
    return network.to("meta")


def _trained(network: Network) -> int:
    """Bytes of the trained parameters."""
    return sum(p.numel() * p.element_size() for p in _parameters(network))


def _parameters(network: Network) -> list[nn.Parameter]:
    return [p for p in network.parameters() if p.requires_grad]


def _kept(network: Network) -> int:
    """Bytes that a training keeps from step to step beside the network itself."""
    best: int = sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values())
    return _KEPT * _trained(network) + best


def _trace(network: Network, rows: int, bf16: bool, with_gradients: bool) -> Trace:
    """A pass over `rows` rows; with gradients the loss and the way back, gradients stay, as before an update."""
    spec, trace, kernels = network.spec, Trace(), Kernels()
    for tensor in [*network.parameters(), *network.buffers()]:
        trace.note(tensor)
    if with_gradients and is_wide(_parameters(network)):
        for parameter in _parameters(network):
            parameter.grad = torch.empty_like(parameter)  # added up in place
            trace.note(parameter.grad)
    with torch.set_grad_enabled(with_gradients), trace, kernels:
        x_num, x_cat = torch.empty(rows, spec.n_num), torch.empty(rows, spec.n_cat, dtype=torch.int64)
        y = torch.empty(rows, dtype=torch.int64 if spec.task.is_classification else torch.float32)
        kernels.bf16 = bf16
        out = network(x_num, x_cat).float()
        if not with_gradients:
            return trace
        kernels.bf16 = False
        loss = network.loss(out, y)
        penalty = network.penalty()
        if penalty is not None:
            loss = loss + penalty
        kernels.bf16 = bf16  # a network may compute a part of its forward pass again
        torch.autograd.backward(loss)
    return trace
