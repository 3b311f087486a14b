"""What trials leave on disk for an ensemble, how a time limit ends them, and the ensemble made of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import ray
from fakes import make_table
from optuna.trial import TrialState
from ray import tune

from bishop_ray.config import Resources
from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.table import TaskType
from bishop_ray.metrics import evaluate
from bishop_ray.models import model_class
from bishop_ray.models.base import Estimator
from bishop_ray.predictor import Predictor
from bishop_ray.search.cluster import Cluster
from bishop_ray.search.ensemble import Candidate, Problem, build_ensemble, candidates
from bishop_ray.search.study import KEPT, kept_models
from bishop_ray.training.job import PREDICTOR, STOP_REASON, VALIDATION, StudyData, TrialSettings, model_folder
from bishop_ray.training.trainable import train_driver

pytest_plugins = ("study_fixtures",)

MODELS: dict[str, dict[str, Any]] = {
    "lightgbm": {},
    "mlp": {"n_blocks": 1, "d_block": 8},
    "random_forest": {},
}
LONG_AGO = 1.0


def study_data(task: TaskType, model: str) -> StudyData:
    train, validation = make_table(task, rows=160), make_table(task, rows=80, seed=1)
    coder = Preprocessor.fit(train, model_class(model).numeric)
    return StudyData(
        coder.spec, coder.transform(train), coder.transform(validation), coder.to_dict(), coder.target.scale
    )


@dataclass(frozen=True)
class Trained:
    """Trials that Tune ran: their last reports, by trial number; and where they left their models."""

    settings: dict[str, TrialSettings]
    data: dict[str, StudyData]
    reports: dict[tuple[str, int], dict[str, Any]]


@pytest.fixture(scope="module", params=[TaskType.BINARY, TaskType.REGRESSION], ids=str)
def trained(request: pytest.FixtureRequest, ray_here: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Of each model: trial 0 without a limit, trial 1 whose time was over before it began."""
    folder = tmp_path_factory.mktemp("trained")
    metric = "r2" if request.param is TaskType.REGRESSION else "auc"
    data = {model: study_data(request.param, model) for model in MODELS}
    settings = {}
    for model in MODELS:
        cls = model_class(model)
        epochs = cls.reports if issubclass(cls, Estimator) else 6
        place = str(folder / model)
        settings[model] = TrialSettings(model, metric, epochs, 0, Resources(), "auto", place, ray.put(data[model]))
    points = [
        {"model": model, "number": number, "params": {"model": hparams, "train": {}}, "ends": ends, "seconds": 0.0}
        for model, hparams in MODELS.items()
        for number, ends in enumerate((0.0, LONG_AGO))
    ]

    def by_position(config: dict[str, Any]) -> None:  # local: workers cannot import this module
        train_driver(points[config["position"]], settings)

    results = tune.Tuner(
        by_position,
        param_space={"position": tune.grid_search(list(range(len(points))))},
        tune_config=tune.TuneConfig(reuse_actors=True),
        run_config=tune.RunConfig(storage_path=str(folder / "tune"), verbose=0),
    ).fit()
    assert not results.errors
    last = {}
    for result in results:
        point = points[result.config["position"]]
        last[point["model"], point["number"]] = result.metrics
    return Trained(settings, data, last)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("model", MODELS)
def test_a_trial_leaves_its_model_with_predictions_and_score(trained: Trained, model: str, number: int) -> None:
    settings, data, report = trained.settings[model], trained.data[model], trained.reports[model, number]
    folder = model_folder(settings.folder, number)
    predictor = Predictor.load(folder / PREDICTOR)
    kept = np.load(folder / VALIDATION)
    assert kept.dtype == np.float32
    again = predictor.model.predict(data.validation.x_num, data.validation.x_cat)
    np.testing.assert_array_equal(kept, again)
    task = data.spec.task
    raw = make_table(task, rows=80, seed=1)
    np.testing.assert_allclose(predictor.output(raw.frame), kept, atol=1e-6)
    score = evaluate(settings.metric, task, data.validation.y, kept, scale=data.target_scale)
    assert report["best_val_score"] == score, "what was reported is what was saved, to the last bit"
    assert predictor.info["rounds"] >= 1


def test_a_trial_whose_time_is_over_ends_at_its_first_report(trained: Trained) -> None:
    for model in ("lightgbm", "mlp"):
        ended, cut = trained.reports[model, 0], trained.reports[model, 1]
        assert ended[STOP_REASON] in ("finished", "max_epochs", "patience")
        assert cut[STOP_REASON] == "time limit"
        assert cut["epoch"] < ended["epoch"]
    assert trained.reports["mlp", 1]["epoch"] == 1
    # The report after the first chunk asks for the stop, the one after it has the reason and the model.
    assert trained.reports["lightgbm", 1]["epoch"] == 2


def finished(study: optuna.Study, value: float, state: TrialState = TrialState.COMPLETE) -> int:
    trial = study.ask()
    if state == TrialState.COMPLETE:
        study.tell(trial, value)
    else:
        trial.report(value, 1)
        study.tell(trial, state=state)
    return trial.number


@pytest.fixture
def left(tmp_path: Path) -> tuple[optuna.Study, Path]:
    """Eight trials; the best was stopped early, the second best has lost its model, two are equal."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize")
    for value in (0.5, 0.8, 0.6, 0.8, 0.9, 0.7, 0.4):
        number = finished(study, value)
        if value != 0.9:
            (model_folder(tmp_path, number) / PREDICTOR).mkdir(parents=True)
    finished(study, 0.99, TrialState.PRUNED)
    finished(study, 0.99, TrialState.FAIL)
    return study, tmp_path


def test_the_best_that_left_a_model_are_found(left: tuple[optuna.Study, Path]) -> None:
    study, folder = left
    assert KEPT == 5
    assert [(number, score) for number, score, _ in kept_models(study, folder)] == [
        (1, 0.8),
        (3, 0.8),
        (5, 0.7),
        (2, 0.6),
        (0, 0.5),
    ]
    found = candidates([("a", study, folder), ("b", optuna.create_study(), folder)])
    assert [c.number for c in found] == [1, 3, 5, 2, 0]
    assert {c.model for c in found} == {"a"}


def problem_of(y: np.ndarray) -> Problem:
    return Problem(y, "log_loss", TaskType.BINARY, 1.0, 0)


def with_predictions(folder: Path, model: str, number: int, right: np.ndarray, y: np.ndarray) -> Candidate:
    """A contender that is right on the rows `right`."""
    place = model_folder(folder / model, number)
    place.mkdir(parents=True)
    sure = np.where(right, y, 1 - y)
    np.save(place / VALIDATION, np.column_stack([1 - sure, sure]).astype(np.float32) * 0.8 + 0.1)
    return Candidate(model, number, evaluate("log_loss", TaskType.BINARY, y, np.load(place / VALIDATION)), place)


def test_models_that_err_on_different_rows_make_an_ensemble(tmp_path: Path) -> None:
    y = np.arange(90) % 2
    part = np.arange(90) // 30
    found = [with_predictions(tmp_path, model, 0, part != i, y) for i, model in enumerate("abc")]
    ensemble = build_ensemble(found, problem_of(y))
    assert ensemble is not None
    assert {c.model for c, _ in ensemble.members} == {"a", "b", "c"}
    assert sum(weight for _, weight in ensemble.members) == pytest.approx(1)
    assert ensemble.score > max(c.score for c in found) + 0.2
    assert "a (trial 0)" in ensemble.words()


def test_no_ensemble_where_one_model_is_all_it_takes(tmp_path: Path) -> None:
    y = np.arange(40) % 2
    perfect = with_predictions(tmp_path, "a", 0, np.ones(40, bool), y)
    worse = with_predictions(tmp_path, "b", 0, np.arange(40) < 25, y)
    assert build_ensemble([perfect], problem_of(y)) is None
    assert build_ensemble([perfect, worse], problem_of(y)) is None
    broken = replace(worse, model="c", number=1, folder=tmp_path / "nan")
    broken.folder.mkdir()
    np.save(broken.folder / VALIDATION, np.full((40, 2), np.nan, np.float32))
    assert build_ensemble([broken, replace(broken, number=2)], problem_of(y)) is None, "no usable predictions"
