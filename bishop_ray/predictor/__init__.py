"""Fitted models that read the user's own table: what is saved, registered and loaded again.

``predictor.py`` is one preprocessor with one model, ``ensemble_predictor.py`` a weighted mean of several; both are a
`Predictor`.
"""

from __future__ import annotations

from bishop_ray.predictor.ensemble_predictor import EnsembleMember, EnsemblePredictor
from bishop_ray.predictor.explanation import Explanation
from bishop_ray.predictor.predictor import ENSEMBLE, Answers, Predictor, answers, label_text, label_texts
from bishop_ray.predictor.storage import FORMAT, MANIFEST, MODEL, WEIGHTS, fingerprint

__all__ = [
    "ENSEMBLE",
    "FORMAT",
    "MANIFEST",
    "MODEL",
    "WEIGHTS",
    "Answers",
    "EnsembleMember",
    "EnsemblePredictor",
    "Explanation",
    "Predictor",
    "answers",
    "fingerprint",
    "label_text",
    "label_texts",
]
