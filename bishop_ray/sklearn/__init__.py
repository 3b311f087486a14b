"""Estimators for scikit-learn: in pipelines, cross-validation, grid searches.

from bishop_ray.sklearn import BiSHopClassifier, TunedRegressor
BiSHopClassifier(max_epochs=30).fit(frame, labels).predict(others)
TunedRegressor(models=["bishop", "xgboost"], time_budget="10m").fit(frame, prices)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bishop_ray.sklearn.bishop import BiSHopClassifier, BiSHopRegressor

if TYPE_CHECKING:
    from bishop_ray.sklearn.tuned import TunedClassifier, TunedRegressor


__all__ = ["BiSHopClassifier", "BiSHopRegressor", "TunedClassifier", "TunedRegressor"]


def __getattr__(name: str) -> Any:
    """The searches, at first use: they import Ray."""
    if name not in ("TunedClassifier", "TunedRegressor"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bishop_ray.sklearn import tuned

    return getattr(tuned, name)
