"""Search spaces as data: ``search_spaces/NAME.yaml`` -> a checked `SearchSpace` that suggests parameters.

Three kinds (``int``, ``float``, ``choice``), two options (``log``, ``step``), constants as plain values; both ends
of a range are included. ``first`` lists points that are tried before the sampler decides.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from bishop_ray.config import Params, TrainConfig
from bishop_ray.errors import BadSearchSpace, UnknownName
from bishop_ray.models import MODELS, model_class

if TYPE_CHECKING:
    import optuna

SECTIONS = ("model", "train")
_OPTIONS = {"int": {"step", "log"}, "float": {"step", "log"}, "choice": set()}


@dataclass(frozen=True)
class Range:
    """One searched hyperparameter.

    Attributes:
        kind: "int", "float" or "choice".
        values: (low, high), both included, or the choices.
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

    def __str__(self) -> str:
        if self.kind == "choice":
            return "{" + ", ".join(map(str, self.values)) + "}"
        return f"{'log ' if self.log else ''}[{self.values[0]:g}, {self.values[1]:g}]"


@dataclass(frozen=True)
class SearchSpace:
    """What is searched for a model, and what is tried first.

    Attributes:
        name: File stem.
        model: Registry name of the model.
        entries: Flat name (``model.d_model``) -> `Range` or constant.
        first: Complete points tried first, flat.
        source: Text of the file, as logged.
    """

    name: str
    model: str
    entries: dict[str, Any]
    first: tuple[dict[str, Any], ...]
    source: str

    def suggest(self, trial: optuna.Trial) -> Params:
        """Parameters of one trial, constants included."""
        return unflatten({k: v.suggest(trial, k) if isinstance(v, Range) else v for k, v in self.entries.items()})

    @property
    def searched(self) -> dict[str, Range]:
        """The entries that vary."""
        return {k: v for k, v in self.entries.items() if isinstance(v, Range)}

    def fingerprint(self) -> str:
        """Changes whenever a range, constant or first point does."""
        shown = {k: repr(v) for k, v in sorted(self.entries.items())}
        return hashlib.sha256(json.dumps([self.model, shown, self.first], default=str).encode()).hexdigest()[:12]


def flatten(params: Params) -> dict[str, Any]:
    """``{"model": {"d": 1}}`` -> ``{"model.d": 1}``."""
    return {f"{section}.{key}": value for section in SECTIONS for key, value in params.get(section, {}).items()}


def unflatten(flat: dict[str, Any]) -> Params:
    """The inverse of `flatten`; both sections are always there."""
    params: Params = {section: {} for section in SECTIONS}
    for name, value in flat.items():
        section, _, key = name.partition(".")
        params[section][key] = value
    return params


def find_space(name: str) -> Path:
    """The file of a space: a path as given; else ``./search_spaces``; else the installed copy (layout decision 7).

    Raises:
        BadSearchSpace: The file given does not exist.
        UnknownName: No space of this name.
    """
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = Path(name)
        if not path.is_file():
            raise BadSearchSpace(f"--space: no such file {name!r}")
        return path
    found = named_spaces()
    if name not in found:
        raise UnknownName("search space", name, found)
    return found[name]


def named_spaces() -> dict[str, Path]:
    """All spaces that can be found here, by name; ``./search_spaces`` wins."""
    package = Path(__file__).resolve().parents[1]
    # An editable install has no copy inside the package: the folder stands beside it.
    folders = (package.parent / "search_spaces", package / "search_spaces", Path("search_spaces"))
    return {path.stem: path for folder in folders if folder.is_dir() for path in sorted(folder.glob("*.yaml"))}


def space_names() -> tuple[str, ...]:
    """Names of all spaces that can be found here."""
    return tuple(sorted(named_spaces()))


def load_space(name: str, model: str) -> SearchSpace:
    """Reads and checks a space against the model's signature and `TrainConfig`.

    Raises:
        BadSearchSpace: The file is no YAML mapping, has an unknown key, a wrong type or an impossible range; the
            message names file and key.
        UnknownName: No such space or model.
    """
    if model not in MODELS:
        raise UnknownName("model", model, MODELS)
    path = find_space(name)
    text = path.read_text("utf-8")
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise BadSearchSpace(f"{path}{line}: not valid YAML ({getattr(error, 'problem', error)})") from None
    if not isinstance(content, dict) or not content:
        raise BadSearchSpace(f"{path}: expected the sections {', '.join(SECTIONS)}; found {type(content).__name__}")
    _known(path, "section", content, {*SECTIONS, "first"})
    defaults = _defaults(model)
    entries: dict[str, Any] = {}
    for section in SECTIONS:
        for key, value in _mapping(path, section, content.get(section, {})).items():
            _known(path, f"key of {section!r}", [key], {k.partition(".")[2] for k in defaults if k.startswith(section)})
            entries[f"{section}.{key}"] = _entry(path, f"{section}.{key}", value, defaults[f"{section}.{key}"])
    first = tuple(_first(path, i, point, entries, defaults) for i, point in enumerate(content.get("first") or []))
    return SearchSpace(path.stem, model, entries, first, text)


def _defaults(model: str) -> dict[str, Any]:
    """Flat name -> default of everything a space may set."""
    signature = inspect.signature(model_class(model).__init__)
    result = {f"model.{n}": p.default for n, p in signature.parameters.items() if n not in ("self", "spec")}
    return result | {f"train.{f.name}": f.default for f in fields(TrainConfig) if f.name not in ("metric", "seed")}


def _known(path: Path, kind: str, names: Any, known: set[str]) -> None:
    for name in names:
        if name not in known:
            raise BadSearchSpace(f"{path}: {UnknownName(kind, str(name), known)}")


def _mapping(path: Path, key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadSearchSpace(f"{path}: {key} must be a mapping of names; found {value!r}")
    return value


def _entry(path: Path, name: str, value: Any, default: Any) -> Any:
    """A `Range`, or the constant itself, after all checks."""
    if not isinstance(value, dict):
        _fits(path, name, value, default)
        return value
    kinds = [kind for kind in _OPTIONS if kind in value]
    if len(kinds) != 1:
        raise BadSearchSpace(f"{path}: {name} must have exactly one of int, float, choice; found {sorted(value)}")
    kind = kinds[0]
    _known(path, f"option of {name}", value.keys() - {kind}, _OPTIONS[kind])
    values = value[kind]
    if not isinstance(values, list) or not values or (kind != "choice" and len(values) != 2):
        raise BadSearchSpace(
            f"{path}: {name} must list {'choices' if kind == 'choice' else '[low, high]'}; found {values!r}"
        )
    if kind == "choice":
        for choice in values:
            _fits(path, name, choice, default)
        return Range(kind, tuple(values))
    return _numeric(path, name, kind, value, default)


def _numeric(path: Path, name: str, kind: str, value: dict[str, Any], default: Any) -> Range:
    low, high = value[kind]
    log, step = value.get("log", False), value.get("step")
    wanted = int if kind == "int" else (int, float)
    for end in (low, high):
        if isinstance(end, bool) or not isinstance(end, wanted):
            raise BadSearchSpace(f"{path}: {name} is {kind}, so its ends must be numbers of that kind; found {end!r}")
    if kind == "float":
        low, high = float(low), float(high)
    _fits(path, name, low, default)
    if low > high:
        raise BadSearchSpace(f"{path}: {name} has its low end above its high end; found [{low:g}, {high:g}]")
    if not isinstance(log, bool) or (step is not None and (isinstance(step, bool) or not isinstance(step, wanted))):
        raise BadSearchSpace(f"{path}: {name}: log must be true or false and step a number; found {value!r}")
    if log and step is not None:
        raise BadSearchSpace(f"{path}: {name} has both log and step; at most one is possible")
    if log and low <= 0:
        raise BadSearchSpace(f"{path}: {name} is log, so its low end must be > 0; found {low:g}")
    if step is not None and step <= 0:
        raise BadSearchSpace(f"{path}: {name}: step must be > 0; found {step:g}")
    return Range(kind, (low, high), log, step)


def _fits(path: Path, name: str, value: Any, default: Any) -> None:
    """The value has the type of the signature's default (an int passes for a float, None defaults take anything)."""
    if default is inspect.Parameter.empty or default is None or value is None:
        return
    expected: tuple[type, ...] = (int, float) if isinstance(default, float) else (type(default),)
    if not isinstance(value, expected) or isinstance(value, bool) != isinstance(default, bool):
        raise BadSearchSpace(f"{path}: {name} must be {type(default).__name__}; found {value!r}")


def _first(path: Path, index: int, point: Any, entries: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A complete flat point: what is not given takes the signature's default."""
    where = f"first[{index}]"
    given: dict[str, Any] = {}
    for section, values in _mapping(path, where, point).items():
        _known(path, f"section of {where}", [section], set(SECTIONS))
        for key, value in _mapping(path, f"{where}.{section}", values).items():
            _known(path, f"key of {where}", [f"{section}.{key}"], set(entries))
            given[f"{section}.{key}"] = value
    full = {name: given.get(name, defaults[name]) for name, value in entries.items() if isinstance(value, Range)}
    for name, value in full.items():
        _fits(path, f"{where} {name}", value, defaults[name])
        entry = entries[name]
        if entry.kind == "choice" and value not in entry.values:
            raise BadSearchSpace(f"{path}: {where} {name} must be one of {list(entry.values)}; found {value!r}")
    return full
