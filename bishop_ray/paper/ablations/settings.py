"""Ablation settings: which changes are compared, and the base configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bishop_ray.config import Params
from bishop_ray.errors import UnknownName, UserError
from bishop_ray.search.parameters import check_builds, defaults_of, fixed_params
from bishop_ray.search.space import flatten, load_space, unflatten

ORDERS = ("random", "increasing", "decreasing")
"""In which order `Change.remove` takes features away; the latter two by random-forest importance."""
SHARES = tuple(range(10, 100, 10))
"""Percent of the features that the sparsity ablation removes (Grinsztajn et al. 2022, figures 4 and 5)."""
DEPTHS = tuple(range(1, 9))


@dataclass(frozen=True)
class Change:
    """What is done to the data of a run.

    Attributes:
        rotate: Numerical columns are multiplied by a random rotation, drawn by the run's seed.
        order: One of `ORDERS`, or "" to remove nothing.
        remove: Percent of the features that are removed.
    """

    rotate: bool = False
    order: str = ""
    remove: int = 0


@dataclass(frozen=True)
class Setting:
    """One line of an ablation's table.

    Attributes:
        name: As in the table.
        model: Registry name.
        model_params: Arguments of the model that differ from the base configuration.
        change: Of the data.
        needs: "categories" or "numbers": the kind of columns without which the setting is the base itself.
    """

    name: str
    model: str = "bishop"
    model_params: Params = field(default_factory=dict)
    change: Change = Change()
    needs: str = ""

    def params(self, base: Params) -> Params:
        """The configuration of a run: the base with what differs."""
        return {"model": base["model"] | self.model_params, "train": base["train"]}


@dataclass(frozen=True)
class Ablation:
    """An ablation.

    Attributes:
        about: What is compared, in a few words.
        runs: Trainings per setting, as the paper has them; 3 where it does not say.
        settings: Model names -> settings in the order of the table; the first one of a model is what others are
            compared with, unless another one is the base configuration itself.
        models: The models that can take part.
    """

    about: str
    runs: int
    settings: Callable[[Sequence[str]], list[Setting]]
    models: tuple[str, ...] = ("bishop",)


def _components(_: Sequence[str]) -> list[Setting]:
    """Reading of the paper's "Component Analysis": one part replaced at a time."""
    return [
        Setting("full"),
        Setting("no_cat_emb", model_params={"categorical_embedding": "plain"}, needs="categories"),
        Setting("no_num_emb", model_params={"numeric_embedding": "raw"}, needs="numbers"),
        Setting("no_patch_emb", model_params={"stride": 1}),
        Setting("no_decoder", model_params={"decoder": False}),
        Setting("no_module", model_params={"module": "mlp"}),
    ]


def _hopfield(_: Sequence[str]) -> list[Setting]:
    return [
        Setting("gsh", model_params={"activation": "entmax", "hopfield_values": True}),
        Setting("hopfield", model_params={"activation": "softmax", "hopfield_values": True}),
        Setting("attention", model_params={"activation": "softmax", "hopfield_values": False}),
        Setting("sparsemax", model_params={"activation": "sparsemax", "hopfield_values": True}),
        Setting("entmax15", model_params={"activation": "entmax_fixed", "fixed_alpha": 1.5, "hopfield_values": True}),
    ]


def _rotation(_: Sequence[str]) -> list[Setting]:
    """R1 the two directions, R2 the data, R3 both (paper, "Rotation Experiments")."""
    swapped, rotated = {"swap_directions": True}, Change(rotate=True)
    return [
        Setting("full", model_params={"swap_directions": False}),
        Setting("r1", model_params=swapped),
        Setting("r2", model_params={"swap_directions": False}, change=rotated),
        Setting("r3", model_params=swapped, change=rotated),
    ]


def _depth(_: Sequence[str]) -> list[Setting]:
    """Levels of the encoder; the decoder has one more."""
    return [Setting(str(depth), model_params={"n_encoder_levels": depth}) for depth in DEPTHS]


def _sparsity(models: Sequence[str]) -> list[Setting]:
    return [
        setting
        for model in models
        for setting in (
            Setting("all", model),
            *(
                Setting(f"{order}_{share}", model, change=Change(False, order, share))
                for order in ORDERS
                for share in SHARES
            ),
        )
    ]


def _convergence(_: Sequence[str]) -> list[Setting]:
    return _hopfield(_)[:2]


ABLATIONS: dict[str, Ablation] = {
    "components": Ablation("one component of the network left out at a time", 3, _components),
    "hopfield": Ablation("what the layers retrieve with", 10, _hopfield),
    "rotation": Ablation("directions swapped (r1), data rotated (r2), both (r3)", 3, _rotation),
    "depth": Ablation("levels of the encoder, 1 to 8", 3, _depth),
    "sparsity": Ablation(
        "features removed, 10 to 90 %: at random, the least important first (increasing), the most important first",
        3,
        _sparsity,
        ("bishop", "xgboost", "lightgbm"),
    ),
    "convergence": Ablation("loss and score per epoch, no early stopping: GSH and dense Hopfield", 30, _convergence),
}
"""Ablation by name."""


def find(name: str) -> Ablation:
    """The ablation behind a name.

    Raises:
        UnknownName: There is none.
    """
    if name not in ABLATIONS:
        raise UnknownName("ablation", name, ABLATIONS)
    return ABLATIONS[name]


def chosen(name: str, models: Sequence[str], only: Sequence[str]) -> list[Setting]:
    """The settings of an ablation that are to be run.

    Args:
        name: Of the ablation.
        models: Models that take part, all that can for none.
        only: Names of settings, all for none. What the others are compared with (`base_name`) is the caller's to add.

    Raises:
        UnknownName: No such ablation, model of it, or setting.
    """
    ablation = find(name)
    for model in models:
        if model not in ablation.models:
            raise UnknownName(f"model of the ablation {name}", model, ablation.models)
    settings = ablation.settings(models or ablation.models)
    known = list(dict.fromkeys(setting.name for setting in settings))
    for setting in only:
        if setting not in known:
            raise UnknownName(f"setting of the ablation {name}", setting, known)
    return [setting for setting in settings if not only or setting.name in only]


def base_name(name: str, model: str, base: Params) -> str:
    """The setting that the others of the model are compared with: the one that leaves the base configuration as it is.

    Args:
        name: Of the ablation.
        model: Of the settings.
        base: Its configuration, with every argument of the model.

    Raises:
        UserError: The base configuration is none of the settings.
    """
    own = [setting for setting in find(name).settings([model]) if setting.change == Change()]
    for setting in own:
        if all(base["model"].get(key) == value for key, value in setting.model_params.items()):
            return setting.name
    keys = ", ".join(sorted({key for setting in own for key in setting.model_params}))
    raise UserError(f"--set: {keys}: expected the values of a setting of {name}; found a configuration that none has")


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
