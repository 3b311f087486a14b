"""What is special about XGBoost, LightGBM and CatBoost; the contract itself is in ``test_models.py``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bishop_ray.data.table import Table, TableSpec, TaskType
from bishop_ray.errors import TrainingFailed, UserError
from bishop_ray.models import create_model
from bishop_ray.models.boosting import Boosted, EarlyStopping
from bishop_ray.training.fit_estimator import fit_estimator

pytest.importorskip("xgboost")
pytest.importorskip("lightgbm")
pytest.importorskip("catboost")

NAMES = ("xgboost", "lightgbm", "catboost")
TASKS = {TaskType.BINARY: 2, TaskType.MULTICLASS: 4, TaskType.REGRESSION: 1}
every_booster = pytest.mark.parametrize("name", NAMES)
every_task = pytest.mark.parametrize("task", TASKS)


def make(task: TaskType, rows: int, seed: int) -> Table:
    """Two numbers, two categories of five levels; codes and numbers are missing in places; all of them matter."""
    rng = np.random.default_rng(seed)
    x_num = rng.normal(size=(rows, 2)).astype(np.float32)
    x_cat = rng.integers(0, 6, size=(rows, 2))
    signal = x_num[:, 0] + np.array([3.0, 0, 1, -1, 0.5, -0.5])[x_cat[:, 0]] + rng.normal(0, 0.5, rows)
    x_num[rng.random(x_num.shape) < 0.1] = np.nan
    y: Any = signal.astype(np.float32)
    if task is not TaskType.REGRESSION:
        y = np.digitize(signal, [0.5] if task is TaskType.BINARY else [-0.5, 0.5, 1.5]).astype(np.int64)
    return Table(x_num, x_cat.astype(np.int64), y)


def build(name: str, task: TaskType = TaskType.BINARY, rounds: int = 60, **hparams: Any) -> Boosted:
    cap = {"n_estimators" if name == "lightgbm" else "n_rounds": rounds}
    model = create_model(name, TableSpec(task, 2, (6, 6), TASKS[task]), {"learning_rate": 0.3, **cap, **hparams})
    assert isinstance(model, Boosted)
    return model


def loss(task: TaskType, y: Any, prediction: Any) -> float:
    if task is TaskType.REGRESSION:
        return float(np.mean((prediction[:, 0].astype(np.float64) - y) ** 2))
    return float(-np.log(prediction[np.arange(len(y)), y].astype(np.float64)).mean())


@every_booster
@every_task
def test_early_stopping_judges_by_the_offline_loss(name: str, task: TaskType) -> None:
    """Case 16: validation rows with categories are read as `predict` reads them."""
    train, val = make(task, 400, 0), make(task, 150, 1)
    model = build(name, task, rounds=200, patience=7)
    model.fit(train, val, lambda rounds, prediction: False)
    best, trained = model.rounds, model.trained_rounds
    assert trained == best + 7 < 200
    losses = []
    for rounds in range(1, trained + 1):
        model.rounds = rounds
        losses.append(loss(task, val.y, model.predict(val.x_num, val.x_cat)))
    assert losses[best - 1] == pytest.approx(min(losses), rel=1e-6), "the best round by the loss of predictions"


@every_booster
@every_task
def test_chunks_are_equal_and_reported_as_predicted(name: str, task: TaskType) -> None:
    # as many validation as training rows: a hook cannot tell them by their number
    train, val = make(task, 200, 0), make(task, 200, 1)
    model, seen = build(name, task, rounds=60, patience=60), {}
    model.fit(train, val, lambda rounds, prediction: seen.update({rounds: prediction}) or False)
    step = 60 // model.reports
    assert list(seen) == list(range(step, 60, step)), "not at the end"
    for rounds, prediction in seen.items():
        model.rounds = rounds
        assert prediction.dtype == np.float32
        np.testing.assert_allclose(prediction, model.predict(val.x_num, val.x_cat), atol=1e-6, rtol=1e-5)


@every_booster
def test_a_stop_stops(name: str) -> None:
    train, val = make(TaskType.BINARY, 200, 0), make(TaskType.BINARY, 100, 1)
    model, seen = build(name, rounds=60, patience=60), []
    model.fit(train, val, lambda rounds, prediction: (seen.append(rounds), rounds >= 18)[1])
    assert model.trained_rounds == seen[-1] == 18
    assert 1 <= model.rounds <= 18


@every_booster
def test_an_exception_of_a_report_comes_out_as_it_is(name: str) -> None:
    def fail(rounds: int, prediction: Any) -> bool:
        raise ZeroDivisionError("of the caller")

    with pytest.raises(ZeroDivisionError, match="of the caller"):
        build(name).fit(make(TaskType.BINARY, 200, 0), make(TaskType.BINARY, 100, 1), fail)


@every_booster
def test_the_same_round_is_kept_with_and_without_reports(name: str) -> None:
    train, val = make(TaskType.BINARY, 300, 0), make(TaskType.BINARY, 100, 1)
    reported, silent = build(name), build(name)
    fit_estimator(reported, train, val, "auc", lambda report: False)
    reported.rounds = 9
    silent.refit(train, 9)
    assert silent.rounds == silent.trained_rounds == 9
    expected = reported.predict(val.x_num, val.x_cat)
    np.testing.assert_allclose(silent.predict(val.x_num, val.x_cat), expected, atol=1e-6, err_msg="reports change it")


@every_booster
def test_chosen_rounds_survive_saving(name: str, tmp_path: Path) -> None:
    train, val = make(TaskType.MULTICLASS, 300, 0), make(TaskType.MULTICLASS, 100, 1)
    model = build(name, TaskType.MULTICLASS)
    model.fit(train, val, lambda rounds, prediction: False)
    everything = model.predict(val.x_num, val.x_cat)
    model.rounds = 4
    expected = model.predict(val.x_num, val.x_cat)
    assert np.abs(expected - everything).max() > 1e-3
    model.save(tmp_path)
    other = build(name, TaskType.MULTICLASS)
    other.load(tmp_path)
    assert other.rounds == 4
    np.testing.assert_array_equal(other.predict(val.x_num, val.x_cat), expected)
    np.testing.assert_array_equal(model.predict(val.x_num, val.x_cat), expected, err_msg="saving changes nothing")


@every_booster
@pytest.mark.parametrize("content", [None, b"junk", b""])
def test_a_damaged_file_is_named(name: str, content: bytes | None, tmp_path: Path) -> None:
    model = build(name)
    model.refit(make(TaskType.BINARY, 100, 0), 3)
    model.save(tmp_path)
    (file,) = tmp_path.iterdir()
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(UserError, match=f"{file.name}: {'missing' if content is None else 'damaged'}") as caught:
        build(name).load(tmp_path)
    assert "\n" not in str(caught.value)


@every_booster
def test_missing_values_are_learnt_from(name: str) -> None:
    """A missing category raises the target by 3, a missing number of its own column by 5."""
    train = make(TaskType.REGRESSION, 1500, 0)
    shifted = Table(train.x_num, train.x_cat, train.y + 5 * np.isnan(train.x_num[:, 1]).astype(np.float32))
    model = build(name, TaskType.REGRESSION)
    model.refit(shifted, 60)
    x_num = np.array([[0, 0], [0, np.nan], [0, 0]], np.float32)
    plain, no_number, no_level = model.predict(x_num, np.array([[1, 1], [1, 1], [0, 1]]))[:, 0]
    assert no_number - plain == pytest.approx(5, abs=0.7)
    assert no_level - plain == pytest.approx(3, abs=0.7)


@every_booster
def test_categories_are_no_numbers(name: str) -> None:
    """Which levels belong together is learnt, not that their codes are neighbours: one split is enough."""
    rng = np.random.default_rng(0)
    codes = rng.integers(1, 13, size=(2400, 1))
    y = (codes[:, 0] % 2).astype(np.int64)
    table = Table(np.zeros((2400, 0), np.float32), codes, y)
    depth = {"lightgbm": {"num_leaves": 2}, "xgboost": {"max_depth": 1}, "catboost": {"depth": 1}}[name]
    model = create_model(name, TableSpec(TaskType.BINARY, 0, (13,), 2), {"learning_rate": 0.5, **depth})
    assert isinstance(model, Boosted)
    model.refit(table, 3)
    assert ((model.predict(table.x_num, codes)[:, 1] > 0.5) == y).all()


@every_booster
def test_a_class_may_be_absent_from_validation_or_training(name: str) -> None:
    train, val = make(TaskType.MULTICLASS, 300, 0), make(TaskType.MULTICLASS, 100, 1)
    for absent in (0, 3):
        few = [Table(t.x_num[t.y != absent], t.x_cat[t.y != absent], t.y[t.y != absent]) for t in (train, val)]
        for first, second in ((train, few[1]), (few[0], few[1])):
            model = build(name, TaskType.MULTICLASS, rounds=15)
            model.fit(first, second, lambda rounds, prediction: False)
            prediction = model.predict(val.x_num, val.x_cat)
            assert prediction.shape == (100, 4)
            assert np.isfinite(prediction).all()
            assert (prediction.argmax(1) == val.y)[val.y != absent].mean() > 0.5, "columns are the classes"


@every_booster
def test_threads_are_as_many_as_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one thread, the calling one does the work, however busy the machine is."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    train, val = make(TaskType.BINARY, 8000, 0), make(TaskType.BINARY, 1000, 1)
    model = build(name, rounds=100)
    everyone, me = time.process_time(), time.thread_time()
    model.fit(train, val, lambda rounds, prediction: False)
    model.predict(train.x_num, train.x_cat)
    me = time.thread_time() - me
    others = time.process_time() - everyone - me
    assert others <= 0.1 * me + 0.05, "CPU seconds of other threads"
    if name == "catboost":  # further threads of its own pool have little to do at this size
        assert model._booster.get_param("thread_count") == 1


@every_booster
def test_small_shares_of_few_rows_still_train(name: str) -> None:
    share = {"xgboost": {"subsample": 0.5, "colsample_bytree": 0.5}, "catboost": {"bagging_temperature": 0.0}}
    model = build(name, **share.get(name, {"subsample": 0.01, "colsample": 0.01}))
    model.fit(make(TaskType.BINARY, 20, 0), make(TaskType.BINARY, 10, 1), lambda rounds, prediction: False)
    assert np.isfinite(model.predict(np.zeros((1, 2), np.float32), np.zeros((1, 2), np.int64))).all()


def test_lightgbm_draws_rows() -> None:
    train = make(TaskType.BINARY, 400, 0)
    seeds = []
    for seed in (0, 1):
        model = build("lightgbm", subsample=0.5)
        model.seed = seed
        model.refit(train, 10)
        seeds.append(model.predict(train.x_num, train.x_cat))
    assert not np.array_equal(*seeds), "subsample without bagging_freq would have no effect"


def test_catboost_names_what_it_refuses() -> None:
    train = make(TaskType.BINARY, 50, 0)
    one = Table(train.x_num, train.x_cat, np.zeros(50, np.int64))
    with pytest.raises(TrainingFailed, match=r"^catboost: .*targets are equal"):
        build("catboost").refit(one, 3)


@pytest.mark.parametrize(
    ("name", "hparams", "words"),
    [
        ("xgboost", {"max_depth": 0}, "max_depth .* >= 1; found 0"),
        ("xgboost", {"gamma": -1.0}, "gamma .*found -1.0"),
        ("xgboost", {"subsample": 0.0}, r"subsample must lie in \(0, 1\]; found 0.0"),
        ("xgboost", {"patience": 0}, "patience .* >= 1; found 0"),
        ("lightgbm", {"num_leaves": 1}, "num_leaves .* >= 2; found 1"),
        ("lightgbm", {"colsample": 1.5}, r"colsample must lie in \(0, 1\]; found 1.5"),
        ("lightgbm", {"learning_rate": float("nan")}, "learning_rate .*found nan"),
        ("catboost", {"depth": 17}, r"depth must lie in \[1, 16\]; found 17"),
        ("catboost", {"leaf_estimation_iterations": 0}, "leaf_estimation_iterations .*found 0"),
    ],
)
def test_impossible_values_are_refused(name: str, hparams: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(name, **hparams)


def test_a_watch_counts_patience_from_the_best_round() -> None:
    reported: list[int] = []
    watch = EarlyStopping(100, 3, 20, lambda rounds, prediction: reported.append(rounds) or False)
    losses = [5.0, 4.0, 4.0, 4.5, 3.0, float("nan"), 3.0, 3.0]
    stops = [watch.stops(i + 1, value, lambda: np.zeros((1, 1), np.float32)) for i, value in enumerate(losses)]
    assert stops == [False] * 7 + [True]
    assert watch.best_round == 5
    assert reported == [5]
