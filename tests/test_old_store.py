"""Studies and registered models of an earlier version go on and load: a store written by it, ``tests/data/store_v1``.

Scores are compared to five digits, since another processor rounds otherwise; what was suggested and which trials were
stopped must be the same.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import old_store as store
import pytest
from mlflow import MlflowClient

import bishop_ray

EXPECTED: dict[str, Any] = json.loads((store.STORE / store.EXPECTED).read_text("utf-8"))
STATUS = {"COMPLETE": "FINISHED", "PRUNED": "KILLED", "FAIL": "FAILED"}
"""Of a trial's run in MLflow, by the trial's state."""
FINISHED = ("rents-bishop-s3", "churn-xgboost-s2", "churn-mlp-s2")
SCORE = {"rel": 1e-5, "abs": 1e-6}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The store, a copy of its own for each test."""
    return store.unpack(tmp_path / "store")


def goes_on(folder: Path, name: str, studies: list[str]) -> None:
    """Runs a half-done search to its end: it is the undisturbed one, and so is its record in MLflow."""
    before = {study: store.trials(folder, study) for study in studies}
    states = Counter(trial.state.name for found in before.values() for trial in found)
    asked = sum(len(EXPECTED["trials"][study]) for study in studies)
    assert states["RUNNING"] == 1
    assert states["PRUNED"] >= 1
    assert 2 <= states.total() < asked
    store.run(store.HALF_DONE[name], folder)
    for study in studies:
        found = store.trials(folder, study)
        same(found, EXPECTED["trials"][study])
        for trial, old in zip(found, before[study], strict=False):
            if old.state.is_finished():
                assert trial.datetime_complete == old.datetime_complete, "it was not trained again"
        assert runs_of(folder, study) == ("FINISHED", Counter(STATUS[trial.state.name] for trial in found))


def same(found: list[Any], expected: list[dict[str, Any]]) -> None:
    """Asserts that a study's trials are those of the undisturbed one."""
    for trial, wanted in zip(found, expected, strict=True):
        facts = store.facts(trial)
        assert facts["state"] == wanted["state"], trial.number
        assert facts["params"] == wanted["params"], trial.number
        assert facts["value"] == pytest.approx(wanted["value"], **SCORE), trial.number
        assert facts["reports"] == pytest.approx(wanted["reports"], **SCORE), trial.number


def client(folder: Path) -> MlflowClient:
    """Of the store's MLflow."""
    return MlflowClient(tracking_uri=store.tracking(folder), registry_uri=store.tracking(folder))


def runs_of(folder: Path, study: str) -> tuple[str, Counter[str]]:
    """The status of a study's own run, and how many runs of its trials have which; there is one run for each."""
    mlflow = client(folder)
    experiments = [experiment.experiment_id for experiment in mlflow.search_experiments()]
    (own,) = mlflow.search_runs(experiments, f"attributes.run_name = '{study}'")
    children = mlflow.search_runs(experiments, f"tags.`mlflow.parentRunId` = '{own.info.run_id}'")
    return own.info.status, Counter(run.info.status for run in children)


def test_a_search_over_one_model_goes_on(folder: Path) -> None:
    goes_on(folder, "single", ["rents-bishop-s4"])


def test_a_search_over_several_models_goes_on(folder: Path) -> None:
    goes_on(folder, "several", ["churn-xgboost-s0", "churn-mlp-s0"])
    assert runs_of(folder, "churn-automl-s0")[0] == "FINISHED"


def test_a_training_with_fixed_settings_goes_on(folder: Path) -> None:
    (trained,) = folder.glob("home/studies/*-fixed-*/final/*/predictor/predictor.json")
    text = trained.read_text()
    said = store.run([*store.HALF_DONE["fixed"], "--output", "fixed.csv"], folder)
    rows = list(csv.DictReader((folder / "fixed.csv").open()))
    alike(rows, EXPECTED["fixed"], ("seed", "epochs", "note"))
    assert trained.read_text() == text, "it was not trained again"
    assert float(rows[0]["seconds"]) == round(json.loads(text)["info"]["fit_seconds"], 3)
    assert len(list(trained.parents[2].glob("*/predictor"))) == len(rows) == 3, said


def test_an_ablation_goes_on(folder: Path) -> None:
    files = {path: path.read_bytes() for path in folder.glob("home/ablations/*/runs/*.json")}
    assert len(files) == 2
    said = store.run([*store.HALF_DONE["ablation"], "--output", "ablation.csv"], folder)
    rows = list(csv.DictReader((folder / "ablation-runs.csv").open()))
    alike(rows, EXPECTED["ablation"], ("setting", "model", "seed", "status", "epochs", "test_openings", "reason"))
    assert "[1/2]" in said
    assert "[2/2]" in said
    assert {path: path.read_bytes() for path in files} == files, "they were not trained again"


def alike(rows: list[dict[str, str]], expected: list[dict[str, str]], exact: tuple[str, ...]) -> None:
    """Asserts that two tables of trainings say the same; seconds differ."""
    for row, wanted in zip(rows, expected, strict=True):
        assert {name: row[name] for name in exact} == {name: wanted[name] for name in exact}
        for part in ("validation", "test"):
            assert float(row[part]) == pytest.approx(float(wanted[part]), **SCORE)


def test_registered_models_load(folder: Path) -> None:
    for name, aliases in EXPECTED["predictions"].items():
        for alias, wanted in aliases.items():
            found = store.said(bishop_ray.load(name, alias, store.tracking(folder)), name, folder)
            assert found == pytest.approx(np.array(wanted), rel=1e-6, abs=1e-6), (name, alias)


PYFUNC = """
import json, sys
import mlflow, pandas
{first}
mlflow.set_tracking_uri(sys.argv[1])
rents = mlflow.pyfunc.load_model("models:/rents@bishop").predict(pandas.read_csv("rents.csv").head(10))
model = mlflow.pyfunc.load_model("models:/churn@ensemble")
churn = model.predict(pandas.read_csv("churn.csv").head(10), params={{"proba": True}})
import bishop_ray
print(json.dumps([bishop_ray.__file__, rents.to_numpy().tolist(), churn.to_numpy().tolist()]))
"""


@pytest.mark.parametrize("imported", [False, True], ids=["alone", "beside this package"])
def test_registered_models_load_through_mlflow(folder: Path, imported: bool) -> None:
    """By the package's copy among their files; or, where it is imported, by this package."""
    code = PYFUNC.format(first="import bishop_ray" if imported else "")
    line = [sys.executable, "-P", "-W", "ignore", "-c", code, store.tracking(folder)]
    done = subprocess.run(line, cwd=folder, env=store.environment(folder), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    file, rents, churn = json.loads(done.stdout.splitlines()[-1])
    assert Path(file).is_relative_to(folder / "home") != imported
    assert np.array(rents) == pytest.approx(np.array(EXPECTED["predictions"]["rents"]["bishop"]), rel=1e-6)
    assert np.array(churn) == pytest.approx(np.array(EXPECTED["predictions"]["churn"]["ensemble"]), abs=1e-6)


def test_list_promote_and_rollback(folder: Path) -> None:
    rows = json.loads(store.run(["models.py", "list", "--json"], folder))
    versions = {(row["name"], alias): row["version"] for row in rows for alias in row["aliases"]}
    assert versions.keys() == {(n, a) for n, aliases in EXPECTED["predictions"].items() for a in aliases}
    text = store.run(["models.py", "list"], folder)
    assert all(f"{row['val_score']:.4f}" in text and row["gate"].startswith("passed") for row in rows), text

    champion, other = versions["churn", "champion"], versions["churn", "ensemble"]
    assert champion != other
    store.run(["models.py", "promote", "churn", "--version", str(other), "--force"], folder)
    found = store.said(bishop_ray.load("churn", tracking_uri=store.tracking(folder)), "churn", folder)
    assert found == pytest.approx(np.array(EXPECTED["predictions"]["churn"]["ensemble"]), abs=1e-6)
    store.run(["models.py", "rollback", "churn"], folder)
    assert str(client(folder).get_model_version_by_alias("churn", "champion").version) == str(champion)


def test_an_ensemble_is_rebuilt(folder: Path) -> None:
    versions = len(client(folder).search_model_versions("name = 'churn'"))
    text = store.run(["models.py", "ensemble", "churn-automl-s2"], folder)
    assert "registered before, no new version" in text
    assert len(client(folder).search_model_versions("name = 'churn'")) == versions


@pytest.mark.parametrize("study", FINISHED)
def test_replay(folder: Path, study: str) -> None:
    """The best trial of a study is trained again; exit code 1 where another processor gives other digits."""
    mlflow = client(folder)
    experiments = [experiment.experiment_id for experiment in mlflow.search_experiments()]
    (own,) = mlflow.search_runs(experiments, f"attributes.run_name = '{study}'")
    text = store.run(["models.py", "replay", own.info.run_id], folder, codes=(0, 1))
    found = re.search(rf"{study} trial \d+: .*difference ([\d.e+-]+)", text)
    assert found, text
    assert float(found[1].rstrip(".")) < 1e-5, text


def test_sync(folder: Path) -> None:
    """What was killed is ended; called again there is nothing left."""
    text = store.run(["models.py", "sync"], folder)
    assert "left alone" not in text
    assert "rents-bishop-s4" in text
    for study in ("rents-bishop-s4", "churn-xgboost-s0", "churn-mlp-s0", "churn-automl-s0"):
        status, children = runs_of(folder, study)
        assert status == "KILLED", study
        assert not {"RUNNING", "SCHEDULED"} & set(children), study
    assert "nothing to do" in store.run(["models.py", "sync"], folder)


def test_finished_searches_are_finished(folder: Path) -> None:
    """The same commands again train nothing, and register nothing."""
    before = {study: store.trials(folder, study) for study in FINISHED}
    versions = len(client(folder).search_model_versions())
    for command in store.FINISHED:
        assert "finished before, nothing was trained" in store.run(command, folder)
    assert {study: store.trials(folder, study) for study in FINISHED} == before
    assert all(before.values())
    assert len(client(folder).search_model_versions()) == versions
