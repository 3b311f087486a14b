"""A small real network, tables it can learn, and one call that trains it."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from bishop_ray.config import TrainConfig
from bishop_ray.data.table import Table, TableSpec, TaskType
from bishop_ray.models.base import Network
from bishop_ray.training.loop import EpochResult, fit_network

CONFIG = TrainConfig(max_epochs=4, batch_size=32, lr=1e-2, metric="accuracy", seed=3)


class Mlp(Network):
    """Two numbers and one category; a penalty, a buffer filled by `observe`, a switchable poison."""

    def __init__(self, spec: TableSpec, dropout: float = 0.0, width: int = 16, decay: float = 0.0) -> None:
        super().__init__()
        self.spec, self.decay = spec, decay
        self.embed = nn.Embedding(spec.cat_cardinalities[0], 3)
        self.register_buffer("center", torch.zeros(spec.n_num))
        self.scale = nn.Parameter(torch.ones(1, 1))
        self.scale.no_weight_decay = True
        self.unused = nn.Parameter(torch.ones(2, 2))
        self.first = nn.Linear(spec.n_num + 3, width)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(width, spec.n_out)
        self.seen: list[int] = []

    def observe(self, train: Table) -> None:
        self.center.copy_(torch.from_numpy(train.x_num.mean(axis=0)))

    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        if self.training:
            self.seen.append(len(x_num))
        joined = torch.cat([(x_num - self.center) * self.scale, self.embed(x_cat[:, 0])], dim=1)
        return self.last(self.drop(self.first(joined).relu()))

    def penalty(self) -> Tensor | None:
        return self.decay * self.last.weight.square().sum() if self.decay else None

    def diagnostics(self) -> dict[str, float]:
        return {"scale": float(self.scale.detach())}


def spec_of(task: TaskType) -> TableSpec:
    return TableSpec(task, 2, (4,), {TaskType.REGRESSION: 1, TaskType.BINARY: 2}.get(task, 3))


def table(task: TaskType, rows: int, seed: int, noise: float = 0.1) -> Table:
    rng = np.random.default_rng(seed)
    x_num = rng.normal(1.0, 1.0, (rows, 2)).astype(np.float32)
    x_cat = rng.integers(0, 4, (rows, 1))
    signal = x_num[:, 0] * x_num[:, 1] - 1 + 0.5 * x_cat[:, 0] - 0.75 + rng.normal(0, noise, rows)
    if task is TaskType.REGRESSION:
        return Table(x_num, x_cat, (signal / 1.5).astype(np.float32))
    return Table(x_num, x_cat, np.digitize(signal, [0.0, 1.0][: spec_of(task).n_out - 1]))


def fit(task: TaskType = TaskType.BINARY, config: TrainConfig = CONFIG, rows: int = 203, stop_at: int = 0, **options):
    """A fresh network trained on fresh tables; returns it with the result and all reported epochs."""
    hparams = options.pop("hparams", {})
    noise = options.pop("noise", 0.1)
    torch.manual_seed(0)
    network = options.pop("network", None) or Mlp(spec_of(task), **hparams)
    seen: list[EpochResult] = []

    def on_epoch(result: EpochResult) -> bool:
        seen.append(result)
        return result.epoch == stop_at

    train, val = table(task, rows, 0, noise), table(task, 101, 1, noise)
    result = fit_network(network, train, val, config, on_epoch, **options)
    return network, result, seen


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def numbers(seen: list[EpochResult]) -> list[EpochResult]:
    return [replace(r, seconds=0.0) for r in seen]


class Cramped(Mlp):
    """Out of memory above `most` rows, as a device or (`real`) the CPU's allocator says it, forward or backward."""

    def __init__(self, spec: TableSpec, most: int, kind: str = "forward") -> None:
        super().__init__(spec)
        self.most, self.kind = most, kind
        self.held: list[weakref.ref[Tensor]] = []
        self.rows: list[int] = []

    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        assert all(ref() is None for ref in self.held), "tensors of the failed pass are still there"
        self.rows.append(len(x_num))
        if len(x_num) <= self.most:
            return super().forward(x_num, x_cat)
        activation = super().forward(x_num, x_cat)
        self.held = [weakref.ref(activation)]
        if self.kind == "backward" and self.training:
            return Exhausted.apply(activation)
        if self.kind == "real":
            torch.empty(10**15)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Exhausted(torch.autograd.Function):
    """The identity, whose gradient needs more memory than there is."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("CUDA out of memory.")


class PoisonedGradient(torch.autograd.Function):
    """The identity, whose gradient is not a number."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * math.nan


class Poisoned(Mlp):
    """Goes wrong at its fifth training batch, in the way `kind` says."""

    def __init__(self, spec: TableSpec, kind: str) -> None:
        super().__init__(spec)
        self.kind = kind
        self.middle = nn.Linear(16, 16)

    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        if self.training:
            self.seen.append(len(x_num))
        # A gradient goes wrong once: every later one is fine, and the training must fail all the same.
        wrong = len(self.seen) == 5 if self.kind == "gradient" else len(self.seen) >= 5
        joined = torch.cat([x_num, self.embed(x_cat[:, 0])], dim=1)
        hidden = self.first(joined).relu()
        if wrong and self.kind == "weight":
            self.middle.bias.data[3] = math.inf
        if wrong and self.kind == "activation":
            hidden = hidden * 1e38
        if wrong and self.kind == "gradient":
            hidden = PoisonedGradient.apply(hidden)
        return self.last(self.middle(hidden * 10))
