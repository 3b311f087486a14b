"""What nodes have and trials ask for, and the classes that memory is asked for in; Ray itself is not needed here.

Ray hands out what is asked for and knows nothing of memory unless it is asked for too. A trial on CPUs asks for a share
of a node's memory beside its CPUs (Ray's own ``memory`` resource), a trial on a GPU for a share of the card. Shares are
halvings of the whole, so that many trials ask for the same and Tune hands their processes on, and so that they pack.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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
class Ask:
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

    def fits(self, held: Iterable[Ask], nodes: Sequence[Node]) -> bool:
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
