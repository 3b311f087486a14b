"""BiSHop and its baselines, searched by Ray Tune, trained through Ray Train, recorded in MLflow."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bishop_ray.predictor import Predictor


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
