"""The two reference scores: exact on problems whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from bishop_ray.data.table import Table, TableSpec, TaskType
from bishop_ray.training.baselines import reference_scores


def table(rows: int, seed: int, task: TaskType, shift: float = 0.0) -> Table:
    """Two numbers (one on a wild scale), one constant, one category; the target is linear in all of them."""
    rng = np.random.default_rng(seed)
    numbers = np.stack([rng.normal(size=rows), 1e6 + 1e4 * rng.normal(size=rows), np.full(rows, 0.1)], axis=1)
    codes = rng.integers(0, 4, size=(rows, 1))
    signal = numbers[:, 0] + (numbers[:, 1] - 1e6) / 1e4 + np.array([-2.0, 0.0, 1.0, 3.0])[codes[:, 0]] + shift
    y = signal.astype(np.float32) if task is TaskType.REGRESSION else np.digitize(signal, [0.0, 2.0][: task_cuts(task)])
    return Table(numbers.astype(np.float32), codes, y)


def task_cuts(task: TaskType) -> int:
    return 1 if task is TaskType.BINARY else 2


def spec_of(task: TaskType) -> TableSpec:
    return TableSpec(task, 3, (4,), {TaskType.REGRESSION: 1, TaskType.BINARY: 2}.get(task, 3))


def test_linear_target_is_found_and_the_mean_scores_zero():
    task = TaskType.REGRESSION
    train = table(400, 0, task)
    scores = reference_scores(train, table(200, 1, task), spec_of(task), "r2")
    assert scores["linear"] > 0.9999
    assert reference_scores(train, train, spec_of(task), "r2")["mean"] == pytest.approx(0.0, abs=1e-9)
    assert scores["mean"] <= 0.0
    shifted = reference_scores(train, table(200, 1, task, shift=5.0), spec_of(task), "mae", scale=2.0)
    assert shifted["linear"] == pytest.approx(-10.0, rel=1e-2)


@pytest.mark.parametrize("task", [TaskType.BINARY, TaskType.MULTICLASS])
def test_classification(task):
    train, test = table(400, 0, task), table(300, 1, task)
    spec = spec_of(task)
    assert reference_scores(train, test, spec, "auc")["mean"] == 0.5
    assert reference_scores(train, test, spec, "auc")["linear"] > 0.97
    accuracy = reference_scores(train, test, spec, "accuracy")
    majority = np.bincount(train.y).argmax()
    assert accuracy["mean"] == np.mean(test.y == majority)
    assert accuracy["linear"] > accuracy["mean"] + 0.2


def test_class_missing_from_train_keeps_the_full_width():
    task = TaskType.MULTICLASS
    train, test = table(300, 0, task), table(200, 1, task)
    kept = train.y != 1
    part = Table(train.x_num[kept], train.x_cat[kept], train.y[kept])
    scores = reference_scores(part, test, spec_of(task), "accuracy")
    assert scores["mean"] < scores["linear"] < 1.0
    only = Table(part.x_num[part.y == 0], part.x_cat[part.y == 0], part.y[part.y == 0])
    single = reference_scores(only, test, spec_of(task), "accuracy")
    assert single["mean"] == single["linear"] == np.mean(test.y == 0)


def test_code_unseen_in_train_and_columns_of_one_kind_only():
    task = TaskType.REGRESSION
    train, test = table(300, 0, task), table(200, 1, task)
    train.x_cat[train.x_cat == 3] = 0
    assert np.isfinite(reference_scores(train, test, spec_of(task), "rmse")["linear"])
    numbers_only = TableSpec(task, 3, (), 1)
    none = np.zeros((300, 0), np.int64), np.zeros((200, 0), np.int64)
    numeric = reference_scores(
        Table(train.x_num, none[0], train.y), Table(test.x_num, none[1], test.y), numbers_only, "r2"
    )
    assert 0.2 < numeric["linear"] < 0.95
    train = table(300, 0, task)
    codes_only = TableSpec(task, 0, (4,), 1)
    coded = reference_scores(
        Table(train.x_num[:, :0], train.x_cat, train.y), Table(test.x_num[:, :0], test.x_cat, test.y), codes_only, "r2"
    )
    assert coded["linear"] > coded["mean"] + 0.3
