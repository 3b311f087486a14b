"""One optimizer step: gradients of all ranks, clipping, Adam; and what went wrong when numbers stop being finite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from bishop_ray.config import TrainConfig
from bishop_ray.models.base import Network
from bishop_ray.training.ranks import Ranks

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

    From the first non-finite gradient on every update is skipped, so that at the end of the epoch the weights are
    still those that met it and the culprit can be named.

    Attributes:
        optimizer: The optimizer.
        parameters: The trained parameters, in the network's order.
    """

    def __init__(self, network: nn.Module, config: TrainConfig, ranks: Ranks) -> None:
        self.optimizer = build_optimizer(network, config)
        named = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self.parameters = list(named.values())
        self._names = list(named)
        self._ranks = ranks
        self._limit = config.clip_norm
        self._bad = torch.zeros(len(named), dtype=torch.bool, device=ranks.device)
        self._skip = torch.zeros((), device=ranks.device)
        # The protocol of torch.amp.GradScaler: the fused kernel leaves everything as it is where this is 1.
        self.optimizer.found_inf = self._skip  # type: ignore[attr-defined]

    def step(self) -> None:
        """One update from the gradients at hand; a parameter without gradient counts as gradient 0 on every rank."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._ranks.sum_gradients(self.parameters)
        norms = torch.stack(torch._foreach_norm([p.grad for p in self.parameters if p.grad is not None]))
        bad = ~norms.isfinite()
        torch.where(self._skip.bool(), self._bad, bad, out=self._bad)
        torch.maximum(self._skip, bad.any().float(), out=self._skip)
        if self._limit > 0:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self._limit, torch.linalg.vector_norm(norms))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def failed(self) -> bool:
        """Whether a gradient of any step so far was not finite (asks the device)."""
        return bool(self._skip.item())

    def bad_gradient(self) -> str:
        """The parameter nearest to the output whose gradient was not finite, or "".

        Backpropagation carries such a value from there towards the input, so the trouble began there.
        """
        bad = self._bad.nonzero().flatten().tolist()
        return self._names[bad[-1]] if bad else ""


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
