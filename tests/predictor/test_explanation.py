"""`Predictor.explain`: by hand on a linear model, planted columns found, every kind of table, clear refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from fakes import make_table
from predictor_fakes import make_predictor

from bishop_ray.config import TrainConfig
from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.schema import make_raw
from bishop_ray.data.table import RawDataset, Table, TableSpec, TaskType
from bishop_ray.errors import UserError
from bishop_ray.metrics import evaluate
from bishop_ray.models import create_model, model_class
from bishop_ray.models.base import Array, Estimator, Network
from bishop_ray.predictor import EnsembleMember, EnsemblePredictor, Explanation, Predictor
from bishop_ray.training.fit_estimator import fit_estimator
from bishop_ray.training.loop import fit_network

BINARY, MULTI, REGRESSION = TaskType.BINARY, TaskType.MULTICLASS, TaskType.REGRESSION


class Linear(Estimator):
    """``x_num @ (4, 2, 0, ...)``; of classes the logistic function of it."""

    numeric = "normal"

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.weights = np.array([4.0, 2.0] + [0.0] * (spec.n_num - 2))

    def fit(self, train: Table, val: Table, on_round: object) -> None: ...

    def refit(self, train: Table, rounds: int) -> None: ...

    def predict(self, x_num: Array, x_cat: np.ndarray) -> Array:
        logit = x_num @ self.weights
        if not self.spec.task.is_classification:
            return logit[:, None].astype(np.float32)
        p = 1 / (1 + np.exp(-logit))
        return np.stack([1 - p, p], axis=1).astype(np.float32)

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


def linear(task: TaskType) -> tuple[Predictor, pd.DataFrame, pd.Series]:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(80, 4)), columns=["a", "b", "none", "also none"])
    signal = 4 * frame["a"] + 2 * frame["b"]
    target = signal if task is REGRESSION else (signal > 0).map({True: "yes", False: "no"})
    raw = make_raw("t", frame.assign(y=target), "y")
    preprocessor = Preprocessor.fit(raw)
    return Predictor(preprocessor, Linear(preprocessor.spec), "linear", {}), frame, target.rename("y")


def importances(found: Explanation) -> dict[str, float]:
    return dict(zip(found.importances["feature"], found.importances["importance"], strict=True))


def exchanges(rows: int, repeats: int, seed: int) -> list[np.ndarray]:
    """The orders of scikit-learn's permutation_importance."""
    random = np.random.RandomState(np.random.RandomState(seed).randint(2**31))
    order, orders = np.arange(rows), [np.arange(rows)]
    for _ in range(repeats):
        random.shuffle(order)
        orders.append(orders[-1][order])  # the column as the repeat before left it is shuffled
    return orders[1:]


@pytest.mark.parametrize("task", [BINARY, REGRESSION])
def test_equals_what_it_is_by_hand(task: TaskType) -> None:
    """The user's columns exchanged, encoded and predicted."""
    predictor, frame, target = linear(task)
    orders = exchanges(len(frame), 4, 3)
    metric = "auc" if task is BINARY else "r2"
    y = predictor.target.encode(target)
    base = predictor.output(frame)
    blind = predictor.explain(frame, repeats=4, seed=3)
    told = predictor.explain(frame, target, repeats=4, seed=3)
    assert (blind.rows, blind.repeats, told.measure) == (80, 4, f"loss of {metric}")
    assert blind.measure == "change of the " + ("probabilities" if task is BINARY else "standardised prediction")
    for name in frame.columns:
        moved, lost = [], []
        for order in orders:
            changed = predictor.output(frame.assign(**{name: frame[name].to_numpy()[order]}))
            moved.append(np.abs(changed - base)[:, -1].mean())
            lost.append(evaluate(metric, task, y, base) - evaluate(metric, task, y, changed))
        for found, values in ((blind, moved), (told, lost)):
            row = found.importances.set_index("feature").loc[name]
            assert row["importance"] == pytest.approx(np.mean(values), abs=1e-6)
            assert row["sd"] == pytest.approx(np.std(values, ddof=1), abs=1e-6)
    for found in (blind, told):
        assert list(found.importances["feature"][:2]) == ["a", "b"]
        assert importances(found)["none"] == importances(found)["also none"] == 0.0
        assert found.attention is None


def planted(rows: int, seed: int, task: TaskType) -> RawDataset:
    """Six columns of which x0 and c1 matter, and one that is the same in every row."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({f"x{i}": rng.normal(size=rows) for i in range(4)})
    frame["c0"], frame["c1"] = rng.choice(list("abc"), rows), rng.choice(list("abcd"), rows)
    signal = 1.5 * frame["x0"] + 1.2 * (frame["c1"] == "a") - 1.2 * (frame["c1"] == "b") + 0.1 * rng.normal(size=rows)
    frame["same"] = 7
    frame["y"] = signal if task is REGRESSION else np.where(signal > 0, "up", "down")
    return make_raw("planted", frame, "y")


SMALL = {
    "bishop": {"d_embedding": 8, "n_pool": 2, "d_model": 16, "d_ff": 16, "n_heads": 2, "n_encoder_levels": 1},
    "mlp": {"n_blocks": 1, "d_block": 64},
    "xgboost": {},
}  # fmt: skip


def trained(name: str, task: TaskType, epochs: int = 8) -> Predictor:
    train, val = planted(400, 0, task), planted(100, 1, task)
    preprocessor = Preprocessor.fit(train, model_class(name).numeric)
    torch.manual_seed(0)
    arguments = {**SMALL[name], **({"stride": 4, "n_decoded": 4} if name == "bishop" else {})}
    model = create_model(name, preprocessor.spec, arguments)
    tables, metric = (preprocessor.transform(train), preprocessor.transform(val)), "r2" if task is REGRESSION else "auc"
    if isinstance(model, Network):
        config = TrainConfig(max_epochs=epochs, batch_size=32, lr=3e-3, metric=metric)
        fit_network(model, *tables, config, lambda _: False)
    else:
        fit_estimator(model, *tables, metric, lambda _: False)
    return Predictor(preprocessor, model, name, arguments, {"metric": metric})


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("xgboost", BINARY), ("xgboost", REGRESSION), ("mlp", BINARY), ("mlp", REGRESSION),
        pytest.param("bishop", BINARY, marks=pytest.mark.slow),
        pytest.param("bishop", REGRESSION, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_planted_columns_are_found(name: str, task: TaskType) -> None:
    predictor, held = trained(name, task), planted(150, 2, task)
    for found in (predictor.explain(held.frame, held.target), predictor.explain(held.frame)):
        assert list(found.importances["feature"][:2]) == ["x0", "c1"]
        by_name = importances(found)
        rest = [by_name[column] for column in ("x1", "x2", "x3", "c0")]
        assert max(rest) < 0.25 * by_name["c1"]
        assert "same" not in by_name, (
            "a column that is dropped in training changes nothing, and is no column of the schema"
        )
    if name == "bishop":
        assert found.attention["weight"].sum() == pytest.approx(1, abs=1e-6)


def test_a_column_that_is_the_same_in_all_these_rows_is_worth_nothing() -> None:
    predictor, frame, target = linear(REGRESSION)
    assert importances(predictor.explain(frame.assign(a=1.0), target))["a"] == 0.0


@pytest.mark.parametrize("task", [MULTI, REGRESSION])
def test_every_kind_of_column(task: TaskType) -> None:
    raw = make_table(task, rows=70, with_missing=True)
    moments = pd.Series(pd.date_range("2024-01-01", periods=70, freq="37h")).mask(np.arange(70) % 9 == 0)
    raw = RawDataset(raw.name, raw.frame.assign(when=moments), raw.target, task, raw.categorical)
    predictor = make_predictor(raw)
    frame = raw.frame.set_axis(["twice"] * 70, axis=0)[raw.frame.columns[::-1]].assign(
        extra="x", target=raw.target.values
    )
    state = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    weights = {key: value.clone() for key, value in predictor.model.state_dict().items()}
    found = predictor.explain(frame, "target", repeats=2)
    names = [name for name, _ in predictor.schema]
    assert sorted(found.importances["feature"]) == sorted(names) == sorted(found.attention["feature"])
    assert np.isfinite(found.importances[["importance", "sd"]]).all(axis=None)
    assert found.importances["importance"].is_monotonic_decreasing
    attention = found.attention.set_index("feature")
    assert attention["weight"].sum() == pytest.approx(1, abs=1e-6)
    assert attention["inputs"].sum() == predictor.preprocessor.spec.n_num + predictor.preprocessor.spec.n_cat
    assert attention["inputs"]["when"] > 2, "elapsed time, the calendar, and whether it is missing"
    again = predictor.explain(raw.frame, raw.target, repeats=2)
    pd.testing.assert_frame_equal(again.importances, found.importances)
    pd.testing.assert_frame_equal(again.attention, found.attention)
    assert torch.equal(torch.random.get_rng_state(), state[0])
    assert (np.random.get_state()[1] == state[1]).all()
    assert all(torch.equal(value, weights[key]) for key, value in predictor.model.state_dict().items())


def test_an_ensemble_is_explained_as_one_model() -> None:
    raw = make_table(BINARY, rows=60, with_missing=True)
    one, two = make_predictor(raw), make_predictor(raw, seed=1)
    other = Preprocessor.fit(RawDataset("t", raw.frame[["num_0", "cat_1"]], raw.target, BINARY, ("cat_1",)), "native")
    booster = create_model("xgboost", other.spec, {})
    table = other.transform(raw)
    fit_estimator(booster, table, table, "auc", lambda _: False)
    third = Predictor(other, booster, "xgboost", {})
    shares = ((0.5, one), (0.2, two), (0.3, third))
    members = tuple(EnsembleMember(str(i), weight, p) for i, (weight, p) in enumerate(shares))
    ensemble = EnsemblePredictor(members=members)
    found = ensemble.explain(raw.frame, raw.target, metric="accuracy", repeats=1)
    assert found.measure == "loss of accuracy"
    assert found.importances["sd"].isna().all()
    order = exchanges(60, 1, 0)[0]
    changed = ensemble.output(raw.frame.assign(num_0=raw.frame["num_0"].to_numpy()[order]))
    blind = importances(ensemble.explain(raw.frame, repeats=1))
    assert blind["num_0"] == pytest.approx(np.abs(changed - ensemble.output(raw.frame))[:, 0].mean(), abs=1e-6)
    parts = [p.explain(raw.frame, repeats=1).attention.set_index("feature")["weight"] for p in (one, two)]
    mean = (0.5 * parts[0] + 0.2 * parts[1]) / 0.7
    pd.testing.assert_series_equal(found.attention.set_index("feature")["weight"], mean, check_like=True)
    pair = EnsemblePredictor(members=(EnsembleMember("0", 1.0, third),))
    assert pair.explain(raw.frame).attention is None


def test_rows_are_sampled_with_the_seed() -> None:
    predictor, frame, target = linear(REGRESSION)
    some = predictor.explain(frame, target, max_rows=30, seed=5)
    assert some.rows == 30
    pd.testing.assert_frame_equal(some.importances, predictor.explain(frame, target, max_rows=30, seed=5).importances)
    assert importances(some) != importances(predictor.explain(frame, target, max_rows=30, seed=6))


def test_one_row_depends_on_nothing_and_says_so() -> None:
    predictor = make_predictor(make_table(BINARY, rows=40))
    found = predictor.explain(make_table(BINARY, rows=40).frame.head(1))
    assert (found.importances["importance"] == 0).all()


def test_what_cannot_be_explained_is_told_in_one_line() -> None:
    raw = make_table(BINARY, rows=40)
    predictor, frame, target = make_predictor(raw), raw.frame, raw.target
    for message, call in {
        "expected rows; found a table without any": lambda: predictor.explain(frame.head(0)),
        "missing column 'cat_1'": lambda: predictor.explain(frame.drop(columns="cat_1")),
        "expected one target column 'price' in the table; found 0": lambda: predictor.explain(frame, "price"),
        "for each of 40 rows; found 39": lambda: predictor.explain(frame, target[1:]),
        "with the index of the table": lambda: predictor.explain(frame, target.iloc[::-1]),
        "found 'maybe'": lambda: predictor.explain(frame, ["maybe"] * 40),
        "found a missing value": lambda: predictor.explain(frame, target.mask(target == "no")),
        "needs rows of at least two classes": lambda: predictor.explain(frame, ["no"] * 40),
        "'r2' does not fit a binary task": lambda: predictor.explain(frame, target, metric="r2"),
        "'auc' needs the rows' targets": lambda: predictor.explain(frame, metric="auc"),
        "repeats of at least 1; found 0": lambda: predictor.explain(frame, repeats=0),
    }.items():
        with pytest.raises(UserError, match=message) as said:
            call()
        assert "\n" not in str(said.value)
    assert predictor.explain(frame, target, metric="roc_auc", repeats=1).measure == "loss of roc_auc"


def test_only_bishops_explanation_imports_bishop() -> None:
    """Where a registered XGBoost predicts, nothing of BiSHop need be installed."""
    code = (
        "import sys\n"
        "sys.modules['entmax'] = None\n"
        "import bishop_ray.predictor\n"
        "from bishop_ray.predictor.explanation import column_attention\n"
        "assert column_attention(type('P', (), {'model_names': ('xgboost',)}), [], []) is None\n"
        "sys.exit(any(name.startswith('bishop_ray.models.bishop') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2])
