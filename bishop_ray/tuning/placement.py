"""What the trials of a study need, predicted before they start: a class of memory, or a refusal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bishop_ray.config import Params
from bishop_ray.data.table import Table
from bishop_ray.training.groups import DRIVER_CPUS
from bishop_ray.training.trial import StudyData, TrialSettings
from bishop_ray.tuning.room import PROCESS, Ask, Node, TooLarge, gpu_class, memory_class

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
class Need:
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

    def of(self, params: Params) -> Ask | TooLarge:
        """What a trial asks for, or why it can run nowhere: neither of them starts anything."""
        resources = self._settings.resources
        limit, where = self._limit()
        need = self.need(params) if limit else None
        if need is not None and need.least > limit:
            return TooLarge(f"predicted {_gb(need.whole)} for {need.what}; the largest {where} has {_gb(limit)}")
        if self._settings.through_ray_train:
            return Ask(DRIVER_CPUS)
        if need is None or not resources.packed:
            return Ask(resources.cpus, resources.gpus)
        if resources.gpus:
            return Ask(resources.cpus, gpu_class(need.whole, self.nodes, resources.gpus))
        return Ask(resources.cpus, 0.0, memory_class(need.whole, self.nodes, resources.cpus))

    def again(self, params: Params) -> Ask:
        """What a training after the search asks for, of a point that a trial has trained: that it fits is known."""
        resources = self._settings.resources
        ask = self.of(params)
        if isinstance(ask, TooLarge) or self._settings.through_ray_train:
            return Ask(resources.cpus, resources.gpus)
        return ask

    def at_a_time(self, ask: Ask, most: int) -> int:
        """How many trainings with `ask` run side by side, at most `most`."""
        return max(1, min(most, ask.at_a_time(self.nodes))) if self.nodes else most

    def need(self, params: Params) -> Need:
        """Predicted bytes on the device, or in the process of a trial on CPUs."""
        from bishop_ray.training.passes import EVAL_ROWS

        base = (CONTEXT if self._settings.resources.gpus else PROCESS) + self._table
        if not self._settings.is_network:
            base += COPIES * self._table + LIBRARY
            return Need(base, base, f"a table of {self._rows} rows")
        batch = -(-self._settings.trial(params).train.batch_size // self._settings.resources.workers)
        rows, seen = min(batch, self._rows), min(EVAL_ROWS, self._validation_rows)
        step, validation = base + SAFETY * self._step(params, rows), base + SAFETY * self._validation(params, seen)
        if validation > step:
            whole, what = validation, f"a validation pass of {seen} rows"
        else:
            whole, what = step, f"a step of {rows} rows"
        if whole <= self._limit()[0]:
            return Need(whole, whole, what)
        # Both kinds of passes are cut when memory ends.
        return Need(whole, min(whole, base + SAFETY * self._step(params, max(1, rows // MICRO_BATCHES))), what)

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
