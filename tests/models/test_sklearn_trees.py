"""scikit-learn's forest and boosted trees: equal to the library, exact on disk, refused when damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import make_table
from safetensors.numpy import load_file, save_file
from sklearn.ensemble import (
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)

from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.table import Table, TableSpec, TaskType
from bishop_ray.errors import TrainingFailed, UserError
from bishop_ray.models import sklearn_trees as tree_file
from bishop_ray.models.base import Array
from bishop_ray.models.gbdt import GBDT
from bishop_ray.models.random_forest import RandomForest

TASKS = list(TaskType)
every_task = pytest.mark.parametrize("task", TASKS)


def data(task: TaskType, rows: int = 200, seed: int = 0) -> tuple[TableSpec, Table]:
    raw = make_table(task, 4, 2, rows, with_missing=True, seed=seed)
    preprocessor = Preprocessor.fit(make_table(task, 4, 2, 200, with_missing=True), "raw")
    return preprocessor.spec, preprocessor.transform(raw)


def never(rounds: int, prediction: Array) -> bool:
    return False


@every_task
def test_a_forest_grown_in_chunks_is_the_library_s_grown_at_once(task: TaskType) -> None:
    spec, train = data(task)
    model = RandomForest(spec, n_trees=23, min_samples_leaf=1)
    model.seed = 3
    model.fit(train, data(task, 50, 1)[1], never)
    build = RandomForestClassifier if task.is_classification else RandomForestRegressor
    library = build(23, random_state=3).fit(model.inputs(train.x_num, train.x_cat), train.y)
    x = data(task, 80, 2)[1]
    inputs = model.inputs(x.x_num, x.x_cat)
    expected = library.predict_proba(inputs) if task.is_classification else library.predict(inputs)[:, None]
    np.testing.assert_allclose(model.predict(x.x_num, x.x_cat), expected, rtol=1e-6, atol=1e-7)
    again = RandomForest(spec, n_trees=23, min_samples_leaf=1)
    again.seed = 3
    again.refit(train, 23)
    np.testing.assert_array_equal(again.predict(x.x_num, x.x_cat), model.predict(x.x_num, x.x_cat))


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        (TaskType.BINARY, {}),
        (TaskType.BINARY, {"class_loss": "exponential"}),
        (TaskType.MULTICLASS, {"class_loss": "exponential", "subsample": 0.7}),
        (TaskType.REGRESSION, {}),
        (TaskType.REGRESSION, {"number_loss": "absolute_error"}),
        (TaskType.REGRESSION, {"number_loss": "huber", "max_depth": None, "max_leaf_nodes": 5}),
    ],
)
def test_boosting_is_the_library_s(task: TaskType, settings: dict[str, Any]) -> None:
    spec, train = data(task)
    model = GBDT(spec, **settings)
    model.seed = 3
    model.refit(train, 12)
    names = {"class_loss": "loss", "number_loss": "loss"}
    given = {names.get(key, key): value for key, value in settings.items()}
    if task is TaskType.MULTICLASS:
        given["loss"] = "log_loss"
    build = GradientBoostingClassifier if task.is_classification else GradientBoostingRegressor
    library = build(n_estimators=12, random_state=3, **given).fit(model.inputs(train.x_num, train.x_cat), train.y)
    x = data(task, 80, 2)[1]
    inputs = model.inputs(x.x_num, x.x_cat)
    stages = library.staged_predict_proba(inputs) if task.is_classification else library.staged_predict(inputs)
    for rounds, expected in enumerate(stages, start=1):
        model.rounds = rounds
        found = model.predict(x.x_num, x.x_cat)
        np.testing.assert_allclose(found, expected.reshape(found.shape), rtol=1e-5, atol=1e-6)


@every_task
def test_boosting_stops_and_keeps_the_best_round(task: TaskType) -> None:
    spec, train = data(task)
    val = data(task, 60, 1)[1]
    seen: dict[int, Array] = {}
    model = GBDT(spec, n_rounds=500, patience=5, learning_rate=0.5)
    model.fit(train, val, lambda rounds, prediction: bool(seen.update({rounds: prediction})))
    grown = len(model.trees) // model.n_per_round
    assert grown == model.rounds + 5
    losses = []
    for rounds in range(1, grown + 1):
        fresh = GBDT(spec, learning_rate=0.5)
        fresh.trees, fresh.start, fresh.rounds = model.trees, model.start, rounds
        prediction = fresh.predict(val.x_num, val.x_cat)
        if rounds in seen:
            np.testing.assert_allclose(seen[rounds], prediction, rtol=1e-5, atol=1e-6)
        if task.is_classification:
            losses.append(-np.log(prediction[np.arange(len(val)), val.y]).mean())
        else:
            losses.append(((prediction[:, 0] - val.y) ** 2).mean())
    assert model.rounds == np.argmin(losses) + 1
    assert list(seen) == list(range(10, grown, 10))


@every_task
def test_fitting_on_threads_changes_nothing(task: TaskType) -> None:
    spec, train = data(task)
    one, two = RandomForest(spec, n_trees=40), RandomForest(spec, n_trees=40)
    two.n_threads = 2
    for model in (one, two):
        model.fit(train, train, never)
    np.testing.assert_array_equal(one.predict(train.x_num, train.x_cat), two.predict(train.x_num, train.x_cat))


def test_wide_categories_are_not_one_hot() -> None:
    spec = TableSpec(TaskType.BINARY, 1, (4, tree_file.ONE_HOT_LEVELS + 2, 1), 2)
    model = RandomForest(spec)
    x = model.inputs(np.array([[0.5], [1.5]], np.float32), np.array([[3, 20, 0], [0, 0, 0]]))
    np.testing.assert_array_equal(x, [[0.5, 0, 0, 1, 20], [1.5, 0, 0, 0, 0]])
    many = RandomForest(TableSpec(TaskType.BINARY, 0, (33,) * 100, 2))
    assert sum(many.one_hot) == 32
    assert many.n_inputs == 32 * 32 + 68


def test_a_class_without_rows_is_refused() -> None:
    spec, train = data(TaskType.MULTICLASS)
    part = train.y < 2
    missing = Table(train.x_num[part], train.x_cat[part], train.y[part])
    for model in (RandomForest(spec), GBDT(spec)):
        with pytest.raises(TrainingFailed, match="found 2 of 3 classes"):
            model.fit(missing, missing, never)


def saved(folder: Path, model: RandomForest | GBDT, train: Table) -> Path:
    folder.mkdir()
    model.refit(train, 5)
    model.save(folder)
    return folder


def test_trees_on_disk_are_checked_node_by_node(tmp_path: Path) -> None:
    spec, train = data(TaskType.REGRESSION)
    folder = saved(tmp_path / "m", RandomForest(spec), train)
    path = folder / tree_file.TREES
    good = load_file(path)
    changes: list[tuple[str, Any]] = [
        ("left", 0),  # its own parent: a walk without end
        ("right", 10**6),
        ("feature", spec.n_num + 1000),
        ("feature", -1),
        ("threshold", np.nan),
        ("value", np.inf),
        ("nodes", 10**6),
    ]
    for name, value in changes:
        bad = {key: array.copy() for key, array in good.items()}
        bad[name][0] = value
        save_file(bad, path)
        with pytest.raises(UserError, match=r"trees\.safetensors: damaged"):
            RandomForest(spec).load(folder)
    save_file({key: array for key, array in good.items() if key != "leaf"}, path)
    with pytest.raises(UserError, match="damaged"):
        RandomForest(spec).load(folder)
    save_file(good, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="damaged"):
        RandomForest(spec).load(folder)
    path.unlink()
    with pytest.raises(UserError, match="missing"):
        RandomForest(spec).load(folder)


def test_a_manifest_of_another_table_or_format_is_refused(tmp_path: Path) -> None:
    spec, train = data(TaskType.BINARY)
    folder = saved(tmp_path / "m", GBDT(spec), train)
    with pytest.raises(UserError, match="inputs"):
        GBDT(TableSpec(TaskType.BINARY, 1, (), 2)).load(folder)
    path = folder / tree_file.MANIFEST
    good = json.loads(path.read_text("utf-8"))
    for change in ({"rounds": 6}, {"format": 99}, {"state": {"start": [1, 2]}}, {"state": {"start": "x"}}):
        path.write_text(json.dumps(good | change), "utf-8")
        with pytest.raises(UserError, match="damaged"):
            GBDT(spec).load(folder)


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (RandomForest, {"n_trees": 0}, "n_trees"),
        (RandomForest, {"max_features": 0.0}, "max_features"),
        (RandomForest, {"max_features": "all"}, "max_features"),
        (RandomForest, {"max_depth": 0}, "max_depth"),
        (RandomForest, {"min_impurity_decrease": -1.0}, "min_impurity_decrease"),
        (RandomForest, {"number_criterion": "gini"}, "number_criterion"),
        (GBDT, {"learning_rate": 0.0}, "learning_rate"),
        (GBDT, {"subsample": 1.5}, "subsample"),
        (GBDT, {"max_leaf_nodes": 1}, "max_leaf_nodes"),
        (GBDT, {"class_loss": "deviance"}, "class_loss"),
    ],
)
def test_impossible_values_are_refused(build: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build.check(**settings)
