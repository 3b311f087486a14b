"""Search spaces: ``search_spaces/NAME.yaml`` becomes a checked `SearchSpace` that suggests parameters.

Three kinds (``int``, ``float``, ``choice``), two options (``log``, ``step``), constants as plain values; both ends
of a range are included. ``first`` lists points that are tried before the sampler decides. A value of such a point may
lie outside its range if the point says so: ``outside: {model.gamma: 0.001}`` names the value within the range that the
sampler is told instead.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from bishop_ray.config import Params
from bishop_ray.errors import BadSearchSpace, UnknownName
from bishop_ray.models import MODELS
from bishop_ray.search.parameters import (
    SECTIONS,
    Default,
    Range,
    check_builds,
    check_key,
    check_type,
    defaults_of,
    known,
    parse_entry,
    same,
)

if TYPE_CHECKING:
    import optuna


OUTSIDE = "outside"


@dataclass(frozen=True)
class SearchSpace:
    """What is searched for a model, and what is tried first.

    Attributes:
        name: File stem.
        model: Registry name of the model.
        entries: Flat name (``model.d_model``) -> `Range` or constant.
        first: Complete points tried first, flat.
        source: Text of the file, as logged.
        stand_ins: Per point of `first`, what the sampler is told in place of values outside their ranges: flat name ->
            value; empty when no point has such values.
    """

    name: str
    model: str
    entries: dict[str, Any]
    first: tuple[dict[str, Any], ...]
    source: str
    stand_ins: tuple[dict[str, Any], ...] = ()

    def queue(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """What to enqueue per point of `first`: it as the sampler is told it, and the values really meant instead."""
        # Optuna refuses a 0 on a log scale, and no longer samples jointly a parameter that one trial lacks.
        pairs = zip(self.first, self.stand_ins or ({},) * len(self.first), strict=True)
        return [(point | told, {name: point[name] for name in told}) for point, told in pairs]

    def suggest(self, trial: optuna.Trial) -> Params:
        """Parameters of one trial, constants included."""
        return unflatten({k: v.suggest(trial, k) if isinstance(v, Range) else v for k, v in self.entries.items()})

    @property
    def searched(self) -> dict[str, Range]:
        """The entries that vary."""
        return {k: v for k, v in self.entries.items() if isinstance(v, Range)}

    @property
    def defaults(self) -> dict[str, Any]:
        """The point tried first, constants included, flat; arguments that it does not name keep their own defaults."""
        constants = {name: entry for name, entry in self.entries.items() if not isinstance(entry, Range)}
        return constants | (self.first[0] if self.first else {})

    def fingerprint(self) -> str:
        """Changes whenever a range, constant or first point does."""
        shown = {k: repr(v) for k, v in sorted(self.entries.items())}
        parts = [self.model, shown, self.first, *filter(None, self.stand_ins)]
        return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:12]


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
    text, content = _read(path)
    known(path, "section", content, {*SECTIONS, "first"})
    defaults = defaults_of(model)
    entries: dict[str, Any] = {}
    for section in SECTIONS:
        for key, value in _mapping(path, section, content.get(section, {})).items():
            check_key(path, f"key of {section!r}", section, key, defaults)
            name = f"{section}.{key}"
            entries[name] = parse_entry(path, name, value, defaults[name])
    points = content.get("first")
    if not isinstance(points, list | None):
        raise BadSearchSpace(f"{path}: first must be a list of points; found {points!r}")
    pairs = [_first(path, f"first[{i}]", point, entries, defaults) for i, point in enumerate(points or [])]
    first, stand_ins = tuple(point for point, _ in pairs), tuple(told for _, told in pairs)
    space = SearchSpace(path.stem, model, entries, first, text, stand_ins if any(stand_ins) else ())
    _check_values(path, space, defaults)
    return space


def _read(path: Path) -> tuple[str, dict[Any, Any]]:
    """Text and content of a file."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise BadSearchSpace(f"{path}: expected UTF-8 text; byte {error.start} is none") from None
    except OSError as error:
        raise BadSearchSpace(f"{path}: {error.strerror}") from None
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise BadSearchSpace(f"{path}{line}: not valid YAML ({problem})") from None
    if not isinstance(content, dict) or not content:
        raise BadSearchSpace(f"{path}: expected the sections {', '.join(SECTIONS)}; found {type(content).__name__}")
    return text, content


def _mapping(path: Path, key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadSearchSpace(f"{path}: {key} must be a mapping of names; found {value!r}")
    return value


def _first(
    path: Path, where: str, point: Any, entries: dict[str, Any], defaults: dict[str, Default]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A complete flat point of the searched names, and its stand-ins; a value not given is the signature's default."""
    sections = dict(_mapping(path, where, point))
    told = _mapping(path, f"{where}.{OUTSIDE}", sections.pop(OUTSIDE, {}))
    known(path, f"name in {where}.{OUTSIDE}", told, [name for name, e in entries.items() if isinstance(e, Range)])
    given: dict[str, Any] = {}
    for section, values in sections.items():
        known(path, f"section of {where}", [section], (*SECTIONS, OUTSIDE))
        for key, value in _mapping(path, f"{where}.{section}", values).items():
            check_key(path, f"key of {where}.{section}", section, key, entries)
            given[f"{section}.{key}"] = value
    full: dict[str, Any] = {}
    for name, entry in entries.items():
        value = given.get(name, defaults[name].value)
        if isinstance(entry, Range):
            full[name] = value
            check_type(path, f"{where} {name}", value, defaults[name])
            if name in told and entry.holds(value):
                raise BadSearchSpace(f"{path}: {where} {name}, {value!r}, lies in {entry}: it needs no {OUTSIDE!r}")
            what, held = (f"{OUTSIDE} {name}", told[name]) if name in told else (name, value)
            if not entry.holds(held):
                raise BadSearchSpace(f"{path}: {where} {what} must be one of {entry}; found {held!r}")
        elif name in given and not same(value, entry):
            raise BadSearchSpace(f"{path}: {where} {name} is a constant of this space, {entry!r}; found {value!r}")
    return full, told


def _check_values(path: Path, space: SearchSpace, defaults: dict[str, Default]) -> None:
    """Builds what the space can suggest: every first point, then each end and choice with the rest at the first point.

    Raises:
        BadSearchSpace: The model or `TrainConfig` refuses a value.
    """
    constants = {name: entry for name, entry in space.entries.items() if not isinstance(entry, Range)}
    start = {
        name: defaults[name].value if entry.holds(defaults[name].value) else entry.values[0]
        for name, entry in space.searched.items()
    }
    points = [constants | point for point in space.first or (start,)]
    for index, point in enumerate(points):
        check_builds(path, space.model, f"first[{index}] " if space.first else "", unflatten(point))
    for name, entry in space.searched.items():
        for value in entry.values:
            check_builds(path, space.model, f"{name}: ", unflatten(points[0] | {name: value}))
