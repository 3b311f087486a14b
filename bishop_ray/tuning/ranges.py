"""One entry of a search space: a `Range` or a constant, and the checks of its form and type."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bishop_ray.errors import BadSearchSpace, UnknownName

if TYPE_CHECKING:
    import optuna

_OPTIONS = {"int": {"step", "log"}, "float": {"step", "log"}, "choice": set()}


@dataclass(frozen=True)
class Range:
    """One searched hyperparameter.

    Attributes:
        kind: "int", "float" or "choice".
        values: (low, high), both included, or the choices: what is built when the space is checked.
        log: Sample on a logarithmic scale.
        step: Distance of the grid from `low`, or None.
    """

    kind: str
    values: tuple[Any, ...]
    log: bool = False
    step: float | None = None

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        """The trial's value of this parameter."""
        if self.kind == "choice":
            return trial.suggest_categorical(name, list(self.values))
        low, high = self.values
        if self.kind == "int":
            return trial.suggest_int(name, low, high, step=int(self.step or 1), log=self.log)
        return trial.suggest_float(name, low, high, step=self.step, log=self.log)

    def holds(self, value: Any) -> bool:
        """Whether `value` can be drawn (a step's grid aside)."""
        if self.kind == "choice":
            return any(same(value, choice) for choice in self.values)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and bool(self.values[0] <= value <= self.values[1])

    def __str__(self) -> str:
        if self.kind == "choice":
            return "{" + ", ".join(map(str, self.values)) + "}"
        return f"{'log ' if self.log else ''}[{self.values[0]:g}, {self.values[1]:g}]"


def same(one: Any, other: Any) -> bool:
    """Equality that tells 1 from True."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


@dataclass(frozen=True)
class Default:
    """What the code says of a hyperparameter.

    Attributes:
        value: Its default, or `inspect.Parameter.empty`.
        optional: Whether None may be given.
    """

    value: Any
    optional: bool

    @classmethod
    def of(cls, value: Any, annotation: Any) -> Default:
        """From a signature's default and annotation."""
        return cls(value, value is None or "None" in str(annotation))


def known(path: Path, kind: str, names: Iterable[Any], expected: Iterable[str]) -> None:
    """Nothing, if all `names` are among those expected.

    Raises:
        BadSearchSpace: One is not; the message has the nearest one.
    """
    for name in names:
        if name not in expected:
            raise BadSearchSpace(f"{path}: {UnknownName(kind, str(name), expected)}")


def parse_entry(path: Path, name: str, value: Any, default: Default) -> Any:
    """A `Range`, or the constant itself, after all checks of form and type.

    Raises:
        BadSearchSpace: Names file and key.
    """
    if not isinstance(value, dict):
        check_type(path, name, value, default)
        return value
    kinds = [kind for kind in _OPTIONS if kind in value]
    if len(kinds) != 1:
        found = sorted(map(str, value))
        raise BadSearchSpace(f"{path}: {name} must have exactly one of int, float, choice; found {found}")
    kind = kinds[0]
    known(path, f"option of {name}", value.keys() - {kind}, _OPTIONS[kind])
    values = value[kind]
    if not isinstance(values, list) or not values or (kind != "choice" and len(values) != 2):
        raise BadSearchSpace(
            f"{path}: {name} must list {'choices' if kind == 'choice' else '[low, high]'}; found {values!r}"
        )
    if kind == "choice":
        for choice in values:
            check_type(path, name, choice, default)
        return Range(kind, tuple(values))
    return _numeric(path, name, kind, value, default)


def _numeric(path: Path, name: str, kind: str, value: dict[str, Any], default: Default) -> Range:
    low, high = value[kind]
    log, step = value.get("log", False), value.get("step")
    wanted = int if kind == "int" else (int, float)
    for end in (low, high):
        if isinstance(end, bool) or not isinstance(end, wanted):
            raise BadSearchSpace(f"{path}: {name} is {kind}, so its ends must be numbers of that kind; found {end!r}")
        check_type(path, name, end, default)
    if kind == "float":
        low, high = float(low), float(high)
    if low > high:
        raise BadSearchSpace(f"{path}: {name} has its low end above its high end; found [{low:g}, {high:g}]")
    if not isinstance(log, bool) or (step is not None and (isinstance(step, bool) or not isinstance(step, wanted))):
        raise BadSearchSpace(f"{path}: {name}: log must be true or false and step a number; found {value!r}")
    if log and step is not None:
        raise BadSearchSpace(f"{path}: {name} has both log and step; at most one is possible")
    if log and low <= 0:
        raise BadSearchSpace(f"{path}: {name} is log, so its low end must be > 0; found {low:g}")
    if step is not None and not 0 < step < math.inf:
        raise BadSearchSpace(f"{path}: {name}: step must be > 0 and finite; found {step:g}")
    return Range(kind, (low, high), log, step)


def check_type(path: Path, name: str, value: Any, default: Default) -> None:
    """Nothing, if `value` has the type of the default (an int passes for a float) and is finite.

    Raises:
        BadSearchSpace: Names file and key.
    """
    if value is None and default.optional:
        return
    kind = type(default.value)
    if default.value is not inspect.Parameter.empty and default.value is not None:
        expected: tuple[type, ...] = (int, float) if kind is float else (kind,)
        if not isinstance(value, expected) or isinstance(value, bool) != (kind is bool):
            raise BadSearchSpace(f"{path}: {name} must be {kind.__name__}; found {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadSearchSpace(f"{path}: {name} must be finite; found {value!r}")
