"""Estimators for scikit-learn: in pipelines, cross-validation, grid searches.

from bishop_ray.sklearn import BiSHopClassifier
BiSHopClassifier(max_epochs=30).fit(frame, labels).predict(others)
"""

from bishop_ray.sklearn.networks import BiSHopClassifier, BiSHopRegressor

__all__ = ["BiSHopClassifier", "BiSHopRegressor"]
