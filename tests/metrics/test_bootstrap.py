"""The paired bootstrap: what it finds, what it leaves to chance, and that AUC is the metric's own."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from bishop_ray.data.table import TaskType
from bishop_ray.errors import BadTable
from bishop_ray.metrics import METRICS, evaluate
from bishop_ray.metrics.bootstrap import Scored, _statistic, paired_bootstrap


def probabilities(y: NDArray[np.int64], noise: float, classes: int, seed: int) -> NDArray[np.float64]:
    scores = np.eye(classes)[y] + noise * np.random.default_rng(seed).normal(size=(len(y), classes))
    powers = np.exp(2 * scores)
    return powers / powers.sum(axis=1, keepdims=True)


def side(task: TaskType, noise: float, seed: int, rows: int = 300) -> Scored:
    rng = np.random.default_rng(7)
    if task is TaskType.REGRESSION:
        y = rng.normal(size=rows)
        return Scored(y, (y + noise * np.random.default_rng(seed).normal(size=rows))[:, None], 3.0)
    classes = 2 if task is TaskType.BINARY else 4
    y = rng.integers(0, classes, rows)
    return Scored(y, probabilities(y, noise, classes, seed))


@pytest.mark.parametrize("task", list(TaskType))
def test_every_metric_tells_a_clearly_better_model_and_scores_as_ever(task: TaskType) -> None:
    good, bad = side(task, 0.4, 1), side(task, 2.0, 2)
    for name, metric in METRICS.items():
        if task not in metric.tasks:
            continue
        found = paired_bootstrap(name, task, good, bad, resamples=100)
        assert found.better, name
        assert not paired_bootstrap(name, task, bad, good, resamples=100).better
        assert found.first == evaluate(name, task, good.y, good.output, scale=good.scale)
        assert found.low < found.value < found.high
        rows = np.random.default_rng(0).integers(0, 300, 300)
        expected = evaluate(name, task, good.y[rows], good.output[rows], scale=good.scale)
        assert _statistic(name, task, good)(rows) == pytest.approx(expected, abs=1e-12), name


def test_ties_count_half_in_the_fast_auc() -> None:
    model = side(TaskType.BINARY, 1.0, 3)
    coarse = Scored(model.y, model.output.round(1))
    rows = np.arange(300)
    expected = evaluate("auc", TaskType.BINARY, coarse.y, coarse.output)
    assert _statistic("auc", TaskType.BINARY, coarse)(rows) == pytest.approx(expected, abs=1e-12)


def test_a_small_difference_is_left_to_chance_and_the_answer_is_the_same_each_time() -> None:
    one, other = side(TaskType.BINARY, 1.0, 1), side(TaskType.BINARY, 1.03, 2)
    found = paired_bootstrap("accuracy", TaskType.BINARY, one, other, resamples=200)
    assert not found.better
    assert found == paired_bootstrap("accuracy", TaskType.BINARY, one, other, resamples=200)
    same = paired_bootstrap("accuracy", TaskType.BINARY, one, one, resamples=200)
    assert (same.value, same.low, same.high, same.better) == (0, 0, 0, False)


def test_of_two_equally_good_models_one_wins_in_about_a_twentieth_of_all_tables() -> None:
    wins = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        y = rng.integers(0, 2, 200)
        sides = [Scored(y, probabilities(y, 1.0, 2, 1000 * seed + i)) for i in range(2)]
        wins += paired_bootstrap("accuracy", TaskType.BINARY, *sides, resamples=100, seed=seed).better
    assert 2 <= wins <= 22, wins  # 10 expected; outside this range one time in a thousand


def test_a_rare_class_does_not_end_it_and_one_class_does() -> None:
    y = np.zeros(50, np.int64)
    output = np.random.default_rng(0).dirichlet([1, 1], 50)
    y[3] = 1  # a third of the samples lack it
    assert np.isfinite(paired_bootstrap("auc", TaskType.BINARY, Scored(y, output), Scored(y, output)).low)
    y[3] = 0
    with pytest.raises(BadTable, match="two classes"):
        paired_bootstrap("auc", TaskType.BINARY, Scored(y, output), Scored(y, output))
    with pytest.raises(ValueError, match="same rows"):
        paired_bootstrap("auc", TaskType.BINARY, Scored(y, output), Scored(y[:9], output[:9]))
