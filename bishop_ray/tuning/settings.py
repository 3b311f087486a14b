"""Settings of a single training: what may be set, of which type, and a user's ``KEY=VALUE`` turned into it.

Search spaces are checked by the same rules (`space.load_space`).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from bishop_ray.config import Params, TrainConfig
from bishop_ray.errors import BadSearchSpace, UserError
from bishop_ray.models import MODELS, model_class
from bishop_ray.tuning.ranges import Default, check_type, known

SECTIONS = ("model", "train")
FLAGS = {"max_epochs": "--max-epochs", "metric": "--metric", "seed": "--seed", "precision": "--precision"}
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
