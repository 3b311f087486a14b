"""Placement of trials: memory and GPU estimates, resource requests.

Ray hands out what is asked for and knows nothing of memory unless it is asked for too. A trial on CPUs asks for a share
of a node's memory beside its CPUs (Ray's own ``memory`` resource), a trial on a GPU for a share of the card. Shares are
halvings of the whole, so that many trials ask for the same and Tune hands their processes on, and so that they pack.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bishop_ray.config import Params
from bishop_ray.data.table import Table
from bishop_ray.training.job import StudyData, TrialSettings
from bishop_ray.training.ray_train import DRIVER_CPUS

PROCESS = 400_000_000
"""Bytes of a trial's process before it trains: Python, Ray, torch and this package (measured: 377 MiB resident)."""
SMALLEST_SHARE = 0.125
"""Of a GPU: more processes on one card wait for each other rather than for their CPUs."""


@dataclass(frozen=True)
class Node:
    """What a node has: CPUs, GPUs, bytes that Ray may hand out, and bytes of its smallest GPU (0: not known)."""

    cpus: float
    gpus: float = 0.0
    memory: int = 0
    gpu_memory: int = 0


@dataclass(frozen=True)
class ResourceRequest:
    """What a trial asks Ray for: CPUs, GPUs and bytes of memory (0: as much as it takes)."""

    cpus: float = 0.0
    gpus: float = 0.0
    memory: int = 0

    def bundle(self) -> dict[str, float]:
        """As one bundle of a placement group."""
        named = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory}
        return {name: amount for name, amount in named.items() if amount}

    def options(self) -> dict[str, Any]:
        """As options of a Ray task."""
        options: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus}
        return options | ({"memory": self.memory} if self.memory else {})

    def fits(self, held: Iterable[ResourceRequest], nodes: Sequence[Node]) -> bool:
        """Whether the nodes together have this much left beside what is `held`; always, where nodes are not known."""
        if not nodes:
            return True
        asks = [self, *held]
        return all(
            sum(getattr(ask, name) for ask in asks) <= sum(getattr(node, name) for node in nodes) + 1e-6
            for name in ("cpus", "gpus", "memory")
        )

    def at_a_time(self, nodes: Sequence[Node]) -> int:
        """How many of it the nodes hold side by side."""
        return sum(
            math.floor(
                min(
                    getattr(node, name) / getattr(self, name)
                    for name in ("cpus", "gpus", "memory")
                    if getattr(self, name)
                )
                + 1e-9
            )
            for node in nodes
        )


@dataclass(frozen=True)
class TooLarge:
    """Why a trial cannot run anywhere."""

    reason: str


def classes(smallest: float) -> list[float]:
    """The shares of a whole that may be asked for: `smallest`, then the halvings of 1 above it."""
    halvings = [2.0**-k for k in range(20) if 2.0**-k > smallest * (1 + 1e-9)]
    return [smallest, *reversed(halvings)]


def share_of(need: float, whole: float, smallest: float) -> float:
    """The smallest class of a `whole` that holds `need`; all of it, where none does."""
    return next((share for share in classes(smallest) if share * whole >= need), 1.0)


def memory_class(need: float, nodes: Sequence[Node], cpus: float) -> int:
    """Bytes that a trial on `cpus` CPUs asks for: a class of the smallest node that can hold `need`.

    Never less than its CPUs' share of the node: a smaller class would let no further trial in.
    """
    able = [node for node in nodes if node.cpus >= cpus and node.memory]
    if not able:
        return 0
    node = min(
        (node for node in able if node.memory >= need),
        key=lambda node: node.memory,
        default=max(able, key=lambda node: node.memory),
    )
    return int(share_of(need, node.memory, cpus / node.cpus) * node.memory)


def gpu_class(need: float, nodes: Sequence[Node], smallest: float) -> float:
    """Share of a GPU that a trial asks for: a class, from `smallest`, of the smallest card that can hold `need`."""
    cards = sorted(node.gpu_memory for node in nodes if node.gpu_memory)
    if not cards:
        return smallest
    return share_of(need, next((card for card in cards if card >= need), cards[-1]), smallest)


logger = logging.getLogger(__name__)
SAFETY = 1.2
"""Predicted memory of a step is multiplied by this: allocators fragment, and predictions err by up to 20 %."""
CONTEXT = 600_000_000
"""Bytes on a card that a process takes before it trains: the CUDA context and its libraries' workspaces."""
LIBRARY = 160_000_000
"""Bytes of a library of trees and its code (measured: 110 to 150 MiB)."""
COPIES = 5
"""Tables' worth of memory that a library of trees takes beside the table (measured on 200,000 x 50: 2.1 to 4.5)."""
MICRO_BATCHES = 8
"""Parts into which a batch may be cut when memory ends: what fits in no such part fits nowhere."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Predicted bytes of a trial.

    Attributes:
        whole: With its full batch.
        least: With the smallest part of a batch that a step may be cut into.
        what: What they are for, in words.
    """

    whole: float
    least: float
    what: str


class Placement:
    """Predicts what the trials of one study need.

    Args:
        settings: What the trials share.
        data: What they train on.
        nodes: Where they may run; without any nothing is predicted.
    """

    def __init__(self, settings: TrialSettings, data: StudyData, nodes: Sequence[Node]) -> None:
        self._settings, self.nodes = settings, tuple(nodes)
        self._spec, self._rows, self._validation_rows = data.spec, len(data.train), len(data.validation)
        self._table = _size(data.train) + _size(data.validation)

    def of(self, params: Params) -> ResourceRequest | TooLarge:
        """What a trial asks for, or why it can run nowhere: neither of them starts anything."""
        resources = self._settings.resources
        limit, where = self._limit()
        need = self.need(params) if limit else None
        if need is not None and need.least > limit:
            return TooLarge(f"predicted {_gb(need.whole)} for {need.what}; the largest {where} has {_gb(limit)}")
        if self._settings.through_ray_train:
            return ResourceRequest(DRIVER_CPUS)
        if need is None or not resources.packed:
            return ResourceRequest(resources.cpus, resources.gpus)
        if resources.gpus:
            return ResourceRequest(resources.cpus, gpu_class(need.whole, self.nodes, resources.gpus))
        return ResourceRequest(resources.cpus, 0.0, memory_class(need.whole, self.nodes, resources.cpus))

    def again(self, params: Params) -> ResourceRequest:
        """What a training after the search asks for, of a point that a trial has trained: that it fits is known."""
        resources = self._settings.resources
        ask = self.of(params)
        if isinstance(ask, TooLarge) or self._settings.through_ray_train:
            return ResourceRequest(resources.cpus, resources.gpus)
        return ask

    def at_a_time(self, ask: ResourceRequest, most: int) -> int:
        """How many trainings with `ask` run side by side, at most `most`."""
        return max(1, min(most, ask.at_a_time(self.nodes))) if self.nodes else most

    def need(self, params: Params) -> MemoryEstimate:
        """Predicted bytes on the device, or in the process of a trial on CPUs."""
        from bishop_ray.training.micro_batch import EVAL_ROWS

        base = (CONTEXT if self._settings.resources.gpus else PROCESS) + self._table
        if not self._settings.is_network:
            base += COPIES * self._table + LIBRARY
            return MemoryEstimate(base, base, f"a table of {self._rows} rows")
        batch = -(-self._settings.trial(params).train.batch_size // self._settings.resources.workers)
        rows, seen = min(batch, self._rows), min(EVAL_ROWS, self._validation_rows)
        step, validation = base + SAFETY * self._step(params, rows), base + SAFETY * self._validation(params, seen)
        if validation > step:
            whole, what = validation, f"a validation pass of {seen} rows"
        else:
            whole, what = step, f"a step of {rows} rows"
        if whole <= self._limit()[0]:
            return MemoryEstimate(whole, whole, what)
        # Both kinds of passes are cut when memory ends.
        return MemoryEstimate(
            whole, min(whole, base + SAFETY * self._step(params, max(1, rows // MICRO_BATCHES))), what
        )

    def _limit(self) -> tuple[int, str]:
        """The most memory that a trial can have anywhere, and what has it; 0 where it is not known."""
        resources = self._settings.resources
        able = [node for node in self.nodes if node.cpus >= resources.cpus and node.gpus >= resources.gpus]
        if resources.gpus:
            return max((node.gpu_memory for node in able), default=0), "GPU"
        return max((node.memory for node in able), default=0), "node"

    def _step(self, params: Params, rows: int) -> float:
        return self._predicted(lambda cost: cost.memory(self._settings.model, self._spec, _sizes(params), rows))

    def _validation(self, params: Params, rows: int) -> float:
        return self._predicted(
            lambda cost: cost.validation_memory(self._settings.model, self._spec, _sizes(params), rows)
        )

    def _predicted(self, ask: Callable[[Any], int]) -> float:
        """Bytes that a pass takes in float32; 0 for a configuration that cannot be built, whose trial tells why."""
        from bishop_ray.models import cost

        try:
            return float(ask(cost))
        except (ValueError, TypeError, RuntimeError) as error:
            logger.debug("no prediction for %s: %s", self._settings.model, error)
            return 0.0


def _sizes(params: Params) -> dict[str, Any]:
    """The model's hyperparameters with one rate for all that drop something out.

    A prediction takes a third of a second and is kept; memory depends on whether there is dropout, not on how much.
    """
    return {name: 0.5 if "dropout" in name and value else value for name, value in params["model"].items()}


def _size(table: Table) -> int:
    return int(table.x_num.nbytes + table.x_cat.nbytes + table.y.nbytes)


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
