"""Parameters of trials: ranges, constants, their types, and ``KEY=VALUE`` parsing.

Search spaces are checked by the same rules (`space.load_space`).
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from bishop_ray.config import Params, StudyConfig, TrainConfig
from bishop_ray.errors import BadSearchSpace, UnknownName, UserError
from bishop_ray.models import MODELS, model_class
from bishop_ray.search.options import flag

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


SECTIONS = ("model", "train")
FLAGS = {name: flag(name) for name in TrainConfig.names() if name in {f.name for f in fields(StudyConfig)}}
"""Fields of `TrainConfig` that belong to the study: the flags that set them."""
_SET = Path("--set")


def defaults_of(model: str) -> dict[str, Default]:
    """Flat name -> default of everything that may be set for a model."""
    signature = inspect.signature(model_class(model).__init__).parameters.values()
    arguments = {f"model.{p.name}": Default.of(p.default, p.annotation) for p in signature}
    del arguments["model.self"], arguments["model.spec"]
    return arguments | {
        f"train.{f.name}": Default.of(f.default, f.type) for f in fields(TrainConfig) if f.name not in FLAGS
    }


def check_key(path: Path, kind: str, section: str, key: Any, names: Iterable[str]) -> None:
    """Nothing, if `section`.`key` is among `names`.

    Raises:
        BadSearchSpace: It is not, or a flag of the command sets it.
    """
    if section == "train" and key in FLAGS:
        raise BadSearchSpace(f"{path}: train.{key} cannot be set here; {FLAGS[key]} sets it")
    known(path, kind, [key], [name.partition(".")[2] for name in names if name.startswith(f"{section}.")])


def check_builds(path: Path, model: str, what: str, params: Params) -> None:
    """Nothing, if the model and `TrainConfig` take these values.

    Raises:
        BadSearchSpace: One of them refuses a value; the message begins with `what`, or with the section.
    """
    for section, build in (("train", TrainConfig), ("model", model_class(model).check)):
        try:
            build(**params[section])
        except ValueError as error:
            raise BadSearchSpace(f"{path}: {what or section + ': '}{error}") from None


def fixed_params(model: str, given: Sequence[str] = (), file: str = "") -> Params:
    """The settings of a training: those of a file, then those of ``KEY=VALUE`` texts; the rest stays at its default.

    Args:
        model: Registry name.
        given: ``d_model=64`` or ``model.d_model=64``, ``train.lr=1e-3``; a value is read by the type of the default.
        file: A YAML or JSON file with sections ``model`` and ``train``, or ""; one that a study printed as parameters
            (``model.d_model: 64``) is as good.

    Raises:
        UserError: No such file, or an unknown key, a wrong type or a value that model or training refuse; the message
            names the file or ``--set`` and the key.
        UnknownName: No such model.
    """
    defaults = defaults_of(model)
    flat: dict[str, Any] = {}
    path = Path(file)
    if file:
        for name, value in _read(path).items():
            _put(flat, path, model, name, value, defaults)
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise UserError(f"--set: expected KEY=VALUE, e.g. train.lr=1e-3; found {text!r}")
        full = _full_name(_SET, name.strip(), defaults)
        _put(flat, _SET, model, full, _value(full, value.strip(), defaults[full]), defaults)
    params: Params = {section: {} for section in SECTIONS}
    for name, value in flat.items():
        section, _, key = name.partition(".")
        params[section][key] = value
    check_builds(path if file and not given else _SET, model, "", params)
    return params


def _put(flat: dict[str, Any], path: Path, model: str, name: str, value: Any, defaults: dict[str, Default]) -> None:
    """Adds a setting after all checks."""
    name = _full_name(path, name, defaults)
    if name.startswith("train.") and MODELS[model].kind != "network":
        raise UserError(f"{path}: {name}: {model} is trained by its own library; expected settings of 'model' only")
    check_type(path, name, value, defaults[name])
    flat[name] = value


def _full_name(path: Path, name: str, defaults: dict[str, Default]) -> str:
    """The name with its section, which may be left out where it is clear."""
    section, dot, key = name.partition(".")
    if not dot:
        fitting = [s for s in SECTIONS if f"{s}.{name}" in defaults]
        section, key = (fitting[0] if fitting else "train" if name in FLAGS else "model"), name
    known(path, "section", [section], SECTIONS)
    check_key(path, f"key of {section!r}", section, key, defaults)
    return f"{section}.{key}"


def _value(name: str, text: str, default: Default) -> Any:
    """The text as the type of the default says; where that is None, as what it looks like."""
    kind = type(default.value)
    if default.optional and text.lower() in ("none", "null"):
        return None
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise UserError(f"--set: {name} must be true or false; found {text!r}")
        return text.lower() == "true"
    if kind is str:
        return text
    readers: tuple[type, ...] = (int, float) if default.value in (None, inspect.Parameter.empty) else (kind,)
    for read in readers:
        try:
            return read(text)
        except (TypeError, ValueError):
            continue
    if default.value is None:
        return text
    raise UserError(
        f"--set: {name} must be {'a number' if kind is float else f'of type {kind.__name__}'}; found {text!r}"
    )


def _read(path: Path) -> dict[str, Any]:
    """Flat settings of a YAML or JSON file."""
    try:
        content = yaml.safe_load(path.read_text("utf-8")) if path.suffix != ".json" else json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"--params: cannot read {str(path)!r}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"--params: {path} is no YAML or JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(content, dict):
        raise UserError(f"--params: {path}: expected names and values; found {type(content).__name__}")
    flat: dict[str, Any] = {}
    for name, value in content.items():
        if name in SECTIONS and isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[str(name)] = value
    return flat
