"""Where the record of a study is kept, and who may open it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from bishop_ray.config import StudyConfig
from bishop_ray.data.refs import embedded_ref
from bishop_ray.data.split import DATASETS_I
from bishop_ray.errors import UserError
from bishop_ray.search.journal import JOURNAL
from bishop_ray.search.space import load_space
from bishop_ray.search.study import (
    FORMAT,
    OpenStudy,
    open_study,
    read_study,
    remove_study,
    settings_of,
    stored_identity,
    study_folder,
)

TINY = str(Path(__file__).parents[1].joinpath("tiny_space.yaml"))


@pytest.fixture
def config(tmp_path: Path) -> StudyConfig:
    return StudyConfig(embedded_ref("iris"), "bishop", TINY, 5, 3, "auc", DATASETS_I, storage=str(tmp_path / "store"))


def opened(config: StudyConfig) -> OpenStudy:
    return open_study(config, load_space(config.space, config.model), "hash")


def test_a_database_keeps_what_a_journal_does(config: StudyConfig, tmp_path: Path) -> None:
    config = replace(config, study_db=f"sqlite:///{tmp_path}/studies.db")
    assert stored_identity(config) == ""
    first = opened(config)
    trial = first.study.ask()
    trial.report(0.5, 1)
    first.study.tell(trial, 0.7)
    again = opened(config)
    assert again.identity == first.identity == stored_identity(config)
    assert [t.value for t in again.study.trials if t.state == TrialState.COMPLETE] == [0.7]
    assert again.study.trials[0].intermediate_values == {1: 0.5}
    assert not (study_folder(config) / JOURNAL).exists()
    with pytest.raises(UserError, match="max-epochs was 3, is 4"):
        opened(replace(config, max_epochs=4))
    remove_study(config)
    assert stored_identity(config) == ""
    assert opened(config).identity != first.identity


def test_a_database_that_cannot_be_opened_is_one_line_without_its_password(config: StudyConfig) -> None:
    for url in ("postgresql+nosuch://u:geheim@127.0.0.1:1/x", "nonsense", "sqlite:////no/such/folder/x.db"):
        with pytest.raises(UserError, match=r"^--study-db: ") as error:
            opened(replace(config, study_db=url))
        assert "geheim" not in str(error.value)
        assert "\n" not in str(error.value)
    assert "geheim" not in repr(replace(config, study_db="postgresql://u:geheim@h/x"))


def test_a_study_of_a_newer_version_is_refused(config: StudyConfig) -> None:
    study = opened(config).study
    study.set_user_attr("format", FORMAT + 1)
    with pytest.raises(UserError, match=rf"newer version \(format {FORMAT + 1}; this version knows {FORMAT}\)"):
        opened(config)
    del study
    remove_study(config)
    assert isinstance(opened(config).study, optuna.Study)


RULE = ("reduction factor", "grace period")
REDUCTION = "bishop_ray.search.scheduler.REDUCTION"


def forget_the_rule(study: optuna.Study) -> None:
    """Leaves the study as versions did that kept no rule."""
    settings = {key: value for key, value in settings_of(study).items() if key not in RULE}
    study.set_user_attr("facts", json.dumps(settings))


def test_the_rule_by_which_trials_are_stopped_stays(config: StudyConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(REDUCTION, 3)
    study = opened(config).study
    assert [settings_of(study)[key] for key in ("scheduler", *RULE)] == ["asha", 3, 2]
    for change in ("REDUCTION", "GRACE_LEAST"):
        with monkeypatch.context() as patch:
            patch.setattr(f"bishop_ray.search.scheduler.{change}", 1 if change == "GRACE_LEAST" else 4)
            words = "grace period was 2, is 1" if change == "GRACE_LEAST" else "reduction factor was 3, is 4"
            with pytest.raises(UserError, match=f"^study .* exists with other settings: {words}; use --fresh") as error:
                opened(config)
            assert "\n" not in str(error.value)
    opened(config)
    monkeypatch.setattr(REDUCTION, 4)
    without = replace(config, scheduler="none", seed=1)
    assert opened(without).identity == opened(without).identity


def test_a_study_that_kept_no_rule_goes_on_by_the_one_of_then(
    config: StudyConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(REDUCTION, 3)
    first = opened(config)
    whole = settings_of(first.study)
    forget_the_rule(first.study)
    with monkeypatch.context() as patch:
        patch.setattr(REDUCTION, 4)
        with pytest.raises(UserError, match="reduction factor was 3, is 4"):
            opened(config)
    assert not set(RULE) & settings_of(opened_raw(config)).keys(), "what is refused is left as it is"
    assert opened(config).identity == first.identity
    assert settings_of(opened_raw(config)) == whole, "and is kept from then on"
    forget_the_rule(first.study)
    with pytest.raises(UserError, match="max-epochs was 3, is 40"):
        opened(replace(config, max_epochs=40))


def opened_raw(config: StudyConfig) -> optuna.Study:
    return read_study(study_folder(config))
