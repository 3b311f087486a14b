"""What can be trained. Adding a model: one file here, one YAML in ``search_spaces/``, one line below."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bishop_ray.errors import UnknownName, UserError

if TYPE_CHECKING:
    from bishop_ray.data.table import TableSpec
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
        modules: Modules that must be installed.
        extra: The extra of this package that brings them, "" when they always come along.
    """

    path: str
    kind: str
    library: str
    space: str
    device: str
    modules: tuple[str, ...] = ()
    extra: str = ""


_PAPER = "BiSHop (ICML 2024), appendix"
_BENCHMARK = "Grinsztajn et al. 2022"
# In the order in which a search over all models tries them: cheap and strong first.
MODELS: dict[str, ModelInfo] = {
    "lightgbm": ModelInfo(
        "bishop_ray.models.lightgbm:LightGBM", "estimator", "lightgbm", _PAPER, "CPU", ("lightgbm",), "boosters"
    ),
    "xgboost": ModelInfo(
        "bishop_ray.models.xgboost:XGBoost", "estimator", "xgboost", _PAPER, "CPU/GPU", ("xgboost",), "boosters"
    ),
    "catboost": ModelInfo(
        "bishop_ray.models.catboost:CatBoost", "estimator", "catboost", _PAPER, "CPU/GPU", ("catboost",), "boosters"
    ),
    "random_forest": ModelInfo(
        "bishop_ray.models.random_forest:RandomForest", "estimator", "scikit-learn", _BENCHMARK, "CPU"
    ),
    "gbdt": ModelInfo("bishop_ray.models.gbdt:GBDT", "estimator", "scikit-learn", _BENCHMARK, "CPU"),
    "mlp": ModelInfo("bishop_ray.models.mlp:MLP", "network", "rtdl_revisiting_models", _BENCHMARK, "CPU/GPU"),
    "realmlp": ModelInfo(
        "bishop_ray.models.realmlp:RealMLP",
        "estimator",
        "pytabkit",
        "Holzmüller et al. 2024",
        "CPU/GPU",
        ("pytabkit",),
        "realmlp",
    ),
    "tabm": ModelInfo("bishop_ray.models.tabm:TabM", "network", "tabm", "Gorishniy et al. 2025", "CPU/GPU"),
    "resnet": ModelInfo("bishop_ray.models.resnet:ResNet", "network", "rtdl_revisiting_models", _BENCHMARK, "CPU/GPU"),
    "tabnet": ModelInfo("bishop_ray.models.tabnet:TabNet", "network", "pytorch_tabnet", _PAPER, "CPU/GPU"),
    "tab_transformer": ModelInfo(
        "bishop_ray.models.tab_transformer:TabTransformer",
        "network",
        "tab_transformer_pytorch",
        "Huang et al. 2020",
        "CPU/GPU",
    ),
    "tangos": ModelInfo("bishop_ray.models.tangos:TANGOS", "network", "bishop_ray", _PAPER, "CPU/GPU"),
    "ft_transformer": ModelInfo(
        "bishop_ray.models.ft_transformer:FTTransformer", "network", "rtdl_revisiting_models", _BENCHMARK, "CPU/GPU"
    ),
    "bishop": ModelInfo("bishop_ray.models.bishop.model:BiSHop", "network", "bishop_ray", _PAPER, "CPU/GPU"),
    "t2g_former": ModelInfo("bishop_ray.models.t2g_former:T2GFormer", "network", "bishop_ray", _PAPER, "CPU/GPU"),
    "saint": ModelInfo("bishop_ray.models.saint:SAINT", "network", "bishop_ray", _BENCHMARK, "CPU/GPU"),
    "tabicl": ModelInfo(
        "bishop_ray.models.tabicl:TabICL",
        "estimator",
        "tabicl",
        "Qu et al. 2025: no search",
        "CPU/GPU",
        ("tabicl",),
        "tabicl",
    ),
    "tabpfn": ModelInfo(
        "bishop_ray.models.tabpfn:TabPFN",
        "estimator",
        "tabpfn",
        "BiSHop (ICML 2024), appendix: no search",
        "CPU/GPU",
        ("tabpfn",),
        "tabpfn",
    ),
}


def not_installed(name: str) -> str:
    """What must be installed before the model can be used, with the pip line, or "" (nothing is imported)."""
    info = MODELS[name]
    missing = [module for module in info.modules if importlib.util.find_spec(module) is None]
    if not missing:
        return ""
    return f"{name} needs {', '.join(missing)}: pip install 'bishop-ray[{info.extra}]'"


def model_names() -> tuple[str, ...]:
    """All registered names."""
    return tuple(MODELS)


def model_class(name: str) -> type[Network] | type[Estimator]:
    """The class behind a name.

    Raises:
        UnknownName: No such model.
        UserError: Its library is not installed; the message has the pip line.
    """
    if name not in MODELS:
        raise UnknownName("model", name, MODELS)
    if reason := not_installed(name):
        raise UserError(reason)
    module, _, cls = MODELS[name].path.partition(":")
    found: type[Network] | type[Estimator] = getattr(importlib.import_module(module), cls)
    return found


def create_model(name: str, spec: TableSpec, hparams: dict[str, Any]) -> Network | Estimator:
    """A fresh model from a `TableSpec` and its hyperparameters."""
    build: Any = model_class(name)
    model: Network | Estimator = build(spec, **hparams)
    return model
