"""Metrics: known values, agreement with scikit-learn, signs, missing classes, clear refusals."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as sk

from bishop_ray.data.table import TaskType
from bishop_ray.errors import BadTable, UnknownName, UserError
from bishop_ray.metrics import METRICS, check_metric, default_metric, display, evaluate

BINARY, MULTI, REGRESSION = TaskType.BINARY, TaskType.MULTICLASS, TaskType.REGRESSION


def probabilities(rows: int, classes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(classes), rows).astype(np.float32)


def classes_of(rows: int, classes: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.arange(rows) % classes)


def test_known_binary_values():
    y = np.array([0, 0, 1, 1])
    p1 = np.array([0.1, 0.4, 0.35, 0.8])
    p = np.stack([1 - p1, p1], axis=1)
    assert evaluate("auc", BINARY, y, p) == 0.75
    assert evaluate("accuracy", BINARY, y, p) == 0.75
    assert evaluate("balanced_accuracy", BINARY, y, p) == 0.75
    assert evaluate("f1", BINARY, y, p) == pytest.approx(2 / 3)
    assert evaluate("log_loss", BINARY, y, p) == pytest.approx(-0.4723, abs=1e-4)


def test_known_regression_values_in_both_shapes():
    y = np.array([3.0, -0.5, 2.0, 7.0], np.float32)
    prediction = np.array([2.5, 0.0, 2.0, 8.0], np.float32)
    for shaped in (prediction, prediction[:, None]):
        assert evaluate("r2", REGRESSION, y, shaped) == pytest.approx(0.948608, abs=1e-6)
        assert evaluate("mae", REGRESSION, y, shaped) == -0.5
        assert evaluate("rmse", REGRESSION, y, shaped) == pytest.approx(-np.sqrt(0.375))
        assert evaluate("rmse", REGRESSION, y, shaped, scale=10.0) == pytest.approx(-10 * np.sqrt(0.375))


@pytest.mark.parametrize("classes", [2, 5])
def test_agrees_with_scikit_learn(classes):
    task = BINARY if classes == 2 else MULTI
    y, p = classes_of(300, classes), probabilities(300, classes)
    labels, exact = p.argmax(1), p.astype(np.float64) / p.sum(1, keepdims=True, dtype=np.float64)
    average = "binary" if classes == 2 else "macro"
    expected = {
        "auc": sk.roc_auc_score(y, exact[:, 1] if classes == 2 else exact, multi_class="ovr"),
        "accuracy": sk.accuracy_score(y, labels),
        "balanced_accuracy": sk.balanced_accuracy_score(y, labels),
        "f1": sk.f1_score(y, labels, average=average),
        "log_loss": -sk.log_loss(y, exact),
    }
    for name, value in expected.items():
        assert evaluate(name, task, y, p) == pytest.approx(value, rel=1e-9), name


def test_r2_is_over_all_rows_not_a_mean_of_parts():
    rng = np.random.default_rng(0)
    y = np.concatenate([rng.normal(0, 1, 50), rng.normal(100, 1, 50)])
    prediction = y + rng.normal(0, 1, 100)
    whole = evaluate("r2", REGRESSION, y, prediction)
    parts = np.mean([evaluate("r2", REGRESSION, y[s], prediction[s]) for s in (slice(50), slice(50, 100))])
    assert whole == pytest.approx(sk.r2_score(y, prediction))
    assert whole > 0.99
    assert parts < 0.5


def test_constant_target():
    y = np.full(4, 0.1, np.float32)
    assert evaluate("r2", REGRESSION, y, y) == 1.0
    assert evaluate("r2", REGRESSION, y, y + 1) == 0.0
    assert evaluate("r2", REGRESSION, np.ones(1), np.zeros(1)) == 0.0


@pytest.mark.parametrize("name", [n for n, m in METRICS.items() if MULTI in m.tasks])
def test_classes_missing_from_the_rows_are_no_accident(name):
    """Seven classes known, three among the scored rows, as a rare class leaves them."""
    y = np.array([0, 2, 2, 6, 0, 6])
    good = np.full((6, 7), 0.05, np.float32)
    good[np.arange(6), y] = 0.7
    perfect = {"log_loss": np.log(0.7)}.get(name, 1.0)
    assert evaluate(name, MULTI, y, good) == pytest.approx(perfect, abs=1e-6)
    bad = good[::-1][:, ::-1]
    assert evaluate(name, MULTI, y, bad) < perfect


def test_auc_of_missing_classes_averages_the_present_ones():
    y, p = classes_of(200, 3), probabilities(200, 5)
    expected = np.mean([sk.roc_auc_score(y == k, p[:, k]) for k in range(3)])
    assert evaluate("auc", MULTI, y, p) == pytest.approx(expected)


def test_auc_without_a_second_class_says_so():
    with pytest.raises(BadTable, match="at least two classes; found 4 rows of 1 class"):
        evaluate("auc", BINARY, np.zeros(4, np.int64), probabilities(4, 2))


def test_log_loss_of_a_certain_mistake_is_finite():
    p = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    assert evaluate("log_loss", BINARY, np.array([1, 1]), p) == pytest.approx(np.log(1e-15) / 2)


@pytest.mark.parametrize("name", list(METRICS))
def test_better_predictions_score_higher_and_display_turns_back(name):
    task = MULTI if MULTI in METRICS[name].tasks else REGRESSION
    if task is MULTI:
        y = classes_of(90, 3)
        better = np.eye(3)[y] * 0.8 + 0.2 / 3
        worse = probabilities(90, 3)
    else:
        y = np.random.default_rng(0).normal(size=90)
        better, worse = y + 0.1, y * 0.5
    high, low = evaluate(name, task, y, better), evaluate(name, task, y, worse)
    assert high > low
    natural = display(name, high), display(name, low)
    assert (natural[0] > natural[1]) is METRICS[name].larger_is_better
    if not METRICS[name].larger_is_better:
        assert natural[0] > 0
    assert str(display(name, 0.0)) == "0.0"


def test_defaults():
    assert default_metric(BINARY, suite=False) == default_metric(MULTI, suite=False) == "auc"
    assert default_metric(BINARY, suite=True) == default_metric(MULTI, suite=True) == "accuracy"
    assert default_metric(REGRESSION, suite=True) == default_metric(REGRESSION, suite=False) == "r2"


def test_refusals_in_one_line():
    with pytest.raises(UnknownName, match="unknown metric 'acuracy'; did you mean 'accuracy'"):
        check_metric("acuracy", BINARY)
    with pytest.raises(UserError, match="'r2' does not fit a binary task; expected one of auc, accuracy") as caught:
        evaluate("r2", BINARY, np.array([0, 1]), probabilities(2, 2))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="'auc' does not fit a regression task; expected one of r2, rmse, mae"):
        check_metric("auc", REGRESSION)


@pytest.mark.parametrize(
    ("task", "y", "prediction", "message"),
    [
        (BINARY, np.array([0, 1]), np.array([0.2, 0.8]), "probabilities"),
        (BINARY, np.array([0, 1]), probabilities(2, 3), "probabilities"),
        (MULTI, np.array([0, 3]), probabilities(2, 3), r"lie in \[0, 3\)"),
        (REGRESSION, np.zeros(2), np.array([np.nan, 0.0]), "finite"),
        (REGRESSION, np.zeros(2), np.zeros((2, 2)), r"\(R, 1\)"),
        (REGRESSION, np.zeros(2), np.zeros(3), "as many"),
        (REGRESSION, np.zeros(0), np.zeros(0), "at least one"),
    ],
)
def test_wrong_arrays_never_become_a_number(task, y, prediction, message):
    with pytest.raises(ValueError, match=message):
        evaluate(default_metric(task, suite=True), task, y, prediction)
