"""One call that trains any model of the registry at its default point, as a trial does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from bishop_ray.config import Params, TrialConfig
from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.table import RawDataset, TableSpec
from bishop_ray.metrics import default_metric
from bishop_ray.models import MODELS, create_model, model_class, not_installed
from bishop_ray.models.base import Network
from bishop_ray.predictor import Predictor
from bishop_ray.search.parameters import Range
from bishop_ray.search.space import load_space, space_names, unflatten
from bishop_ray.training.fit_estimator import fit_estimator
from bishop_ray.training.loop import EpochResult, fit_network
from bishop_ray.training.results import RoundResult

NEEDS_WEIGHTS = ("tabpfn", "tabicl")
"""Models whose pretrained weights are not part of their package."""
SPACES = {"bishop": "bishop_small"}
"""Spaces other than the model's own: the paper's BiSHop has 28 million weights, too many for a test."""
FEW_ROUNDS = {"n_rounds": 100, "n_estimators": 40, "max_iter": 40, "iterations": 40, "n_epochs": 20}
"""Caps of the arguments that say how long an estimator trains: what is tested here does not need full trainings."""

Report = EpochResult | RoundResult


def why_not(name: str, spec: TableSpec, rows: int) -> str:
    """Why the model cannot be tested on such a table, or ""."""
    if reason := not_installed(name):
        return reason
    if find_spec(MODELS[name].path.partition(":")[0]) is None:
        return f"{name} has no file yet"
    if name not in space_names():
        return f"{name} has no search space yet"
    return model_class(name).cannot(spec, rows)


@cache
def default_point(name: str) -> dict[str, Any]:
    """The model's first trial, flat, constants included."""
    space = load_space(SPACES.get(name, name), name)
    constants = {key: entry for key, entry in space.entries.items() if not isinstance(entry, Range)}
    return constants | dict(space.first[0] if space.first else {})


def default_params(name: str) -> Params:
    """The model's first trial, estimators with few rounds."""
    params = unflatten(default_point(name))
    for argument, parameter in inspect.signature(model_class(name).__init__).parameters.items():
        if MODELS[name].kind == "estimator" and argument in FEW_ROUNDS:
            value = params["model"].get(argument, parameter.default)
            # Permutations of a foundation model are whole passes, not trees.
            params["model"][argument] = min(value, 2 if name in NEEDS_WEIGHTS else FEW_ROUNDS[argument])
    return params


def train_default(
    name: str,
    train: RawDataset,
    val: RawDataset,
    *,
    max_epochs: int = 2,
    seed: int = 0,
    on_epoch: Callable[[Report], bool] = lambda report: False,
) -> tuple[Predictor, list[Report]]:
    """The trained predictor and all reports; one CPU thread.

    Args:
        name: Registry name.
        train: Training rows; the preprocessor learns from them alone.
        val: Validation rows.
        max_epochs: Of a network.
        seed: Training seed.
        on_epoch: True ends the training.
    """
    torch.set_num_threads(1)
    preprocessor = Preprocessor.fit(train, model_class(name).numeric)
    tables = preprocessor.transform(train), preprocessor.transform(val)
    reports: list[Report] = []

    def note(report: Report) -> bool:
        reports.append(report)
        return on_epoch(report)

    metric, scale = default_metric(preprocessor.spec.task, suite=False), preprocessor.target.scale
    job = TrialConfig.from_params(name, default_params(name), metric=metric, max_epochs=max_epochs, seed=seed)
    torch.manual_seed(seed)
    model = create_model(name, preprocessor.spec, job.params["model"])
    if isinstance(model, Network):
        fit_network(model, *tables, job.train, note, target_scale=scale)
    else:
        model.n_threads, model.seed = 1, seed
        fit_estimator(model, *tables, metric, note, target_scale=scale)
    return Predictor(preprocessor, model, name, job.params["model"], {"seed": seed}), reports
