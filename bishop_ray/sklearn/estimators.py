"""Common base of the scikit-learn estimators."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import Tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from bishop_ray.predictor import Predictor
from bishop_ray.sklearn.input_validation import read_features, read_target, weighed


class Tabular(BaseEstimator):  # type: ignore[misc]
    """An estimator whose `_fit` leaves a `Predictor`.

    Attributes:
        predictor_: The fitted predictor, which also saves and loads.
    """

    _task: str
    predictor_: Predictor

    def _fit(self, frame: pd.DataFrame, y: NDArray[Any], weights: NDArray[np.float64] | None = None) -> None:
        """Sets `predictor_` from rows (R, features), class indices or numbers (R,), and row weights > 0 (R,)."""
        raise NotImplementedError

    def _output(self, x: Any) -> NDArray[np.float64]:
        """(R, K) class probabilities, or (R, 1) the standardised target."""
        check_is_fitted(self)
        frame = read_features(self, x, reset=False)
        return np.asarray(self.predictor_.output(frame), np.float64)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "predictor_")

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        tags.input_tags.string = True
        return tags


class Classifier(ClassifierMixin, Tabular):  # type: ignore[misc]
    """The part of a classifier.

    Attributes:
        classes_: (K,) the labels, sorted.
    """

    _task = "classification"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Trains on rows `X` (R, features), a frame or an array, with labels `y` (R,) of any type.

        `sample_weight` (R,), >= 0, counts in the training loss, not in scores; a row of weight 0 is left out.

        Raises:
            ValueError: Bad input, in one line.
        """
        frame = read_features(self, X, reset=True)
        labels = read_target(y, len(frame))
        check_classification_targets(labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"Classifier can't train when only one class is present: {self.classes_[0]!r}")
        frame, codes, weights = weighed(frame, codes, sample_weight)
        if len(np.unique(codes)) < 2:
            raise ValueError("Classifier can't train when only one class is present among rows with a weight above 0")
        self._fit(frame, codes, weights)
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Class probabilities (R, K) in the order of `classes_`."""
        output = self._output(X)
        found = np.zeros((len(output), len(self.classes_)))
        # the rows that were trained on may lack a class of the rows that were given
        codes = np.array(self.predictor_.target.classes, np.int64)
        found[:, codes] = output / output.sum(axis=1, keepdims=True)
        return found

    def predict(self, X: Any) -> NDArray[Any]:
        """The likeliest labels (R,)."""
        probabilities = self.predict_proba(X)
        return np.asarray(self.classes_[probabilities.argmax(axis=1)])


class Regressor(RegressorMixin, Tabular):  # type: ignore[misc]
    """The part of a regressor."""

    _task = "regression"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Trains on rows `X` (R, features), a frame or an array, with numbers `y` (R,).

        `sample_weight` (R,), >= 0, counts in the training loss, not in scores; a row of weight 0 is left out.

        Raises:
            ValueError: Bad input, in one line.
        """
        frame = read_features(self, X, reset=True)
        target = np.asarray(read_target(y, len(frame)), np.float64)
        if not np.isfinite(target).all():  # among objects it was none that could be told
            raise ValueError("Input y contains NaN or infinity.")
        self._fit(*weighed(frame, target, sample_weight))
        return self

    def predict(self, X: Any) -> NDArray[np.float64]:
        """The target (R,) in its own units."""
        output = self._output(X)
        return self.predictor_.target.inverse(output)
