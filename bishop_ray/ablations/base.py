"""The configuration that an ablation changes one thing of: the first point of a search space, and what a user sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bishop_ray.ablations.settings import Setting, base_name, chosen
from bishop_ray.config import Params
from bishop_ray.tuning.settings import check_builds, defaults_of, fixed_params
from bishop_ray.tuning.space import flatten, load_space, unflatten

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
    flat = found.defaults | dict(given)
    if name == ALWAYS_TRAINS_ON:
        flat.setdefault("train.patience", max_epochs)
    params = unflatten(flat)
    check_builds(Path("--set"), model, f"{model}: ", params)
    return params


def all_arguments(model: str, params: Params) -> Params:
    """The configuration with every argument of the model, defaults included."""
    defaults = {
        name.partition(".")[2]: default.value for name, default in defaults_of(model).items() if name[:6] == "model."
    }
    return {"model": defaults | params["model"], "train": params["train"]}


def given_values(texts: Sequence[str], models: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Model -> flat name -> value of ``[MODEL.]KEY=VALUE``, see `fixed_params`; without MODEL it is the first model's.

    Raises:
        UserError: An unknown key, a wrong type, or a value that is refused.
    """
    own: dict[str, list[str]] = {model: [] for model in models}
    for text in texts:
        head, _, tail = text.strip().partition(".")
        if head in own and "=" in tail:
            own[head].append(tail)
        else:
            own[models[0]].append(text)
    return {model: flatten(fixed_params(model, mine)) for model, mine in own.items()}


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
        check_builds(Path(name), setting.model, f"setting {setting.name}: ", setting.params(base[setting.model]))
    return settings, bases
