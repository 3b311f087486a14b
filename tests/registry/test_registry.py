"""Registered models: aliases, one version per model, nothing half-written, loading anywhere without trust."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fakes import UNSEEN, make_table
from mlflow.tracking import MlflowClient
from predictor_fakes import Bomb, make_predictor

from bishop_ray import load
from bishop_ray.data.table import TaskType
from bishop_ray.errors import UnknownName, UserError
from bishop_ray.predictor import Predictor
from bishop_ray.registry import RegisteredModel, load_best, register_best
from bishop_ray.tracking import StudyTracker
from bishop_ray.tracking import client as guards

pytest_plugins = ("tracking_fixtures",)
RAW = make_table(TaskType.BINARY, rows=60, with_missing=True)


@pytest.fixture
def register(uri: str, tracker_of: Callable[..., StudyTracker]) -> Callable[..., RegisteredModel]:
    """Registers a predictor of seed `seed` with a score, in one study."""
    tracker = tracker_of(uri)
    run_id = tracker.parent_run_id()

    def call(seed: int = 0, score: float = 0.8, alias: str = "bishop", **more: object) -> RegisteredModel:
        arguments = {"metric": "accuracy", "study_id": "s", "example": RAW.frame.head(3), "run_id": run_id, **more}
        return register_best(make_predictor(RAW, seed), "CC-wine", alias=alias, val_score=score, uri=uri, **arguments)

    return call


def aliases(uri: str) -> dict[str, int]:
    return {name: int(number) for name, number in MlflowClient(uri).get_registered_model("CC-wine").aliases.items()}


def test_the_first_model_is_champion_and_loads_again(
    uri: str,
    register: Callable[..., RegisteredModel],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = register(metrics={"test_score_mean": 0.7}, tags={"dataset": "wine"})
    assert made == RegisteredModel("CC-wine", 1, "models:/CC-wine/1", champion=True, created=True)
    assert aliases(uri) == {"bishop": 1, "champion": 1}
    version = MlflowClient(uri).get_model_version("CC-wine", "1")
    expected = {"val_score": "0.8", "test_score_mean": "0.7", "dataset": "wine", "bishop.metric": "accuracy"}
    assert expected.items() <= version.tags.items()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for loaded in (load_best("CC-wine", uri=uri), load("CC-wine", "bishop"), load("CC-wine", "1")):
        pd.testing.assert_frame_equal(loaded.predict_proba(RAW.frame), make_predictor(RAW).predict_proba(RAW.frame))
    assert capfd.readouterr() == ("", "")


def test_champion_moves_only_to_a_better_score_of_the_same_metric(
    uri: str, register: Callable[..., RegisteredModel]
) -> None:
    register(0, 0.8)
    assert not register(1, 0.8, alias="mlp").champion
    assert aliases(uri) == {"bishop": 1, "mlp": 2, "champion": 1}
    assert register(2, 0.81, alias="mlp").champion
    assert aliases(uri) == {"bishop": 1, "mlp": 3, "champion": 3}
    assert not register(3, 9.0, metric="rmse").champion
    assert aliases(uri) == {"bishop": 4, "mlp": 3, "champion": 3}
    reasons = [MlflowClient(uri).get_model_version("CC-wine", str(i)).tags["bishop.champion"] for i in range(1, 5)]
    assert [text.split(":")[0] for text in reasons] == ["the first version", "no", "yes", "no"]


def test_scores_of_other_data_are_not_compared(uri: str, register: Callable[..., RegisteredModel]) -> None:
    register(0, 0.99, data_key="old table")
    assert register(1, 0.5, data_key="new table", metric="f1").champion
    assert not register(2, 0.4, data_key="new table", metric="f1").champion
    assert aliases(uri)["champion"] == 2


def test_the_same_model_of_the_same_study_is_registered_once(
    uri: str, register: Callable[..., RegisteredModel]
) -> None:
    first = register(0, 0.8)
    register(1, 0.9)
    again = register(0, 0.8)
    assert (again.version, again.created, again.champion) == (first.version, False, False)
    assert aliases(uri) == {"bishop": 2, "champion": 2}
    assert register(0, 0.8, study_id="another").version == 3
    client = MlflowClient(uri)
    assert len(client.search_model_versions("name = 'CC-wine'")) == 3


def test_a_registration_cut_off_before_the_aliases_is_completed(
    uri: str, register: Callable[..., RegisteredModel]
) -> None:
    register(0, 0.8)
    client = MlflowClient(uri)
    for alias in ("bishop", "champion"):  # as a process killed right after the version was made leaves it
        client.delete_registered_model_alias("CC-wine", alias)
    client.delete_model_version_tag("CC-wine", "1", "bishop.aliases")
    again = register(0, 0.8)
    assert (again.version, again.created, again.champion) == (1, False, True)
    assert aliases(uri) == {"bishop": 1, "champion": 1}


def test_a_failed_upload_leaves_nothing(uri: str, register: Callable[..., RegisteredModel], tmp_path: Path) -> None:
    register(0, 0.8)
    experiment = MlflowClient(uri).get_experiment_by_name("CC")
    assert experiment is not None
    models = tmp_path / "mlartifacts" / "CC" / "models"
    models.rename(tmp_path / "kept")
    models.write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"cannot be written to .*models"):
        register(1, 0.9)
    client = MlflowClient(uri)
    assert aliases(uri) == {"bishop": 1, "champion": 1}
    assert len(client.search_model_versions("name = 'CC-wine'")) == 1
    assert len(client.search_logged_models([experiment.experiment_id])) == 1
    models.unlink()
    (tmp_path / "kept").rename(models)
    assert register(1, 0.9).champion


def test_what_a_killed_registration_left_is_removed(
    uri: str, register: Callable[..., RegisteredModel], tracker_of: Callable[..., StudyTracker]
) -> None:
    first = register(0, 0.8)
    client = MlflowClient(uri)
    client.delete_model_version("CC-wine", str(first.version))  # a logged model without a version
    experiment = client.get_experiment_by_name("CC")
    assert experiment is not None
    assert len(client.search_logged_models([experiment.experiment_id])) == 1
    assert register(0, 0.8).created
    assert len(client.search_logged_models([experiment.experiment_id])) == 1


@pytest.mark.parametrize(
    ("name", "alias", "words"),
    [("a/b", "bishop", "without '/'"), ("", "bishop", "registered name"), ("CC", "latest", "taken"),
     ("CC", "champion", "taken"), ("CC", "v1", "taken"), ("CC", "a b", "letters")],
)  # fmt: skip
def test_odd_names_are_refused(name: str, alias: str, words: str, uri: str) -> None:
    with pytest.raises(UserError, match=words):
        register_best(
            make_predictor(RAW), name, alias=alias, val_score=1.0, example=RAW.frame.head(1), run_id="x", uri=uri
        )


def test_a_run_that_is_not_there(uri: str, register: Callable[..., RegisteredModel]) -> None:
    with pytest.raises(UserError, match="refused to register 'CC-wine'") as caught:
        register(run_id="0123456789abcdef0123456789abcdef")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="finite"):
        register(0, float("nan"))


def test_unknown_names_tell_the_nearest(uri: str, register: Callable[..., RegisteredModel]) -> None:
    register()
    with pytest.raises(UnknownName, match="did you mean 'CC-wine'"):
        load_best("CC-wime", uri=uri)
    with pytest.raises(UnknownName, match="did you mean 'champion'"):
        load_best("CC-wine", "chmpion", uri=uri)
    with pytest.raises(UnknownName, match="unknown version of CC-wine '7'"):
        load_best("CC-wine", "7", uri=uri)


def test_nothing_in_the_registry_is_executed(
    uri: str, register: Callable[..., RegisteredModel], tmp_path: Path
) -> None:  # case 85
    register()
    trap = tmp_path / "executed"
    folder = next((tmp_path / "mlartifacts").rglob("MLmodel")).parent
    for path in [folder / "pyfunc_model.py", *folder.rglob("code/**/*.py")]:
        path.write_text(f"open({str(trap)!r}, 'w')")
    assert len(load_best("CC-wine", uri=uri).predict(RAW.frame)) == len(RAW)
    weights = next(folder.rglob("*.safetensors"))
    weights.write_bytes(pickle.dumps(Bomb(trap)))
    with pytest.raises(UserError, match=weights.name):
        load_best("CC-wine", uri=uri)
    next(folder.rglob("predictor.json")).unlink()
    with pytest.raises(UserError, match="missing"):
        load_best("CC-wine", uri=uri)
    assert not trap.exists()


def test_plain_mlflow_loads_it_in_an_empty_folder(
    uri: str, register: Callable[..., RegisteredModel], tmp_path: Path
) -> None:  # cases 62, 65
    register()
    frame = make_table(TaskType.BINARY, rows=12, with_missing=True, with_unseen_category=True, seed=5).frame
    frame = frame.assign(num_0=frame.num_0.round(), extra=1)[["cat_1", "num_2", "extra", "num_0", "cat_0", "num_1"]]
    assert frame.isna().any(axis=None)
    assert (frame.cat_0 == UNSEEN).any()
    frame.to_json(tmp_path / "rows.json", orient="table", index=False)
    empty = tmp_path / "empty"
    empty.mkdir()
    code = f"""
import json, sys
import mlflow
import pandas as pd
frame = pd.read_json({str(tmp_path / "rows.json")!r}, orient="table")
model = mlflow.pyfunc.load_model("models:/CC-wine@champion")
variants = {{
    "plain": frame,
    "category": frame.astype({{"cat_0": "category", "cat_1": "object"}}),
    "whole numbers": frame.assign(num_0=[0] * len(frame)),
    "nullable": frame.convert_dtypes(),
    "records": frame.to_dict(orient="records"),
}}
found = {{name: list(model.predict(data)) for name, data in variants.items()}}
found["proba"] = model.predict(frame, params={{"proba": True}}).to_numpy().tolist()
import bishop_ray
found["from"] = bishop_ray.__file__
found["heavy"] = [m for m in ("ray", "optuna", "openml") if m in sys.modules]
print(json.dumps(found))
"""
    env = {"PATH": os.environ["PATH"], "MLFLOW_TRACKING_URI": uri, "HOME": str(empty), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=empty, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    predictor = make_predictor(RAW)
    labels = predictor.predict(frame).tolist()
    for name in ("plain", "category", "nullable", "records"):
        assert found[name] == labels, name
    assert found["whole numbers"] == predictor.predict(frame.assign(num_0=0)).tolist()
    np.testing.assert_allclose(found["proba"], predictor.predict_proba(frame), atol=1e-6)
    assert str(tmp_path) in found["from"]
    assert found["heavy"] == []


def test_regression_loads_through_pyfunc_here(
    uri: str, tracker_of: Callable[..., StudyTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow.pyfunc

    raw = make_table(TaskType.REGRESSION, rows=40)
    predictor = make_predictor(raw)
    run_id = tracker_of(uri).parent_run_id()
    started = time.monotonic()
    made = register_best(
        predictor, "diabetes", alias="bishop", val_score=-3.5, example=raw.frame.head(2), run_id=run_id, uri=uri
    )
    assert time.monotonic() - started < 20
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    model = mlflow.pyfunc.load_model(made.uri)
    pd.testing.assert_series_equal(model.predict(raw.frame), predictor.predict(raw.frame))
    assert isinstance(load_best("diabetes", uri=uri), Predictor)


def test_a_turn_that_never_comes_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "LONGEST_WAIT", 0.1)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    said = pytest.raises(UserError, match=r"mlflow\.db\.registry\.lock: another process has been registering")
    with guards.one_at_a_time(uri), said, guards.one_at_a_time(uri):
        pass
    with guards.one_at_a_time(uri):
        pass
