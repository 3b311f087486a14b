"""Fitted models that read the user's own table: what is saved, registered and loaded again.

``single.py`` is one preprocessor with one model, ``ensemble.py`` a weighted mean of several; both are a `Predictor`.
"""

from bishop_ray.predictor.answers import Answers, answers, label_text, label_texts
from bishop_ray.predictor.ensemble import EnsembleMember, EnsemblePredictor
from bishop_ray.predictor.explanation import Explanation
from bishop_ray.predictor.faithfulness import Faithfulness
from bishop_ray.predictor.files import FORMAT, MANIFEST, fingerprint
from bishop_ray.predictor.single import ENSEMBLE, Predictor
from bishop_ray.predictor.weights import MODEL, WEIGHTS

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
    "Faithfulness",
    "Predictor",
    "answers",
    "fingerprint",
    "label_text",
    "label_texts",
]
