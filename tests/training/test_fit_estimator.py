"""Training of models that train themselves: what is reported, which rounds are kept, when it ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from fakes import make_table
from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor

from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.table import Table, TableSpec, TaskType
from bishop_ray.errors import TrainingFailed, UserError
from bishop_ray.metrics import default_metric, evaluate
from bishop_ray.models.base import Array, Estimator
from bishop_ray.training.fit_estimator import fit_estimator
from bishop_ray.training.results import RoundResult


class Boosting(Estimator):
    """Boosted trees of scikit-learn, grown chunk by chunk; `poison` makes a prediction NaN from that round on."""

    numeric = "normal"
    reports: ClassVar[int] = 5

    def __init__(self, spec: TableSpec, n_rounds: int = 20, learning_rate: float = 0.3, poison: int = 0) -> None:
        self.spec, self.n_rounds, self.poison = spec, n_rounds, poison
        kind = GradientBoostingClassifier if spec.task.is_classification else GradientBoostingRegressor
        self.trees = kind(n_estimators=n_rounds, learning_rate=learning_rate, max_depth=3, warm_start=True)

    def fit(self, train: Table, val: Table, on_round: Callable[[int, Array], bool]) -> None:
        step = self.n_rounds // self.reports
        losses: dict[int, float] = {}
        for rounds in range(step, self.n_rounds + 1, step):
            self.refit(train, rounds)
            prediction = self.predict(val.x_num, val.x_cat)
            losses[rounds] = loss_of(self.spec.task, val, prediction)
            if rounds < self.n_rounds and on_round(rounds, prediction):
                break
        self.rounds = min(losses, key=losses.__getitem__)

    def refit(self, train: Table, rounds: int) -> None:
        self.trees.set_params(n_estimators=rounds, random_state=self.seed)
        self.trees.fit(np.hstack([train.x_num, train.x_cat]), train.y)
        self.rounds = rounds

    def predict(self, x_num: Array, x_cat: np.ndarray) -> Array:
        rows = np.hstack([x_num, x_cat])
        classify = self.spec.task.is_classification
        stages = self.trees.staged_predict_proba(rows) if classify else self.trees.staged_predict(rows)
        for _, stage in zip(range(self.rounds), stages, strict=False):
            found = stage
        out = np.asarray(found, np.float32).reshape(len(rows), -1)
        if self.poison and self.rounds >= self.poison:
            out[0, 0] = np.nan
        return out

    def save(self, folder: Path) -> None:
        raise NotImplementedError

    def load(self, folder: Path) -> None:
        raise NotImplementedError


def loss_of(task: TaskType, val: Table, prediction: np.ndarray) -> float:
    if task.is_classification:
        return float(-np.log(prediction[np.arange(len(val)), val.y].astype(np.float64).clip(1e-15)).mean())
    return float(((prediction[:, 0].astype(np.float64) - val.y) ** 2).mean())


def setting(task: TaskType) -> tuple[Preprocessor, Table, Table]:
    """Few noisy rows, so that boosting overfits and the best round is not the last."""
    raw = make_table(task, 3, 1, rows=60)
    preprocessor = Preprocessor.fit(raw)
    return preprocessor, preprocessor.transform(raw), preprocessor.transform(make_table(task, 3, 1, rows=80, seed=1))


def run(
    task: TaskType, metric: str = "", stop_at: int = 0, scale: float = 1.0, **hparams: float
) -> tuple[Boosting, Table, list[RoundResult], RoundResult]:
    preprocessor, train, val = setting(task)
    model = Boosting(preprocessor.spec, **hparams)
    reports: list[RoundResult] = []

    def note(report: RoundResult) -> bool:
        reports.append(report)
        return report.epoch == stop_at

    last = fit_estimator(model, train, val, metric or default_metric(task, suite=False), note, target_scale=scale)
    return model, val, reports, last


@pytest.mark.parametrize("task", list(TaskType))
def test_the_best_rounds_by_the_metric_are_kept(task: TaskType) -> None:
    metric = "accuracy" if task.is_classification else "mae"
    model, val, reports, last = run(task, metric)
    scores = {}
    for rounds in (4, 8, 12, 16, 20):
        model.rounds = rounds
        scores[rounds] = evaluate(metric, task, val.y, model.predict(val.x_num, val.x_cat))
    assert [(r.rounds, r.val_score) for r in reports[:4]] == [(n, scores[n]) for n in (4, 8, 12, 16)]
    seen = {r.rounds: r.val_score for r in reports}
    best = max(seen.values())
    assert last.best_rounds == min(n for n, score in seen.items() if score == best)
    assert last.best_val_score == best == reports[last.best_epoch - 1].val_score
    assert last == reports[-1]


class Late(Boosting):
    """One whose own choice is the last, overfitted round."""

    def fit(self, train: Table, val: Table, on_round: Callable[[int, Array], bool]) -> None:
        super().fit(train, val, on_round)
        self.rounds = self.n_rounds


def test_an_earlier_round_with_a_better_score_wins_over_the_librarys_choice() -> None:
    preprocessor, train, val = setting(TaskType.BINARY)
    model = Late(preprocessor.spec, n_rounds=50, learning_rate=1.0)
    last = fit_estimator(model, train, val, "log_loss", lambda report: False)
    assert last.rounds == 50
    assert model.rounds == last.best_rounds == 10 * last.best_epoch < 50
    assert last.val_score < last.best_val_score
    kept = evaluate("log_loss", TaskType.BINARY, val.y, model.predict(val.x_num, val.x_cat))
    assert kept == last.best_val_score


def test_among_equal_scores_the_first_wins() -> None:
    """Rounds too weak to change a label."""
    model, _, reports, last = run(TaskType.BINARY, "accuracy", learning_rate=1e-12)
    assert len({r.val_score for r in reports}) == 1
    assert (model.rounds, last.best_epoch) == (4, 1)


@pytest.mark.parametrize("task", list(TaskType))
def test_reports_come_in_order(task: TaskType) -> None:
    _, _, reports, last = run(task)
    assert [r.epoch for r in reports] == [1, 2, 3, 4, 5]
    assert [r.rounds for r in reports[:4]] == [4, 8, 12, 16]
    assert [r.stop_reason for r in reports] == ["", "", "", "", "finished"]
    assert np.all(np.diff([r.best_val_score for r in reports]) >= 0)
    assert all(r.best_val_score == max(s.val_score for s in reports[: i + 1]) for i, r in enumerate(reports))
    assert all(r.seconds >= 0 and math.isfinite(r.val_loss) for r in reports)
    assert last.metrics().keys() == reports[0].metrics().keys() >= {"val_score", "rounds", "epoch_seconds", "epoch"}
    assert all(isinstance(value, int | float) for value in last.metrics().values())


@pytest.mark.parametrize("task", list(TaskType))
def test_the_loss_is_that_of_the_validation_rows(task: TaskType) -> None:
    model, val, reports, _ = run(task)
    model.rounds = 8
    assert reports[1].val_loss == pytest.approx(loss_of(task, val, model.predict(val.x_num, val.x_cat)), rel=1e-9)


def test_a_stop_is_obeyed_and_said() -> None:
    model, _, reports, last = run(TaskType.BINARY, stop_at=2)
    assert [r.rounds for r in reports[:2]] == [4, 8]
    assert len(reports) == 3
    assert last.stop_reason == "stopped"
    assert last.rounds in (4, 8)
    assert model.rounds in (4, 8)
    assert model.trees.n_estimators_ == 8, "nothing grew after the stop"


@pytest.mark.parametrize("task", list(TaskType))
@pytest.mark.parametrize("poison", [4, 12])
def test_a_prediction_that_is_not_finite_fails_the_training(task: TaskType, poison: int) -> None:
    with pytest.raises(TrainingFailed, match=f"round {poison}: non-finite prediction"):
        run(task, poison=poison)


@pytest.mark.parametrize(
    ("task", "metric", "word"),
    [
        (TaskType.REGRESSION, "auc", "r2"),
        (TaskType.BINARY, "rmse", "accuracy"),
        (TaskType.BINARY, "acuracy", "accuracy"),
    ],
)
def test_a_metric_that_does_not_fit_is_refused_before_training(task: TaskType, metric: str, word: str) -> None:
    preprocessor, train, val = setting(task)
    model = Boosting(preprocessor.spec)
    with pytest.raises(UserError, match=word):
        fit_estimator(model, train, val, metric, lambda report: False)
    assert not hasattr(model.trees, "estimators_"), "trained before the metric was looked at"


def test_errors_are_in_units_of_the_target() -> None:
    plain, scaled = run(TaskType.REGRESSION, "rmse"), run(TaskType.REGRESSION, "rmse", scale=1000.0)
    assert scaled[3].val_score == pytest.approx(1000 * plain[3].val_score)
    assert scaled[3].val_loss == plain[3].val_loss
    assert scaled[0].rounds == plain[0].rounds


def test_classification_knows_no_scale() -> None:
    assert run(TaskType.BINARY, scale=1000.0)[3].val_score == run(TaskType.BINARY)[3].val_score
