"""BiSHop and its baselines, searched by Ray Tune, trained through Ray Train, recorded in MLflow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bishop_ray.predictor import Predictor
    from bishop_ray.search.tuner import SearchResult, tune

__all__ = ["SearchResult", "load", "tune"]

__version__ = "0.1.0"


def load(name: str, alias: str = "champion", tracking_uri: str = "") -> Predictor:
    """The registered model `name` as a `Predictor`.

    Args:
        name: Registered model, e.g. ``CR-abalone``.
        alias: ``champion`` or a model name such as ``bishop``; a number means that version.
        tracking_uri: MLflow address; empty for ``MLFLOW_TRACKING_URI``, else the local store of this user.

    Raises:
        UserError: No such model or alias, or the tracking server does not answer.
    """
    from bishop_ray.registry import load_best

    return load_best(name, alias, tracking_uri)


def __getattr__(name: str) -> Any:
    """`tune` and `SearchResult`, imported when they are asked for: Ray and torch take seconds."""
    if name not in ("SearchResult", "tune"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bishop_ray.search import tuner

    return getattr(tuner, name)
