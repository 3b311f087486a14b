"""The configuration that an ablation changes one thing of: the first point of a search space, and what a user sets."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from bishop_ray.ablations.settings import Setting, base_name, chosen
from bishop_ray.config import Params, TrainConfig
from bishop_ray.errors import UnknownName, UserError
from bishop_ray.models import model_class
from bishop_ray.tuning.ranges import Default, Range, check_type
from bishop_ray.tuning.space import FLAGS, load_space, unflatten

ALWAYS_TRAINS_ON = "convergence"
"""The ablation whose runs all have every epoch, so that its curves are means over the same runs everywhere."""


def base_params(name: str, model: str, space: str, given: Mapping[str, Any], max_epochs: int) -> Params:
    """The base configuration of a model in an ablation, by section.

    The first point of the search space and its constants (the model's defaults, where it has no first point), then what
    is given. In `ALWAYS_TRAINS_ON` the patience is as long as the training, unless it is given.

    Args:
        name: Of the ablation.
        model: Registry name.
        space: Name or file of the search space.
        given: Flat name -> value.
        max_epochs: Of every run.

    Raises:
        UserError: The model or the training refuses a value.
    """
    found = load_space(space, model)
    constants = {key: value for key, value in found.entries.items() if not isinstance(value, Range)}
    flat = constants | (found.first[0] if found.first else {}) | dict(given)
    if name == ALWAYS_TRAINS_ON:
        flat.setdefault("train.patience", max_epochs)
    return _checked(unflatten(flat), model, "--set")


def _checked(params: Params, model: str, where: str) -> Params:
    try:
        TrainConfig(**params["train"])
        model_class(model).check(**params["model"])
    except ValueError as error:
        raise UserError(f"{where}: {model}: {error}") from None
    return params


def all_arguments(model: str, params: Params) -> Params:
    """The configuration with every argument of the model, defaults included."""
    signature = inspect.signature(model_class(model).__init__).parameters
    defaults = {n: p.default for n, p in signature.items() if n not in ("self", "spec")}
    return {"model": defaults | params["model"], "train": params["train"]}


def given_values(texts: Sequence[str], models: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Model -> flat name -> value of ``[MODEL.][model.|train.]NAME=VALUE``; without MODEL it is the first model's.

    Raises:
        UserError: No "=", a wrong type, or a name twice.
        UnknownName: The model has no such setting.
    """
    found: dict[str, dict[str, Any]] = {model: {} for model in models}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set: expected NAME=VALUE; found {text!r}")
        head, _, tail = key.strip().partition(".")
        model, name = (head, tail) if head in models and tail else (models[0], key.strip())
        full, read = _read(model, name, value)
        if full in found[model]:
            raise UserError(f"--set: {name} is given twice")
        found[model][full] = read
    return found


def _read(model: str, name: str, value: str) -> tuple[str, Any]:
    """Full name and value; types as the signature has them."""
    signature = inspect.signature(model_class(model).__init__).parameters.values()
    known = {
        f"model.{p.name}": Default.of(p.default, p.annotation) for p in signature if p.name not in ("self", "spec")
    }
    known |= {f"train.{f.name}": Default.of(f.default, f.type) for f in fields(TrainConfig) if f.name not in FLAGS}
    full = next((n for n in (name, f"model.{name}", f"train.{name}") if n in known), "")
    if not full:
        if flag := FLAGS.get(name.removeprefix("train.")):
            raise UserError(f"--set: {name} is no setting; {flag} sets it")
        raise UnknownName(f"setting of {model}", name, [n.partition(".")[2] for n in known])
    try:
        read = yaml.safe_load(value)
    except yaml.YAMLError:
        read = value
    if isinstance(read, str) and isinstance(known[full].value, int | float):
        with suppress(ValueError):
            read = float(read)  # YAML takes 1e-3 for a text
    check_type(Path("--set"), full, read, known[full])
    return full, read


def settings_of(
    name: str, base: Mapping[str, Params], only: Sequence[str]
) -> tuple[tuple[Setting, ...], dict[str, str]]:
    """The settings to run, and model -> the one that its others are compared with, which is always among them.

    Args:
        name: Of the ablation.
        base: Model -> base configuration.
        only: Names of settings, all for none.

    Raises:
        UnknownName: No such setting.
        UserError: The base configuration is none of the settings, or a setting cannot be built.
    """
    models = list(base)
    bases = {model: base_name(name, model, all_arguments(model, params)) for model, params in base.items()}
    wanted = {(s.name, s.model) for s in chosen(name, models, only)} | {(bases[m], m) for m in models}
    settings = tuple(s for s in chosen(name, models, ()) if (s.name, s.model) in wanted)
    for setting in settings:
        _checked(setting.params(base[setting.model]), setting.model, f"{name}: setting {setting.name}")
    return settings, bases
