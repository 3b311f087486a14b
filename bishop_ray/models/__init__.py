"""What can be trained. Adding a model: one file here, one YAML in ``search_spaces/``, one line below."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bishop_ray.data.table import TableSpec
from bishop_ray.errors import UnknownName

if TYPE_CHECKING:
    from bishop_ray.models.base import Estimator, Network


@dataclass(frozen=True)
class ModelInfo:
    """A row of the registry; reading it imports nothing heavy.

    Attributes:
        path: ``module:Class``.
        kind: "network" or "estimator".
        library: What implements it.
        space: Source of its search space.
        device: "CPU/GPU" or "CPU".
    """

    path: str
    kind: str
    library: str
    space: str
    device: str


MODELS: dict[str, ModelInfo] = {
    "bishop": ModelInfo(
        "bishop_ray.models.bishop.model:BiSHop", "network", "bishop_ray", "BiSHop (ICML 2024), appendix", "CPU/GPU"
    ),
}


def model_names() -> tuple[str, ...]:
    """All registered names."""
    return tuple(MODELS)


def model_class(name: str) -> type[Network] | type[Estimator]:
    """The class behind a name.

    Raises:
        UnknownName: No such model.
    """
    if name not in MODELS:
        raise UnknownName("model", name, MODELS)
    module, _, cls = MODELS[name].path.partition(":")
    found: type[Network] | type[Estimator] = getattr(importlib.import_module(module), cls)
    return found


def create_model(name: str, spec: TableSpec, hparams: dict[str, Any]) -> Network | Estimator:
    """A fresh model from a `TableSpec` and its hyperparameters."""
    build: Any = model_class(name)
    model: Network | Estimator = build(spec, **hparams)
    return model
