"""Fitted models that read the user's own table: what is saved, registered and loaded again.

``single.py`` is one preprocessor with one model, ``ensemble.py`` a weighted mean of several; both are a `Predictor`.
"""

from bishop_ray.predictor.files import FORMAT, MANIFEST, fingerprint
from bishop_ray.predictor.single import Predictor
from bishop_ray.predictor.weights import MODEL, WEIGHTS

__all__ = ["FORMAT", "MANIFEST", "MODEL", "WEIGHTS", "Predictor", "fingerprint"]
