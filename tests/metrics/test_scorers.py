"""Every scorer of scikit-learn as a metric: the value it gives a fitted estimator, or a refusal of one line."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn import metrics as sk
from sklearn.linear_model import LinearRegression
from sklearn.metrics import get_scorer, get_scorer_names
from sklearn.naive_bayes import GaussianNB

from bishop_ray.config import StudyConfig
from bishop_ray.data.refs import file_ref
from bishop_ray.data.split import protocol
from bishop_ray.data.table import RawDataset, TaskType
from bishop_ray.data.target import TargetCoder, Units
from bishop_ray.errors import BadTable, UnknownName, UserError
from bishop_ray.metrics import METRICS, check_metric, display, evaluate, find_metric
from bishop_ray.metrics.scorers import metric_tasks
from bishop_ray.report.tables import shown
from bishop_ray.search.dataset import divide
from bishop_ray.search.ensemble_selection import Member, cross_fitted, running_score, select
from bishop_ray.tracking.naming import safe_key

ROOT = Path(__file__).resolve().parents[2]
BINARY, MULTI, REGRESSION = TaskType.BINARY, TaskType.MULTICLASS, TaskType.REGRESSION
CLUSTERS = {
    "adjusted_mutual_info_score", "adjusted_rand_score", "completeness_score", "fowlkes_mallows_score",
    "homogeneity_score", "mutual_info_score", "normalized_mutual_info_score", "rand_score", "v_measure_score",
}  # fmt: skip
SAMPLES = {"f1_samples", "jaccard_samples", "precision_samples", "recall_samples"}
TWO_ONLY = {
    "jaccard", "neg_negative_likelihood_ratio", "positive_likelihood_ratio", "precision", "recall", "roc_auc"
}  # fmt: skip
FOREIGN = [name for name in get_scorer_names() if name not in METRICS]


def classified(classes: int, rows: int = 150) -> tuple[GaussianNB, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = rng.permutation(np.arange(rows) % classes)
    x = rng.normal(size=(rows, 3)) + y[:, None] * [0.8, -0.4, 0.1]
    return GaussianNB().fit(x, y), x, y


def regressed() -> tuple[LinearRegression, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(80, 2))
    y = 20 + x @ [2.0, 1.0] + rng.normal(size=80)
    return LinearRegression().fit(x, y), x, y


def scored(name: str, fitted: object, x: np.ndarray, y: np.ndarray) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(get_scorer(name)(fitted, x, y))


@pytest.mark.parametrize("name", FOREIGN)
def test_the_value_of_a_fitted_estimator_or_one_line(name: str) -> None:
    for task, classes in ((BINARY, 2), (MULTI, 4)):
        fitted, x, y = classified(classes)
        p = fitted.predict_proba(x)
        if task in find_metric(name).tasks:
            assert evaluate(name, task, y, p) == pytest.approx(scored(name, fitted, x, y), rel=1e-9)
        else:
            with pytest.raises(UserError, match=f"{name!r} does not fit a {task.value} task; expected one of") as said:
                evaluate(name, task, y, p)
            assert "\n" not in str(said.value)
    fitted, x, y = regressed()
    if REGRESSION in find_metric(name).tasks:
        expected = pytest.approx(scored(name, fitted, x, y), rel=1e-5)
        coder = TargetCoder.fit(pd.Series(y, name="y"), REGRESSION)
        coded = (fitted.predict(x) - coder.center) / coder.scale
        own = evaluate(name, REGRESSION, y, fitted.predict(x))
        back = evaluate(name, REGRESSION, coder.encode(pd.Series(y)), coded[:, None], scale=coder.units)
        assert own == expected
        assert back == expected
    else:
        with pytest.raises(UserError, match="does not fit a regression task"):
            check_metric(name, REGRESSION)


def test_each_scorer_has_the_tasks_it_is_made_for() -> None:
    tasks = {name: find_metric(name).tasks for name in FOREIGN}
    assert {name for name, found in tasks.items() if not found} == CLUSTERS | SAMPLES
    assert {name for name, found in tasks.items() if found == {BINARY}} == TWO_ONLY
    assert {name for name, found in tasks.items() if found == {MULTI}} == {"top_k_accuracy"}
    numbers = {name for name, found in tasks.items() if found == {REGRESSION}}
    assert numbers >= {"explained_variance", "neg_max_error", "neg_mean_poisson_deviance", "d2_absolute_error_score"}
    assert not any("auc" in name or "log_loss" in name for name in numbers)
    assert list(metric_tasks())[: len(METRICS)] == list(METRICS)
    assert set(metric_tasks()) == {*METRICS, *FOREIGN} - CLUSTERS - SAMPLES


def test_own_names_win_and_near_ones_are_suggested() -> None:
    assert find_metric("f1") is METRICS["f1"]
    with pytest.raises(UnknownName, match="unknown metric 'matthews_corcoef'; did you mean 'matthews_corrcoef'"):
        find_metric("matthews_corcoef")
    with pytest.raises(UnknownName, match="did you mean 'auc'"):
        find_metric("auk")


def test_it_is_shown_as_scikit_learn_shows_it() -> None:
    assert display("neg_log_loss", -0.25) == -0.25
    assert shown("neg_log_loss", -0.25) == -0.25
    assert str(evaluate("neg_max_error", REGRESSION, np.arange(3.0), np.arange(3.0))) == "0.0"


@pytest.mark.parametrize("name", metric_tasks())
def test_every_name_is_one_for_mlflow(name: str) -> None:
    """Case 64: MLflow restricts the names of metrics."""
    assert safe_key(name) == name


def test_classes_that_no_row_has_are_known() -> None:
    """Case 27: a class with fewer rows than folds; scorers are told of all classes."""
    fitted, x, y = classified(4)
    p = fitted.predict_proba(x)
    rows = y < 2
    some, told = y[rows], p[rows]
    assert evaluate("neg_log_loss", MULTI, some, told) == pytest.approx(-sk.log_loss(some, told, labels=range(4)))
    exact = -np.mean(np.sum((np.eye(4)[some] - told) ** 2, axis=1))
    assert evaluate("neg_brier_score", MULTI, some, told) == pytest.approx(exact, rel=1e-9)
    top = np.argsort(-told, axis=1)[:, :2]
    assert evaluate("top_k_accuracy", MULTI, some, told) == pytest.approx(np.mean(top == some[:, None]) * 2)
    expected = sk.f1_score(some, told.argmax(1), average="macro", zero_division=0)
    assert evaluate("f1_macro", MULTI, some, told) == pytest.approx(expected)
    for value in (0, 1):
        one = np.full(5, value)
        two = np.tile([[0.3, 0.7]], (5, 1))
        assert evaluate("neg_log_loss", BINARY, one, two) == pytest.approx(np.log(two[0, value]))
        assert evaluate("neg_brier_score", BINARY, one, two) == pytest.approx(-((1 - two[0, value]) ** 2))
        with pytest.raises(BadTable, match=r"'roc_auc' is undefined for these rows: .*of 1 of 2 classes") as said:
            evaluate("roc_auc", BINARY, one, two)
        assert "\n" not in str(said.value)
    with pytest.raises(BadTable, match="undefined"):
        evaluate("roc_auc_ovr", MULTI, some, told)


def test_a_target_of_counts_stays_one_through_its_coding() -> None:
    y = pd.Series(np.random.default_rng(0).poisson(1.3, 300).astype(float), name="y")
    coder = TargetCoder.fit(y, REGRESSION)
    coded = coder.encode(y)
    for name in ("neg_mean_poisson_deviance", "neg_mean_squared_log_error", "neg_mean_absolute_percentage_error"):
        exact = float(get_scorer(name)._score_func(y, np.full(300, y.mean())))
        assert evaluate(name, REGRESSION, coded, np.zeros((300, 1)), scale=coder.units) == pytest.approx(-exact)
    # Below its range a prediction is bad, not an error.
    low = evaluate("neg_mean_poisson_deviance", REGRESSION, coded, np.full((300, 1), -5.0), scale=coder.units)
    assert np.isfinite(low)
    assert low < evaluate("neg_mean_poisson_deviance", REGRESSION, coded, np.zeros((300, 1)), scale=coder.units)
    assert np.isfinite(evaluate("neg_mean_squared_log_error", REGRESSION, coded, coded - 9, scale=coder.units))


def test_a_centre_that_nobody_knows_is_no_zero() -> None:
    with pytest.raises(ValueError, match="centre"):
        evaluate("neg_mean_absolute_percentage_error", REGRESSION, np.zeros(3), np.zeros(3), scale=2.0)
    units = pickle.loads(pickle.dumps(Units(2.0, 5.0)))
    assert (units, units.center) == (2.0, 5.0)


@pytest.mark.parametrize(
    ("name", "task"),
    [("matthews_corrcoef", MULTI), ("roc_auc", BINARY), ("neg_mean_absolute_percentage_error", REGRESSION)],
)
def test_ensembles_select_by_it(name: str, task: TaskType) -> None:
    rng = np.random.default_rng(2)
    k = {BINARY: 2, MULTI: 3, REGRESSION: 1}[task]
    y = rng.normal(size=60) if task is REGRESSION else np.arange(60) % k
    scale = Units(2.0, 9.0)
    if task is REGRESSION:
        predictions = [(y + rng.normal(0, s, 60))[:, None].astype(np.float32) for s in (0.5, 0.6, 0.7)]
    else:
        predictions = [rng.dirichlet(np.ones(k), 60).astype(np.float32) * 0.5 + np.eye(k)[y] * 0.5 for _ in range(3)]
    members = [Member("f", str(i), evaluate(name, task, y, p, scale=scale)) for i, p in enumerate(predictions)]
    weights = select(members, predictions, y, name, task, scale, steps=5)
    assert sum(weights.values()) == pytest.approx(1)
    scorer = running_score(name, task, y, scale)
    total = sum(scorer.part(p) for p in predictions)
    mean = np.mean([p.astype(np.float64) for p in predictions], axis=0)
    assert scorer.score(total, 3) == pytest.approx(evaluate(name, task, y, mean, scale=scale), rel=1e-9)
    assert np.isfinite(cross_fitted(members, predictions, y, name, task, scale, steps=5, folds=3).score)


def test_what_it_cannot_score_is_said_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "x.csv").touch()
    ref = file_ref(tmp_path / "x.csv", "y", "")

    def study(metric: str) -> StudyConfig:
        return StudyConfig(ref, "mlp", "mlp", trials=1, max_epochs=1, metric=metric, split=protocol(ref, None, None))

    frame = pd.DataFrame({"x": np.arange(60.0)})
    numbers = RawDataset("t", frame, pd.Series(np.arange(60.0) - 20, name="y"), REGRESSION, ())
    assert divide(study("neg_mean_absolute_error"), numbers).config.metric == "neg_mean_absolute_error"
    with pytest.raises(BadTable, match=r"x.csv: the \w+ part .*gamma|power=2.*another --metric"):
        divide(study("neg_mean_gamma_deviance"), numbers)
    rare = pd.Series(["a"] * 58 + ["b", "b"], name="y")
    with pytest.raises(BadTable, match=r"part .*'roc_auc' is undefined for these rows"):
        divide(study("roc_auc"), RawDataset("t", frame, rare, BINARY, ()))


@pytest.mark.slow
def test_a_search_selects_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BISHOP_RAY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=90), "b": rng.normal(size=90)})
    frame["y"] = np.where(frame["a"] > 0, "up", "down")
    frame.to_csv(tmp_path / "t.csv", index=False)
    table = ["--table", str(tmp_path / "t.csv"), "--target", "y", "--no-doctor"]
    search = ["--models", "xgboost", "--trials", "2", "--eval-seeds", "1", "--metric", "matthews_corrcoef"]
    job = [sys.executable, str(ROOT / "jobs" / "tune.py"), *table, *search]
    board = tmp_path / "board.csv"
    done = subprocess.run([*job, "--output", str(board)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "matthews_corrcoef" in done.stdout
    rows = pd.read_csv(board)
    assert set(rows["metric"]) == {"matthews_corrcoef"}
    assert rows["validation"].between(0.3, 1).all()
