"""The metrics, one table: what can be measured, on which task, and in which direction it is better.

Beside the rows of the table every scorer of scikit-learn is a metric under its own name (``scorers.py``).
Everywhere else only the *score* exists: the metric with its sign turned so that larger is better. `display` turns it
back for people. Letters: R rows, K classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bishop_ray.data.table import TaskType
from bishop_ray.data.target import Units
from bishop_ray.errors import BadTable, UnknownName, UserError

Floats = NDArray[np.float64]
Classes = NDArray[np.int64]
CLASSIFICATION = frozenset({TaskType.BINARY, TaskType.MULTICLASS})
REGRESSION = frozenset({TaskType.REGRESSION})


@dataclass(frozen=True)
class Metric:
    """One row of `METRICS`.

    Attributes:
        function: ``f(y, prediction) -> float``; the kind of prediction is told by `needs`.
        tasks: The tasks it fits.
        larger_is_better: Its natural direction.
        needs: "probabilities" (R, K), "labels" (R,) class indices, or "values" (R,) of the target.
        absolute: Values count from zero, not only their differences: they are wanted with the target's centre.
        ranks: It compares rows with each other, so that outputs of different models cannot be pooled.
    """

    function: Callable[[Any, Any], float]
    tasks: frozenset[TaskType]
    larger_is_better: bool
    needs: Literal["probabilities", "labels", "values"]
    absolute: bool = False
    ranks: bool = False


def auc(y: Classes, probabilities: Floats) -> float:
    """Area under the ROC curve; with more than two classes one-vs-rest, macro average.

    Each class that is among the rows, but is not all of them, counts once; a class absent from `y` has no curve and
    is left out of the average (its probabilities still rank the other rows).

    Raises:
        BadTable: Fewer than two classes among the rows, so that no curve exists.
    """
    present = np.unique(y)
    if len(present) < 2:
        raise BadTable(f"auc needs rows of at least two classes; found {len(y)} rows of {len(present)} class(es)")
    if probabilities.shape[1] == 2:
        return roc_area(probabilities[:, 1], y == 1)
    return float(np.mean([roc_area(probabilities[:, k], y == k) for k in present]))


def roc_area(values: NDArray[Any], positive: NDArray[np.bool_]) -> float:
    """Area under the ROC curve: the share of pairs ranked rightly, ties counting half (Mann and Whitney).

    Sorting is all the cost, and sorting numbers is several times as fast as sorting positions, which ranks would need.

    Args:
        values: (R,) of any order: probabilities, sums of them, ranks.
        positive: (R,); some rows are, and some are not.
    """
    ones, zeros = np.sort(values[positive]), np.sort(values[~positive])
    below = np.searchsorted(zeros, ones)
    tied = zeros[np.minimum(below, len(zeros) - 1)] == ones
    equal = np.searchsorted(zeros, ones[tied], "right") - below[tied]
    return float(below.sum() + equal.sum() / 2) / (len(ones) * len(zeros))


def accuracy(y: Classes, labels: Classes) -> float:
    """Share of rows whose most probable class (the first one among equals) is the true one."""
    return float(np.mean(y == labels))


def balanced_accuracy(y: Classes, labels: Classes) -> float:
    """Mean recall over the classes present in `y`; absent classes have no recall and are left out."""
    return float(np.mean([np.mean(labels[y == k] == k) for k in np.unique(y)]))


def f1(y: Classes, probabilities: Floats) -> float:
    """F1 of class 1 (the second in training order) for two classes; for more, the unweighted mean over classes.

    The mean is over the classes present in `y` or predicted; a class without precision or recall counts 0.
    """
    from sklearn.metrics import f1_score

    labels = [1] if probabilities.shape[1] == 2 else None
    return float(f1_score(y, probabilities.argmax(axis=1), labels=labels, average="macro", zero_division=0.0))


def log_loss(y: Classes, probabilities: Floats) -> float:
    """Mean negative natural logarithm of the true class's probability, clipped at 1e-15; any classes may be absent."""
    rows = probabilities / probabilities.sum(axis=1, keepdims=True)
    return float(-np.mean(np.log(np.clip(rows[np.arange(len(y)), y], 1e-15, 1.0))))


def r2(y: Floats, prediction: Floats) -> float:
    """Coefficient of determination over all rows at once (reading.md row 4), never a mean over batches.

    Where `y` is constant the quotient is undefined: 1 for an exact prediction, else 0 (scikit-learn's convention).
    """
    residual = float(np.sum((y - prediction) ** 2))
    total = float(np.sum((y - y.mean()) ** 2))
    if np.ptp(y) == 0.0:
        return 1.0 if residual == 0.0 else 0.0
    return 1.0 - residual / total


def rmse(y: Floats, prediction: Floats) -> float:
    """Root of the mean squared error, in units of the target."""
    return float(np.sqrt(np.mean((y - prediction) ** 2)))


def mae(y: Floats, prediction: Floats) -> float:
    """Mean absolute error, in units of the target."""
    return float(np.mean(np.abs(y - prediction)))


METRICS: dict[str, Metric] = {
    "auc": Metric(auc, CLASSIFICATION, True, "probabilities", ranks=True),
    "accuracy": Metric(accuracy, CLASSIFICATION, True, "labels"),
    "balanced_accuracy": Metric(balanced_accuracy, CLASSIFICATION, True, "labels"),
    "f1": Metric(f1, CLASSIFICATION, True, "probabilities"),
    "log_loss": Metric(log_loss, CLASSIFICATION, False, "probabilities"),
    "r2": Metric(r2, REGRESSION, True, "values"),
    "rmse": Metric(rmse, REGRESSION, False, "values"),
    "mae": Metric(mae, REGRESSION, False, "values"),
}
"""Our own metrics by name; they come before scikit-learn's scorers of the same name."""


def find_metric(name: str) -> Metric:
    """The metric behind a name: one of `METRICS`, else a scorer of scikit-learn.

    Raises:
        UnknownName: No such metric.
    """
    if name in METRICS:
        return METRICS[name]
    from bishop_ray.metrics.scorers import scorer_metric, scorer_names

    if (found := scorer_metric(name)) is None:
        near = difflib.get_close_matches(name, scorer_names(), n=10, cutoff=0.5)
        raise UnknownName("metric", name, [*METRICS, *near])
    return found


def check_metric(name: str, task: TaskType) -> Metric:
    """The metric behind a name.

    Raises:
        UnknownName: No such metric.
        UserError: The metric does not fit the task.
    """
    metric = find_metric(name)
    if task not in metric.tasks:
        fitting = ", ".join(other for other, row in METRICS.items() if task in row.tasks)
        tasks = ", ".join(sorted(metric.tasks)) or "none (it scores clusterings, or several labels per row)"
        raise UserError(
            f"metric {name!r} does not fit a {task.value} task; expected one of {fitting}, or one of scikit-learn's "
            f"scorers for it (--list-metrics); found one for: {tasks}"
        )
    return metric


def default_metric(task: TaskType, suite: bool) -> str:
    """The metric that selects unless another is named (reading.md row 29).

    Args:
        task: The task type.
        suite: Whether the table belongs to an OpenML suite; single tables are compared by AUC.
    """
    if task is TaskType.REGRESSION:
        return "r2"
    return "accuracy" if suite else "auc"


def evaluate(metric: str, task: TaskType, y: NDArray[Any], prediction: NDArray[Any], *, scale: float = 1.0) -> float:
    """The score (larger is better) of predictions.

    Args:
        metric: A name that `find_metric` knows.
        task: The task type.
        y: (R,) class indices in [0, K), or the target.
        prediction: (R, K) probabilities over the full list of classes, whether or not all of them are among the rows;
            for regression (R,) or (R, 1) values in the units of `y`.
        scale: Units of the target per unit of `y` (the standard deviation of a standardised target); regression only.
            Of a standardised target, scikit-learn's scorers need `Units`, which know its mean too.

    Raises:
        UnknownName: No such metric.
        UserError: The metric does not fit the task.
        BadTable: The metric is undefined for these rows (see `auc`).
        ValueError: Shapes do not fit, no rows, a prediction is not finite, or the target's mean is not known.
    """
    row = check_metric(metric, task)
    if len(y) == 0 or len(y) != len(prediction):
        raise ValueError(f"{metric} needs as many predictions as rows, at least one; found {len(prediction)}, {len(y)}")
    if not np.isfinite(prediction).all():
        raise ValueError(f"{metric} needs finite predictions; found {np.sum(~np.isfinite(prediction))} others")
    if row.needs == "values":
        value = row.function(in_units(row, y, scale), in_units(row, prediction, scale))
    else:
        value = _classification(row, task, y, prediction)
    return _turn(row, value)


def in_units(row: Metric, values: NDArray[Any], scale: float) -> Floats:
    """(R,) or (R, 1) values as a metric of regression wants them: times `scale`, and with the centre if it needs it.

    Raises:
        ValueError: It does, and `scale` does not know the centre; or another shape.
    """
    column = _column(values)
    if not row.absolute or (scale == 1.0 and not isinstance(scale, Units)):
        return column * scale
    if not isinstance(scale, Units):
        raise ValueError("this metric needs the target's centre, not its scale alone")
    return scale.decode(column)


def larger_is_better(metric: str) -> bool:
    """The natural direction of a metric; scikit-learn's scorers have it turned already."""
    return metric not in METRICS or METRICS[metric].larger_is_better


def display(metric: str, score: float) -> float:
    """A score back in its metric's natural sign, for people; of a scikit-learn scorer what scikit-learn shows."""
    return score if larger_is_better(metric) else 0.0 - score


def _classification(row: Metric, task: TaskType, y: NDArray[Any], prediction: NDArray[Any]) -> float:
    if prediction.ndim != 2 or (prediction.shape[1] == 2) is not (task is TaskType.BINARY):
        raise ValueError(f"a {task.value} task needs (R, K) probabilities; found shape {prediction.shape}")
    if y.min() < 0 or y.max() >= prediction.shape[1]:
        raise ValueError(f"class indices must lie in [0, {prediction.shape[1]}); found {y.min()} to {y.max()}")
    classes = y.astype(np.int64)
    if row.needs == "probabilities":
        return row.function(classes, prediction.astype(np.float64))
    return row.function(classes, prediction.argmax(axis=1))


def _column(values: NDArray[Any]) -> Floats:
    """(R,) float64 from (R,) or (R, 1)."""
    if values.ndim > 1 and values.shape[1:] != (1,):
        raise ValueError(f"a regression prediction has shape (R,) or (R, 1); found {values.shape}")
    return values.reshape(-1).astype(np.float64)


def _turn(row: Metric, value: float) -> float:
    """`value` with its sign turned where smaller is better; never -0.0."""
    return value if row.larger_is_better else 0.0 - value
