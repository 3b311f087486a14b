"""``jobs/models.py ensemble`` after a real search: what it rebuilds, registers, prints and refuses."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import optuna
import pandas as pd
import pytest
from filelock import FileLock
from mlflow.tracking import MlflowClient
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from test_security import payloads

from bishop_ray import cli
from bishop_ray.cli import models
from bishop_ray.errors import UserError
from bishop_ray.models import MODELS
from bishop_ray.predictor import EnsemblePredictor, Predictor
from bishop_ray.predictor.storage import hash_file, hash_folder
from bishop_ray.registry import load_best
from bishop_ray.search.rebuild import NoEnsemble, Rebuilt, rebuild_ensemble
from bishop_ray.search.replay import replay_run

ROOT = Path(__file__).resolve().parents[2]
SEARCH = "diabetes-automl-s0"
MODELS_OF_IT = ("lightgbm", "xgboost", "mlp")


@dataclass(frozen=True)
class Place:
    """A search on disk and its MLflow store."""

    storage: Path
    uri: str

    def folder(self, model: str = "automl") -> Path:
        return self.storage / "studies" / f"diabetes-{model}-s0"

    def rebuild(self, study: str = SEARCH, **more: int) -> Rebuilt:
        return rebuild_ensemble(self.storage, study, uri=self.uri, **more)

    def versions(self) -> list[str]:
        client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        return sorted(str(v.version) for v in client.search_model_versions("name = 'diabetes'"))


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The default configurations of three models, searched as a person does."""
    folder = tmp_path_factory.mktemp("searched")
    place = Place(folder / "store", f"sqlite:///{folder}/mlflow.db")
    flags = ["--dataset", "diabetes", "--models", *MODELS_OF_IT, "--trials", "3", "--max-epochs", "10"]
    flags += ["--max-concurrent", "1", "--storage", str(place.storage), "--tracking-uri", place.uri]
    done = subprocess.run([sys.executable, str(ROOT / "jobs" / "tune.py"), *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return place


@pytest.fixture
def place(searched: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A copy, to be spoiled; the files of registered models stay where they are."""
    monkeypatch.setenv("BISHOP_RAY_ARTIFACT_ROOTS", str(searched.storage.with_name("mlartifacts")))
    shutil.copytree(searched.storage, tmp_path / "store")
    shutil.copy(searched.uri.removeprefix("sqlite:///"), tmp_path / "mlflow.db")
    return Place(tmp_path / "store", f"sqlite:///{tmp_path}/mlflow.db")


def members(rebuilt: Rebuilt) -> dict[str, float]:
    return {contender.model: weight for contender, weight in rebuilt.ensemble.members}


def command(*flags: str) -> int:
    return models.run_models(models.models_parser().parse_args(flags))


def test_the_command_finds_what_the_search_registered(place: Place, tmp_path: Path) -> None:
    before = place.versions()
    registered = load_best("diabetes", "ensemble", place.uri)
    output = tmp_path / "saved"
    flags = ["ensemble", "diabetes", "--storage", str(place.storage), "--tracking-uri", place.uri]
    line = [sys.executable, str(ROOT / "jobs" / "models.py"), *flags, "--output", str(output)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert place.versions() == before, "the same ensemble gets no second version"
    assert "registered before, no new version: diabetes" in done.stdout
    assert "no test score: the test split stays closed" in done.stdout

    saved = Predictor.load(output)
    assert isinstance(saved, EnsemblePredictor)
    assert isinstance(registered, EnsemblePredictor)
    assert saved.hparams == registered.hparams
    for member in saved.members:
        assert any(
            row.split()[:2] == [f"{member.weight:.2f}", member.predictor.model_name] for row in done.stdout.splitlines()
        )
    frame = pd.read_parquet(place.folder() / "example.parquet")
    assert np.array_equal(saved.output(frame), registered.output(frame))


def test_weights_scores_and_predictions(place: Place) -> None:
    rebuilt = place.rebuild()
    assert len(members(rebuilt)) >= 2
    assert sum(members(rebuilt).values()) == pytest.approx(1)
    assert rebuilt.left_out == ()
    assert [c.score for c in rebuilt.candidates] == sorted((c.score for c in rebuilt.candidates), reverse=True)
    client = MlflowClient(tracking_uri=place.uri, registry_uri=place.uri)
    version = client.get_model_version("diabetes", str(rebuilt.registered.version))
    assert float(version.tags["val_score"]) == rebuilt.ensemble.score, "what the search found"
    assert rebuilt.fitted_score > rebuilt.ensemble.score
    assert rebuilt.fitted_score >= rebuilt.candidates[0].score, "selection starts from the best single one"

    frame = pd.read_parquet(place.folder() / "example.parquet")
    loaded = load_best("diabetes", "ensemble", place.uri)
    mean = sum(weight * contender.load().output(frame) for contender, weight in rebuilt.ensemble.members)
    np.testing.assert_allclose(loaded.output(frame), mean, rtol=1e-6)
    target = loaded.target
    np.testing.assert_allclose(loaded.predict(frame), target.inverse(np.asarray(mean)), rtol=1e-6)


def test_without_one_model_a_new_version_that_no_second_call_repeats(place: Place) -> None:
    whole = place.rebuild()
    first, gone = whole.registered, whole.ensemble.members[-1][0]
    shutil.rmtree(gone.folder)
    rebuilt = place.rebuild()
    assert gone.model not in members(rebuilt)
    assert rebuilt.left_out == (f"{gone.model}: no trained model on disk",)
    assert rebuilt.registered.created
    assert rebuilt.registered.version > first.version
    again = place.rebuild().registered
    assert (again.version, again.created) == (rebuilt.registered.version, False)

    client = MlflowClient(tracking_uri=place.uri, registry_uri=place.uri)
    model = client.get_registered_model("diabetes")
    assert int(model.aliases["ensemble"]) == rebuilt.registered.version
    champion = client.get_model_version("diabetes", str(model.aliases["champion"]))
    assert float(champion.tags["val_score"]) >= rebuilt.ensemble.score
    run = client.get_run(client.get_model_version("diabetes", str(rebuilt.registered.version)).run_id)
    assert run.data.tags["bishop.study"] == SEARCH


def test_a_model_whose_extra_is_missing_is_left_out(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = replace(MODELS["xgboost"], modules=("no_such_module",))
    monkeypatch.setitem(MODELS, "xgboost", absent)
    rebuilt = place.rebuild()
    assert rebuilt.left_out == ("xgboost: needs no_such_module: pip install 'bishop-ray[boosters]'",)
    assert set(members(rebuilt)) <= {"lightgbm", "mlp"}


def spoil_weights(place: Place) -> str:
    path = place.folder("mlp") / "models" / "0000" / "predictor" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    return r"mlp \(trial 0\): .*weights"


def spoil_predictions(place: Place) -> str:
    (place.folder("mlp") / "models" / "0000" / "validation.npy").write_bytes(b"\x93NUMPY")
    return r"mlp \(trial 0\): its predictions of the validation rows are damaged"


def lose_predictions(place: Place) -> str:
    (place.folder("mlp") / "models" / "0000" / "validation.npy").unlink()
    return r"mlp \(trial 0\): its predictions of the validation rows are gone"


def other_rows(place: Place) -> str:
    path = place.folder("mlp") / "models" / "0000" / "validation.npy"
    np.save(path, np.load(path)[:-1])
    return r"mlp \(trial 0\): its predictions are damaged: expected \(\d+, 1\), found"


def spoil_journal(place: Place) -> str:
    path = place.folder("mlp") / "optuna.journal"
    path.write_bytes(b'{"op_code": \n' + path.read_bytes())
    return r"mlp: .*optuna\.journal: damaged"


def lose_journal(place: Place) -> str:
    (place.folder("mlp") / "optuna.journal").unlink()
    return r"mlp: .*optuna\.journal: missing"


def other_settings(key: str, value: str, words: str) -> Callable[[Place], str]:
    def start_over(place: Place) -> str:
        folder = place.folder("mlp")
        storage = JournalStorage(JournalFileBackend(str(folder / "optuna.journal")))
        study = optuna.load_study(study_name=folder.name, storage=storage)
        facts = json.loads(study.user_attrs["facts"])
        assert key in facts
        study.set_user_attr("facts", json.dumps(facts | {key: value}))
        return f"mlp: its study was started over {words}"

    start_over.__name__ = f"other_{key}"
    return start_over


SPOILERS = [
    spoil_weights, spoil_predictions, lose_predictions, other_rows, spoil_journal, lose_journal,
    other_settings("data", "0123", "on other data"), other_settings("split", "halves", "on other data"),
    other_settings("metric", "rmse", "with metric rmse"),
]  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda spoil: spoil.__name__)
def test_what_cannot_be_trusted_takes_no_part(place: Place, spoil: Callable[[Place], str]) -> None:
    words = spoil(place)
    try:
        left_out = place.rebuild().left_out
    except NoEnsemble as alone:  # one of the two others
        left_out = alone.left_out
    assert len(left_out) == 1
    assert re.match(words, left_out[0])


def test_one_step_is_no_ensemble(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    before = place.versions()
    flags = ["ensemble", SEARCH, "--storage", str(place.storage), "--tracking-uri", place.uri, "--steps", "1"]
    assert command(*flags) == cli.EXIT_FAILED
    assert "(trial 0) alone scores best on the validation rows, among 3 trained models" in capsys.readouterr().out
    assert place.versions() == before


def cut(name: str) -> Callable[[Place], None]:
    return lambda place: (place.folder() / name).write_bytes((place.folder() / name).read_bytes()[:40])


def lose_all_models(place: Place) -> None:
    for model in MODELS_OF_IT:
        shutil.rmtree(place.folder(model) / "models")


REFUSED: list[tuple[str, str, Callable[[Place], object]]] = [
    ("diabetes-automl-s1", "unknown search 'diabetes-automl-s1'; did you mean 'diabetes-automl-s0'?", lambda place: 0),
    ("..", "unknown search '..'", lambda place: 0),
    ("diabetes-mlp-s0", "searched one model; expected a search over several", lambda place: 0),
    (SEARCH, "has not ended; its own command goes on", lambda place: (place.folder() / "automl.json").unlink()),
    ("diabetes", "has several searches: expected one of diabetes-automl-s0, diabetes-automl-s7",
     lambda place: shutil.copytree(place.folder(), place.folder().with_name("diabetes-automl-s7"))),
    ("diabetes", "--storage: expected at least one ended search", lambda place: shutil.rmtree(place.storage)),
    (SEARCH, "automl.json: damaged", cut("automl.json")),
    (SEARCH, "damaged", cut("validation_target.npy")),
    (SEARCH, "example.parquet: damaged", cut("example.parquet")),
    (SEARCH, "no validation_target.npy", lambda place: (place.folder() / "validation_target.npy").unlink()),
    (SEARCH, "no usable trained model: lightgbm: no trained model on disk; xgboost:", lose_all_models),
    (SEARCH, "no file", lambda place: Path(place.uri.removeprefix("sqlite:///")).unlink()),
    (SEARCH, "no run of it in sqlite", lambda place: (place.folder() / "id").write_text("0123456789ab")),
]  # fmt: skip


@pytest.mark.parametrize(("study", "words", "spoil"), REFUSED, ids=[row[1][:40] for row in REFUSED])
def test_bad_input_is_one_clear_line(
    place: Place, study: str, words: str, spoil: Callable[[Place], object], tmp_path: Path
) -> None:
    spoil(place)
    with pytest.raises(UserError) as caught:
        command("ensemble", study, "--storage", str(place.storage), "--tracking-uri", place.uri)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    if "no file" in words:
        assert not (tmp_path / "mlflow.db").exists(), "asking creates no store"
    else:
        assert len(place.versions()) == 4, "nothing was registered"


@pytest.mark.parametrize("name", ["automl", "mlp"])
def test_a_running_search_is_left_alone(place: Place, name: str) -> None:
    lock = FileLock(place.folder(name).with_name(f"diabetes-{name}-s0.lock"))
    with lock, pytest.raises(UserError, match=f"study diabetes-{name}-s0 is being run by another process"):
        place.rebuild()


def test_output_replaces_nothing_of_the_users(place: Place, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("x")
    for output, words in (
        (precious, "thesis.txt"),
        (tmp_path / "no" / "where", "where"),
        (precious / "thesis.txt", "thesis.txt"),
    ):
        with pytest.raises(UserError, match=f"--output: expected a new folder.*{words}"):
            command("ensemble", SEARCH, "--storage", str(place.storage), "--output", str(output))
    assert (precious / "thesis.txt").read_text() == "x"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "ACTION"),
        (["ensemle", "x"], "ensemle"),
        (["ensemble"], "STUDY"),
        (["ensemble", "x", "--top-k", "0"], "--top-k: expected a whole number >= 1"),
        (["ensemble", "x", "--steps", "many"], "--steps: expected a whole number >= 1"),
    ],
)
def test_bad_flags(flags: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        models.models_parser().parse_args(flags)


def test_exit_codes_of_the_process(tmp_path: Path) -> None:
    line = [sys.executable, str(ROOT / "jobs" / "models.py"), "ensemble", "x", "--storage", str(tmp_path / "none")]
    done = subprocess.run(line, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --storage: expected at least one ended search")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("flags", [["--help"], ["ensemble", "--help"]])
def test_help_imports_nothing_heavy(flags: list[str]) -> None:
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['jobs/models.py', *{flags!r}]\n"
        "try:\n    runpy.run_path('jobs/models.py', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "bad = {m.split('.')[0] for m in sys.modules} & "
        "{'torch', 'ray', 'mlflow', 'optuna', 'openml', 'sklearn', 'scipy'}\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "ensemble" in result.stdout


def test_nothing_that_a_search_left_is_unpickled(place: Place, tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    kinds = payloads(trap)
    for manifest in place.storage.rglob("predictor.json"):
        content = json.loads(manifest.read_text("utf-8"))
        for file, bad in zip(manifest.parent.rglob("*.*"), itertools.cycle(kinds.values()), strict=False):
            if file.is_file() and file != manifest:
                file.write_bytes(bad)
        folder, weights = manifest.parent / "model", manifest.parent / "weights.safetensors"
        content["weights_sha256"] = hash_folder(folder) if folder.exists() else hash_file(weights)
        manifest.write_text(json.dumps(content), "utf-8")
    flags = ["ensemble", "diabetes", "--storage", str(place.storage), "--tracking-uri", place.uri]
    line = [sys.executable, str(ROOT / "jobs" / "models.py"), *flags]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "no usable trained model" in done.stderr
    for predictions in place.storage.rglob("*.npy"):
        predictions.write_bytes(kinds["npy"])
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert not trap.exists()


def test_the_best_trial_of_a_search_is_replayed(searched: Place) -> None:
    """Case 50, for a search over several models: the run that is given is the search's own."""
    client = MlflowClient(tracking_uri=searched.uri, registry_uri=searched.uri)
    experiment = client.get_experiment_by_name("diabetes")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], "tags.`bishop.kind` = 'study'")
    search = next(run for run in runs if run.data.tags["bishop.study"] == SEARCH)
    scores = {run.data.tags["model"]: run.data.metrics["best_val_score"] for run in runs if run is not search}
    again = replay_run(search.info.run_id, searched.uri)
    assert again.same, again
    assert again.model == max(scores, key=scores.__getitem__)
    assert again.recorded == max(scores.values())
