"""What the trials of a study will cost, in words for the dry run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from bishop_ray.config import TrainConfig
from bishop_ray.models import MODELS
from bishop_ray.models.cost import Cost, training_cost
from bishop_ray.tuning.ranges import Range
from bishop_ray.tuning.space import SearchSpace, load_space, unflatten

if TYPE_CHECKING:
    from bishop_ray.config import StudyConfig
    from bishop_ray.data.table import TableSpec

SECONDS = 1.2
"""Processor time for the search for the costliest corners of the spaces of all studies shown."""
_LEAST = 0.1
"""Seconds below which that search is left out."""
_UNITS = ("", "k", "M", "G", "T", "P", "E")


def forecast(config: StudyConfig, spec: TableSpec, rows: int, studies: int) -> str:
    """The predicted cost of the configuration tried first and of the costliest corner found; "" without networks.

    Args:
        config: The study.
        spec: Its table.
        rows: Training rows.
        studies: How many share the time.
    """
    if MODELS[config.model].kind != "network":
        return ""
    space = load_space(config.space, config.model)

    def predict(point: dict[str, Any]) -> tuple[Cost, int] | None:
        """The cost of one worker's step and its rows; None for sizes that do not go together."""
        params = unflatten(point)
        batch = min(rows, int(params["train"].get("batch_size", TrainConfig.batch_size)))
        batch = -(-batch // config.resources.workers)
        try:
            return training_cost(config.model, spec, params["model"], batch), batch
        except ValueError:
            return None

    first = space.defaults
    known = {"default": predict(first)}
    if space.searched and SECONDS / studies > _LEAST:
        start = time.thread_time()
        found = [known["default"]]
        for point in _corners(space, first, lambda point: _bytes(predict(point))):
            found.append(predict(point))
            if time.thread_time() - start > SECONDS / studies:
                break
        known["largest found in the space"] = max(found, key=_bytes)
    return "predicted: " + "; ".join(
        f"{name} {_words(pair[0])} a step of {pair[1]} rows" for name, pair in known.items() if pair is not None
    )


def _bytes(pair: tuple[Cost, int] | None) -> int:
    return 0 if pair is None else pair[0].memory


def _corners(
    space: SearchSpace, first: dict[str, Any], memory: Callable[[dict[str, Any]], int]
) -> Iterator[dict[str, Any]]:
    """Points that take more and more memory: all sizes at their highest, then one after the other at its lowest.

    Most sizes cost more the larger they are, some (a stride, a merge) the smaller: what does not take more is undone.
    """
    ends = {name: _ends(entry) for name, entry in space.searched.items() if _is_size(name)}
    point = first | {name: values[-1] for name, values in ends.items() if values}
    yield point
    for name, values in ends.items():
        for value in values[:-1]:
            other = point | {name: value}
            yield other
            if memory(other) > memory(point):
                point = other


def _is_size(name: str) -> bool:
    return name.startswith("model.") or name == "train.batch_size"


def _ends(entry: Range) -> list[Any]:
    """Lowest and highest value of numbers, the latter last and alone for real numbers; all choices otherwise."""
    if not all(isinstance(value, int | float) for value in entry.values):
        return list(entry.values)
    low, high = min(entry.values), max(entry.values)
    return [high] if isinstance(high, float) or low == high else [low, high]


def _words(cost: Cost) -> str:
    return f"{_number(cost.flops)}FLOP, {_number(cost.memory)}B"


def _number(value: float) -> str:
    """Three digits and a decimal prefix: "210 M"."""
    power = 0
    while value >= 999.5 and power < len(_UNITS) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {_UNITS[power]}"
