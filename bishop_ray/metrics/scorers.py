"""scikit-learn's scorers as metrics, all that ``sklearn.metrics.get_scorer_names`` lists.

A scorer asks an estimator for predictions. Here it is handed one that holds finished predictions, so that every scorer
of the installed scikit-learn gives what it gives there, through its public face alone. Which task a scorer fits is
found by trying it. Letters: R rows, K classes.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np
import sklearn
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import get_scorer, get_scorer_names

from bishop_ray.data.table import TaskType
from bishop_ray.errors import BadTable
from bishop_ray.metrics import Classes, Floats, Metric

FLOORS = {
    "neg_mean_poisson_deviance": 0.0,
    "neg_mean_gamma_deviance": 0.0,
    "neg_mean_squared_log_error": -1.0,
    "neg_root_mean_squared_log_error": -1.0,
}
"""Predictions must lie above these, which no model here promises: those at or below are moved `_STEP` above."""
_STEP = 1e-6
"""Times the mean size of the target: a large error, and a finite one, as a clipped probability is to the log loss."""
_RANKING = ("roc_auc", "average_precision")
_PROBE_ROWS = 24


@cache
def scorer_names() -> tuple[str, ...]:
    """The names that scikit-learn knows, sorted."""
    return tuple(sorted(get_scorer_names()))


@cache
def scorer_metric(name: str) -> Metric | None:
    """The scorer of that name as a metric, larger is better; None if scikit-learn has none.

    Its `tasks` are those in which it is defined and scores nearly right predictions above wrong ones: none for scorers
    of clusterings, or of several labels per row.
    """
    if name not in scorer_names():
        return None
    if _fits_values(name):
        tasks = frozenset({TaskType.REGRESSION})

        def values(y: Floats, prediction: Floats) -> float:
            return _of_values(name, y, prediction)

        return Metric(values, tasks, True, "values", absolute=True)
    fits = {TaskType.BINARY: _fits_classes(name, 2), TaskType.MULTICLASS: _fits_classes(name, 3)}

    def classes(y: Classes, probabilities: Floats) -> float:
        return _of_classes(name, y, probabilities)

    tasks = frozenset(task for task, fit in fits.items() if fit)
    return Metric(classes, tasks, True, "probabilities", ranks=name.startswith(_RANKING))


class _Classifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Holds the class probabilities of rows (R, K), whatever rows it is asked about."""

    def __init__(self, probabilities: Floats) -> None:
        self.probabilities = probabilities
        self.classes_ = np.arange(probabilities.shape[1])
        self.asked = False

    def predict(self, _: Any) -> Classes:
        """(R,) the likeliest classes, the first one among equals."""
        likeliest: Classes = self.probabilities.argmax(axis=1)
        return likeliest

    def predict_proba(self, _: Any) -> Floats:
        """(R, K)."""
        self.asked = True
        return self.probabilities


class _Regressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Holds predictions of rows (R,)."""

    def __init__(self, prediction: Floats) -> None:
        self.prediction = prediction

    def predict(self, _: Any) -> Floats:
        """(R,)."""
        return self.prediction


def _of_values(name: str, y: Floats, prediction: Floats) -> float:
    if name in FLOORS:
        least = FLOORS[name] + _STEP * (float(np.mean(np.abs(y))) or 1.0)
        prediction = np.where(prediction > FLOORS[name], prediction, least)
    return _score(name, _Regressor(prediction), y)


def _of_classes(name: str, y: Classes, probabilities: Floats) -> float:
    rows = probabilities / probabilities.sum(axis=1, keepdims=True)
    classifier = _Classifier(rows)
    k = rows.shape[1]
    if len(present := np.unique(y)) == k:
        return _score(name, classifier, y)
    try:
        value, reason = _score(name, classifier, y), ""
    except BadTable as error:
        value, reason = np.nan, str(error)
    if classifier.asked:
        # From the rows alone a scorer of probabilities takes the classes for fewer than there are.
        try:
            return _score(name, classifier, y, classifier.classes_)
        except (BadTable, TypeError) as error:
            reason = reason and (reason if isinstance(error, TypeError) else str(error))
    if reason:
        raise BadTable(f"{reason}; the {len(y)} rows are of {len(present)} of {k} classes")
    return value


def _score(name: str, estimator: Any, y: NDArray[Any], labels: Classes | None = None) -> float:
    """What the scorer says of an estimator; with `labels`, told of all classes.

    Raises:
        BadTable: It is undefined.
        TypeError: It takes no `labels`.
    """
    scorer = get_scorer(name)
    # Rows that only show that they are as many as there are targets.
    x = np.zeros((len(y), 1))
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # of an undefined value the result tells
            if labels is None:
                value = float(scorer(estimator, x, y))
            else:
                with sklearn.config_context(enable_metadata_routing=True):
                    value = float(scorer.set_score_request(labels=True)(estimator, x, y, labels=labels))
    except (ValueError, AttributeError, IndexError, ZeroDivisionError) as error:
        text = " ".join(str(error).split())[:200]
        raise BadTable(f"metric {name!r} is undefined for these rows: {text}") from None
    if not np.isfinite(value):
        raise BadTable(f"metric {name!r} is undefined for these rows: it gives {value}")
    return value + 0.0  # never -0.0


def _fits_values(name: str) -> bool:
    y = np.linspace(0.5, 3.7, _PROBE_ROWS)
    return _tells_apart(name, y, _Regressor(1.1 * y), _Regressor(1.1 * y[::-1]))


def _fits_classes(name: str, k: int) -> bool:
    """With the classes' names changed: scorers of clusterings do not care, others find the predictions wrong."""
    y = np.arange(_PROBE_ROWS) % k
    told = y.copy()
    told[:k] = (y[:k] + 1) % k  # a mistake in each class: some scores have no value where there is none
    sure = 0.6 + 0.3 * np.linspace(0, 1, _PROBE_ROWS)
    probabilities = np.repeat((1 - sure)[:, None] / (k - 1), k, axis=1)
    probabilities[np.arange(_PROBE_ROWS), told] = sure
    return _tells_apart(name, y, _Classifier(probabilities), _Classifier(np.roll(probabilities, 1, axis=1)))


def _tells_apart(name: str, y: NDArray[Any], good: Any, bad: Any) -> bool:
    try:
        better, worse = _score(name, good, y), _score(name, bad, y)
    except (BadTable, TypeError):
        return False
    return better > worse + 1e-9
