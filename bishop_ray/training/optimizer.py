"""Optimizer step: gradients of all ranks, clipping, Adam, non-finite numbers named."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from bishop_ray._compat.torch import copy_each, norm_each
from bishop_ray.config import TrainConfig
from bishop_ray.models.base import Network, is_wide
from bishop_ray.training.distributed import Ranks

Batch = tuple[Tensor, Tensor]


def build_optimizer(network: nn.Module, config: TrainConfig) -> Adam:
    """Adam (L2 penalty) or AdamW (decoupled decay), betas (0.9, 0.999).

    No decay on parameters of fewer than two dimensions (biases, norms, entmax's alpha) nor on those that carry a true
    attribute `no_weight_decay`. A parameter with an attribute `learning_rate` has that rate of its own. The fused
    kernel, because it can skip an update without asking the device for a number.
    """
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for parameter in network.parameters():
        if parameter.requires_grad:
            exempt = parameter.ndim < 2 or getattr(parameter, "no_weight_decay", False)
            rate = float(getattr(parameter, "learning_rate", config.lr))
            groups.setdefault((not exempt, rate), []).append(parameter)
    # The network's own rate comes first, whatever parameter stands first: it is the one that is shown.
    order = sorted(groups, key=lambda key: (key[1] != config.lr, not key[0], key[1]))
    options: list[dict[str, Any]] = [
        {"params": groups[key], "lr": key[1], "weight_decay": config.weight_decay if key[0] else 0.0} for key in order
    ]
    kind = AdamW if config.optimizer == "adamw" else Adam
    return kind(options, lr=config.lr, betas=(0.9, 0.999), fused=True)


class Stepper:
    """Turns the gradients of one batch into one update, never asking the device for a number.

    All parameters of one group lie in one flat tensor, of which the network's parameters are views: an update is a
    handful of operations, not several per parameter, which took a third of the step of a small network.

    From the first non-finite gradient on every update is skipped, so that at the end of the epoch the weights are
    still those that met it and the culprit can be named.

    Attributes:
        optimizer: The optimizer, over the flat tensors.
    """

    def __init__(self, network: nn.Module, config: TrainConfig, ranks: Ranks) -> None:
        self.optimizer = build_optimizer(network, config)
        self._names = {p: name for name, p in network.named_parameters()}
        self._ranks = ranks
        self._limit = config.clip_norm
        self._flatten()
        self._skip = torch.zeros((), device=ranks.device)
        # The protocol of torch.amp.GradScaler: the fused kernel leaves everything as it is where `found_inf` is 1, and
        # divides gradients by `grad_scale`.
        self.optimizer.found_inf = self._skip  # type: ignore[attr-defined]
        self._divisor = torch.ones((), device=ranks.device)
        if self._limit > 0:
            self.optimizer.grad_scale = self._divisor  # type: ignore[attr-defined]

    def _flatten(self) -> None:
        """Moves the parameters into flat tensors, group after group."""
        groups = self.optimizer.param_groups
        self._parameters: list[nn.Parameter] = [p for group in groups for p in group["params"]]
        self._members = [len(group["params"]) for group in groups]
        self._zeros = [torch.zeros((), device=p.device, dtype=p.dtype).expand_as(p) for p in self._parameters]
        if len({p.dtype for p in self._parameters}) != 1:
            raise ValueError("expected trained parameters, all of one type")
        flat = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        for p, part in zip(self._parameters, self._split(flat), strict=True):
            p.data = part
        # Kept from step to step: fresh memory of this size would cost more than the step.
        self._gradient = torch.zeros_like(flat)
        self._gradients = self._split(self._gradient)
        self._wide = is_wide(self._parameters)
        self._clear()
        # What tells a bad gradient's parameter: the norm of each, or, cheaper for many small ones, the gradient itself.
        self._first_bad = flat.new_zeros(len(self._parameters)) if self._wide else torch.zeros_like(flat)
        sizes = [sum(p.numel() for p in group["params"]) for group in groups]
        parts = zip(torch.split(flat, sizes), torch.split(self._gradient, sizes), strict=True)
        for group, (values, gradient) in zip(groups, parts, strict=True):
            whole = nn.Parameter(values)
            whole.grad = gradient
            group["params"] = [whole]

    def _clear(self) -> None:
        """Makes the parameters ready for the next batch's gradients.

        Large ones are added up where they stay, so that they are there once. For many small ones a copy afterwards
        takes fewer operations.
        """
        if self._wide:
            self._gradient.zero_()
        for parameter, own in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = own if self._wide else None

    def _gather(self) -> None:
        """Copies gradients that lie elsewhere to their places in the flat one."""
        found = [z if p.grad is None else p.grad for p, z in zip(self._parameters, self._zeros, strict=True)]
        away = [(own, gradient) for own, gradient in zip(self._gradients, found, strict=True) if gradient is not own]
        if away:
            copy_each([own for own, _ in away], [gradient for _, gradient in away])

    def _split(self, flat: Tensor) -> list[Tensor]:
        """The part of each parameter in a flat tensor, in its shape."""
        parts = torch.split(flat, [p.numel() for p in self._parameters])
        return [part.view(p.shape) for p, part in zip(self._parameters, parts, strict=True)]

    def release(self) -> None:
        """Gives the network's parameters memory of their own again; no step may follow."""
        for parameter in self._parameters:
            parameter.data, parameter.grad = parameter.data.clone(), None

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradients at hand; a parameter without gradient counts as gradient 0 on every rank."""
        self._gather()
        self._ranks.sum(self._gradient)
        seen = torch.stack(norm_each(self._gradients)) if self._wide else self._gradient
        norm = torch.linalg.vector_norm(seen)
        torch.where(self._skip.bool(), self._first_bad, seen, out=self._first_bad)
        torch.maximum(self._skip, (~norm.isfinite()).float(), out=self._skip)
        if self._limit > 0:
            torch.clamp((norm + 1e-6) / self._limit, min=1.0, out=self._divisor)
        self.optimizer.step()
        self._clear()

    def moments(self) -> dict[str, Tensor]:
        """Adam's state by ``MOMENT/PARAMETER``, as views."""
        states = [self.optimizer.state[group["params"][0]] for group in self.optimizer.param_groups]
        found: dict[str, Tensor] = {}
        for moment in ("exp_avg", "exp_avg_sq"):
            parts = self._split(torch.cat([state[moment] for state in states]))
            found |= {f"{moment}/{self._names[p]}": part for p, part in zip(self._parameters, parts, strict=True)}
        steps = iter(state["step"] for state, size in zip(states, self._members, strict=True) for _ in range(size))
        return found | {f"step/{self._names[p]}": step for p, step in zip(self._parameters, steps, strict=True)}

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Takes up what `moments` gave.

        Raises:
            KeyError: A parameter is missing.
        """
        start = 0
        for group, size in zip(self.optimizer.param_groups, self._members, strict=True):
            names = [self._names[p] for p in self._parameters[start : start + size]]
            state = {m: torch.cat([moments[f"{m}/{n}"].reshape(-1) for n in names]) for m in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[group["params"][0]] = state | {"step": moments[f"step/{names[0]}"]}
            start += size

    def failed(self) -> bool:
        """Whether a gradient of any step so far was not finite (asks the device)."""
        return bool(self._skip.item())

    def bad_gradient(self) -> str:
        """The parameter nearest to the output whose gradient was not finite, once there was one.

        Backpropagation carries such a value from there towards the input, so the trouble began there.
        """
        kept = self._first_bad if self._wide else torch.stack(norm_each(self._split(self._first_bad)))
        norms = {self._names[p]: norm for p, norm in zip(self._parameters, kept.tolist(), strict=True)}
        bad = [name for name in self._names.values() if not math.isfinite(norms.get(name, 0.0))]
        # Finite parts may overflow together: then the largest.
        return bad[-1] if bad else max(norms, key=lambda name: norms[name])


def learning_rate(optimizer: Optimizer) -> float:
    """The learning rate of the next step."""
    return float(optimizer.param_groups[0]["lr"])


@torch.no_grad()
def find_non_finite(network: Network, batches: Iterable[Batch]) -> str:
    """The first non-finite weight, else the first layer with a non-finite output on `batches`, or ""."""
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        if tensor.is_floating_point() and not tensor.isfinite().all():
            return f"weight {name!r}"
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and not output.isfinite().all():
                found.append(name)

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in network.named_modules()]
    try:
        for x_num, x_cat in batches:
            if len(x_num):
                network(x_num, x_cat)
            if found:
                return f"activation of layer {found[0] or type(network).__name__!r}"
    finally:
        for handle in handles:
            handle.remove()
    return ""
