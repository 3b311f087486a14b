"""Early stopping by model: who is compared with whom, and who is never cut."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState
from ray.tune.schedulers import TrialScheduler

from bishop_ray.config import StudyConfig
from bishop_ray.data.refs import embedded_ref
from bishop_ray.data.split import SplitProtocol
from bishop_ray.errors import UnknownName
from bishop_ray.search.scheduler import (
    EPOCH,
    NO_CONTROLLER,
    SCORE,
    PerModel,
    RungStop,
    make_scheduler,
    replay,
    rung_stop,
    stopping_rule,
    unrecorded_rule,
)
from bishop_ray.training.job import STOP_REASON

STOP, CONTINUE = TrialScheduler.STOP, TrialScheduler.CONTINUE


def config(model: str, epochs: int, scheduler: str = "asha") -> StudyConfig:
    split = SplitProtocol((0.7, 0.2, 0.1))
    return StudyConfig(embedded_ref("iris"), model, model, 9, epochs, "auc", split, scheduler=scheduler)


@pytest.fixture
def study() -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(direction="maximize")


class Bench:
    """Trials of several models under one scheduler."""

    def __init__(self, study: optuna.Study, **epochs: int) -> None:
        self.scheduler = PerModel({model: make_scheduler(config(model, n), study) for model, n in epochs.items()})

    def trial(self, model: str, number: int) -> Any:
        trial = SimpleNamespace(trial_id=f"{model}{number}", config={"model": model, "number": number})
        self.scheduler.on_trial_add(None, trial)
        return trial

    def report(self, trial: Any, epoch: int, score: float, reason: str = "") -> str:
        return self.scheduler.on_trial_result(None, trial, {EPOCH: epoch, SCORE: score, STOP_REASON: reason})


def test_trials_are_compared_within_their_model_only(study: optuna.Study) -> None:
    bench = Bench(study, mlp=30, xgboost=10)
    good = [bench.trial("xgboost", i) for i in range(3)]
    for trial in good:
        for chunk in (1, 2, 3):
            assert bench.report(trial, chunk, 0.9) == CONTINUE
    poor = bench.trial("mlp", 0)
    assert [bench.report(poor, epoch, 0.1) for epoch in range(1, 31)] == [CONTINUE] * 30, "the only one of its model"
    poorer = bench.trial("mlp", 1)
    answers = [bench.report(poorer, epoch, 0.05) for epoch in (1, 2, 3)]
    assert answers == [CONTINUE, CONTINUE, STOP], "its first rung is a tenth of its 30 epochs"
    assert bench.report(bench.trial("xgboost", 3), 2, 0.05) == STOP, "that of ten chunks is the second one"


def test_a_trial_that_ends_by_itself_is_not_cut_before_its_model_is_saved(study: optuna.Study) -> None:
    bench = Bench(study, lightgbm=10)
    for i in range(3):
        bench.report(bench.trial("lightgbm", i), 2, 0.9)
    early, late = bench.trial("lightgbm", 3), bench.trial("lightgbm", 4)
    assert bench.report(early, 2, 0.1, "finished") == CONTINUE
    assert bench.report(late, 1, 0.1) == CONTINUE
    assert bench.report(late, 2, 0.1) == STOP
    assert bench.report(late, 2, 0.1) == STOP, "and it stands by it"
    beyond = bench.trial("lightgbm", 5)
    assert bench.report(beyond, 11, 0.95, "finished") == CONTINUE, "the last report has a number of its own"


def test_models_that_report_once_are_never_stopped(study: optuna.Study) -> None:
    bench = Bench(study, tabpfn=1)
    for i, score in enumerate((0.9, 0.8, 0.1)):
        assert bench.report(bench.trial("tabpfn", i), 1, score, "finished") == CONTINUE


def test_a_resumed_study_remembers_what_finished_trials_reported(study: optuna.Study) -> None:
    for state in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.COMPLETE):
        trial = study.ask()
        for epoch in range(1, 11):
            trial.report(0.9, epoch)
        study.tell(trial, 0.9 if state == TrialState.COMPLETE else None, state=state)
    bench = Bench(study, catboost=10)
    assert bench.report(bench.trial("catboost", 3), 2, 0.1) == STOP


def test_without_early_stopping_nothing_is_stopped(study: optuna.Study) -> None:
    scheduler = PerModel({"mlp": make_scheduler(config("mlp", 20, "none"), study)})
    for i, score in enumerate((0.9, 0.8, 0.1)):
        trial: Any = SimpleNamespace(trial_id=str(i), config={"model": "mlp"})
        scheduler.on_trial_add(None, trial)
        assert scheduler.on_trial_result(None, trial, {EPOCH: 5, SCORE: score}) == CONTINUE
    with pytest.raises(UnknownName, match="did you mean 'asha'"):
        make_scheduler(replace(config("mlp", 20), scheduler="ashe"), study)


def test_the_rung_the_cut_off_and_the_score_of_a_stop_are_kept(study: optuna.Study) -> None:
    asha = make_scheduler(config("mlp", 30), study)
    bench = Bench(study)
    bench.scheduler = PerModel({"mlp": asha})
    at_rungs: dict[int, list[float]] = {3: [], 9: []}
    for number, slope in enumerate((0.05, 0.04, 0.06, 0.055)):
        trial = bench.trial("mlp", number)
        for epoch in range(1, 10):
            answer = bench.report(trial, epoch, slope * epoch)
            stop = rung_stop(asha, number)
            assert (answer == STOP) == (stop is not None)
            if stop is not None:
                others = at_rungs[stop.epoch]
                assert stop == RungStop(
                    (3, 9).index(epoch), epoch, float(np.percentile(others, 200 / 3)), slope * epoch
                )
                assert stop.score < stop.cutoff
            if epoch in at_rungs:
                at_rungs[epoch].append(slope * epoch)
            if answer == STOP:
                break
    stops = [rung_stop(asha, number) for number in range(4)]
    assert [stop and stop.rung for stop in stops] == [None, 0, None, 1]
    assert rung_stop(make_scheduler(config("mlp", 30, "none"), study), 4) is None


def test_a_trial_that_goes_on_is_stopped_for_what_it_had_reported(study: optuna.Study) -> None:
    ended = study.ask()
    for epoch in (1, 2):
        ended.report(0.9, epoch)
    study.tell(ended, 0.9)
    asha = make_scheduler(config("catboost", 10), study)
    trial: Any = SimpleNamespace(trial_id="new", config={"model": "catboost", "number": 1})
    asha.on_trial_add(NO_CONTROLLER, trial)
    replay(asha, trial, {1: 0.1, 2: 0.2})
    assert asha.on_trial_result(NO_CONTROLLER, trial, {EPOCH: 2, SCORE: 0.2}) == STOP
    assert rung_stop(asha, 1) == RungStop(0, 2, 0.9, 0.2)


def test_the_rule_of_a_study_is_what_its_scheduler_does(study: optuna.Study, monkeypatch: pytest.MonkeyPatch) -> None:
    for epochs, grace in ((1, 1), (3, 2), (30, 3), (41, 5)):
        assert stopping_rule("asha", epochs) == {"reduction factor": 3, "grace period": grace}
        assert stopping_rule("asha", epochs) == unrecorded_rule("asha", epochs)
    monkeypatch.setattr("bishop_ray.search.scheduler.REDUCTION", 2)
    assert stopping_rule("asha", 30)["reduction factor"] == 2
    assert unrecorded_rule("asha", 30)["reduction factor"] == 3
    bench = Bench(study, mlp=30)
    for number in range(2):
        for epoch in (3, 6):
            bench.report(bench.trial("mlp", number), epoch, 0.9)
    poor = bench.trial("mlp", 2)
    bench.report(poor, 3, 0.95)
    assert bench.report(poor, 6, 0.1) == STOP, "the second rung is at twice the first one's epoch"
