"""One model with fixed settings: what may be set, what is trained once, what a mistake looks like."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pandas as pd
import pytest

from bishop_ray.cli import train, tune
from bishop_ray.config import StudyConfig
from bishop_ray.data.refs import embedded_ref
from bishop_ray.data.split import SplitProtocol
from bishop_ray.errors import TrainingFailed, UserError
from bishop_ray.models import not_installed
from bishop_ray.search import evaluate
from bishop_ray.search.cluster import Cluster
from bishop_ray.search.fixed import FixedConfig, run_fixed
from bishop_ray.search.parameters import fixed_params
from bishop_ray.search.study import read_study, study_folder
from bishop_ray.tracking import runs_frame
from bishop_ray.training import job

pytest_plugins = ["study_fixtures"]

ROOT = Path(__file__).resolve().parents[2]
TINY = ("d_model=16", "d_ff=16", "d_embedding=8", "stride=4", "n_heads=2", "n_pool=2", "n_decoded=4")


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BISHOP_RAY_HOME", str(tmp_path / "home"))
    for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS", "BISHOP_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_values_have_the_type_of_their_default() -> None:
    given = ["d_model=64", "train.lr=1e-3", "model.decoder=false", "dropout=0", "head_max_width=none", "compat=authors"]
    params = fixed_params("bishop", [*given, "batch_size=64", "train.optimizer=adamw"])
    assert params == {
        "model": {"d_model": 64, "decoder": False, "dropout": 0.0, "head_max_width": None, "compat": "authors"},
        "train": {"lr": 1e-3, "batch_size": 64, "optimizer": "adamw"},
    }
    assert isinstance(params["model"]["dropout"], float)
    assert fixed_params("mlp") == {"model": {}, "train": {}}


def test_a_file_and_then_set(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("model: {d_model: 32, n_heads: 2}\ntrain.lr: 0.01\n")
    assert fixed_params("bishop", ["d_model=64"], str(file)) == {
        "model": {"d_model": 64, "n_heads": 2},
        "train": {"lr": 0.01},
    }
    (tmp_path / "p.json").write_text(json.dumps({"n_heads": 8}))
    assert fixed_params("bishop", [], str(tmp_path / "p.json"))["model"] == {"n_heads": 8}


BAD_SETTINGS = [
    ("bishop", "d_modle=64", ["--set: unknown key of 'model' 'd_modle'", "did you mean 'd_model'"]),
    ("bishop", "train.lrr=1", ["unknown key of 'train' 'lrr'", "did you mean 'lr'"]),
    ("bishop", "modell.d_model=1", ["unknown section 'modell'", "did you mean 'model'"]),
    ("bishop", "d_model=1.5", ["--set: model.d_model must be of type int; found '1.5'"]),
    ("bishop", "dropout=lots", ["model.dropout must be a number; found 'lots'"]),
    ("bishop", "decoder=1", ["model.decoder must be true or false; found '1'"]),
    ("bishop", "train.lr=nan", ["train.lr must be finite"]),
    ("bishop", "train.lr=-1", ["--set: train: lr must be > 0; found -1.0"]),
    ("bishop", "n_heads=0", ["--set: model: n_heads"]),
    ("bishop", "max_epochs=3", ["train.max_epochs cannot be set here; --max-epochs sets it"]),
    ("bishop", "seed=3", ["train.seed cannot be set here; --seed sets it"]),
    ("bishop", "d_model", ["--set: expected KEY=VALUE", "'d_model'"]),
    ("random_forest", "train.lr=0.1", ["train.lr: random_forest is trained by its own library", "'model' only"]),
]


@pytest.mark.parametrize(("model", "text", "words"), BAD_SETTINGS, ids=[text for _, text, _ in BAD_SETTINGS])
def test_bad_settings_are_one_line(model: str, text: str, words: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        fixed_params(model, [text])
    assert "\n" not in str(refused.value)
    for word in words:
        assert word in str(refused.value), str(refused.value)


@pytest.mark.parametrize(
    ("content", "word"),
    [("[1, 2]", "expected names and values; found list"), ("a: [", "is no YAML or JSON"), ("model: {d: 1}", "'d'")],
)
def test_bad_files(tmp_path: Path, content: str, word: str) -> None:
    (tmp_path / "p.yaml").write_text(content)
    with pytest.raises(UserError, match=r"p\.yaml") as refused:
        fixed_params("bishop", [], str(tmp_path / "p.yaml"))
    assert word in str(refused.value)
    with pytest.raises(UserError, match=r"--params: cannot read .*No such file"):
        fixed_params("bishop", [], str(tmp_path / "none.yaml"))


BAD_FLAGS = [
    (["--dataset", "iris", "--model", "bishup"], ["unknown model 'bishup'", "did you mean 'bishop'"]),
    (["--dataset", "iris", "--model", "all"], ["--model: expected one model; found 'all'"]),
    (["--dataset", "iris", "--set", "d_modle=1"], ["unknown key of 'model' 'd_modle'"]),
    (["--dataset", "iris", "--seeds", "0"], ["--seeds", ">= 1"]),
    (["--dataset", "iris", "--metric", "r2"], ["r2", "multiclass"]),
    (["--dataset", "irs"], ["unknown dataset 'irs'", "did you mean 'iris'"]),
    (["--dataset", "shrutime"], ["shrutime.parquet", "--data-dir or BISHOP_DATA_DIR", "no folder named"]),
    (["--dataset", "adult", "--data-dir", "/nowhere"], ["--data-dir: expected a folder", "'/nowhere'"]),
    (["--model", "mlp"], ["expected one of --suite, --task, --table, --dataset"]),
    (["--dataset", "iris", "--trials", "3"], ["--trials"]),
    (["--dataset", "iris", "--output", "/nowhere/x.csv"], ["--output: expected a file in an existing folder"]),
]


@pytest.mark.parametrize(("flags", "words"), BAD_FLAGS, ids=[" ".join(flags) for flags, _ in BAD_FLAGS])
def test_bad_flags_are_one_line_and_write_nothing(tmp_path: Path, flags: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        train.run_train(train.train_parser().parse_args(flags))
    assert "\n" not in str(refused.value)
    for word in words:
        assert word in str(refused.value), str(refused.value)
    assert not (tmp_path / "home").exists()


def test_a_wrong_copy_is_refused(tmp_path: Path) -> None:
    pd.DataFrame({"Age": [1, 2], "Exited": [0, 1]}).to_csv(tmp_path / "shrutime.csv", index=False)
    flags = ["--dataset", "shrutime", "--data-dir", str(tmp_path), "--model", "mlp"]
    with pytest.raises(
        UserError, match=r"shrutime\.csv: expected 6 numerical, 4 categorical columns.*no 'CreditScore'"
    ):
        train.run_train(train.train_parser().parse_args(flags))
    assert not (tmp_path / "home").exists()


def fixed(config: StudyConfig, model: str, *given: str, **changes: object) -> FixedConfig:
    values = {f.name: getattr(config, f.name) for f in fields(config)} | {"model": model, "eval_seeds": 2} | changes
    return FixedConfig(**values, params=fixed_params(model, given))


def test_names_follow_from_the_settings() -> None:
    config = StudyConfig(embedded_ref("iris"), "bishop", "bishop", 3, 3, "", SplitProtocol((0.7, 0.2, 0.1)))
    one = fixed(config, "bishop", "d_model=16", "train.lr=0.01")
    assert one.name == fixed(config, "bishop", "train.lr=0.01", "d_model=16").name
    assert one.name.startswith("iris-bishop-fixed-")
    others = [
        fixed(config, "bishop", "d_model=32", "train.lr=0.01"),
        replace(one, max_epochs=7),
        replace(one, seed=1),
        replace(one, ref=embedded_ref("wine")),
    ]
    assert len({one.name, config.name, *(other.name for other in others)}) == 6


@pytest.mark.slow
def test_seeds_are_trained_once(ray_here: Cluster, config: StudyConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    openings: list[str] = []
    opened = evaluate.open_test

    def counted(study: StudyConfig) -> object:
        openings.append(study.name)
        return opened(study)

    monkeypatch.setattr(evaluate, "open_test", counted)
    forest = fixed(config, "random_forest", "n_trees=20")
    first = run_fixed(forest)
    assert [score.seed for score in first.seeds] == [1, 2]
    assert all(score.test is not None and score.test > 0.8 for score in first.seeds)
    assert first.summary("test")[0] == pytest.approx(sum(s.test or 0 for s in first.seeds) / 2)
    assert len(openings) == 1
    again = run_fixed(forest)
    assert again.reused
    assert again.seeds == first.seeds
    assert len(openings) == 1, "a finished command opens nothing"
    more = run_fixed(replace(forest, eval_seeds=3))
    assert [score.seed for score in more.seeds] == [1, 2, 3]
    assert more.seeds[:2] == first.seeds, "what is trained is kept"
    assert openings == [forest.name] * 2
    runs = runs_frame(config.tracking_uri, "iris")
    assert sorted(runs.kind) == ["study", "trial", "trial", "trial"]
    assert set(runs.status) == {"FINISHED"}
    parent = runs[runs.kind == "study"].iloc[0]
    assert parent["metrics.test_score_mean"] == pytest.approx(more.summary("test")[0])
    assert parent["tags.test_openings"] == "2"
    trials = runs[runs.kind == "trial"].sort_values("trial")
    assert list(trials["metrics.test_score"]) == [score.test for score in more.seeds]
    assert list(trials["params.train.seed"]) == ["1", "2", "3"]
    assert set(trials["params.model.n_trees"]) == {"20"}
    assert len(read_study(study_folder(forest)).trials) == 3
    with pytest.raises(UserError, match=r"split was .*--fresh"):
        run_fixed(replace(forest, split=replace(forest.split, fractions=(0.6, 0.2, 0.2))))


@pytest.mark.slow
def test_an_interrupted_command_goes_on(
    ray_here: Cluster, config: StudyConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = fixed(config, "bishop", *TINY, "train.lr=0.01")

    def interrupted(study: StudyConfig) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "open_test", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_fixed(network)
    folders = sorted((study_folder(network) / "final").iterdir())
    before = {folder: (folder / job.PREDICTOR).stat().st_mtime_ns for folder in folders}
    result = run_fixed(network)
    assert len(before) == 2
    assert {folder: (folder / job.PREDICTOR).stat().st_mtime_ns for folder in folders} == before, "none trains twice"
    assert [score.epochs for score in result.seeds] == [3, 3]
    assert result.seeds[0].validation != result.seeds[1].validation, "the seed matters"
    runs = runs_frame(config.tracking_uri, "iris")
    assert sorted(runs.kind) == ["study", "trial", "trial"], "no run is written twice"
    assert set(runs.status) == {"FINISHED"}


@pytest.mark.slow
def test_trainings_that_diverge_are_failed(ray_here: Cluster, config: StudyConfig) -> None:
    diverging = fixed(config, "mlp", "train.lr=1e30", "train.clip_norm=0")
    with pytest.raises(TrainingFailed, match=r"^no seed could be trained: epoch 1: non-finite [^\n]*$"):
        run_fixed(diverging)
    runs = runs_frame(config.tracking_uri, "iris")
    assert list(runs[runs.kind == "trial"].status) == ["FAILED", "FAILED"]


@pytest.mark.slow
def test_one_seed_that_fails_is_said(
    ray_here: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = evaluate._side_by_side

    def second_fails(*args: object) -> list[object]:
        return [trained(*args)[0], TrainingFailed("epoch 1: non-finite loss")]

    monkeypatch.setattr(evaluate, "_side_by_side", second_fails)
    monkeypatch.setattr(tune, "connect_cluster", lambda address: ray_here)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    flags = ["--dataset", "iris", "--model", "random_forest", "--seeds", "2", "--tracking-uri", uri]
    args = train.train_parser().parse_args([*flags, "--output", str(tmp_path / "scores.csv")])
    assert train.run_train(args) == 1
    out = capsys.readouterr().out
    assert "failed: epoch 1: non-finite loss" in out
    rows = pd.read_csv(tmp_path / "scores.csv")
    assert list(rows["test"].isna()) == [False, True]
    assert f"mean  {rows['validation'][0]:.4f}" in out, "over the seeds that were trained"
    runs = runs_frame(uri, "iris")
    assert sorted(runs[runs.kind == "trial"].status) == ["FAILED", "FINISHED"]
    assert train.run_train(args) == 1, "what failed is not forgotten"
    assert "finished before" in capsys.readouterr().out


@pytest.mark.slow
def test_the_job(
    ray_here: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "random_forest" if not_installed("lightgbm") else "lightgbm"
    output = tmp_path / "scores.csv"
    flags = ["--dataset", "iris", "wine", "--model", model, "--seeds", "2", "--output", str(output)]
    command = [sys.executable, str(ROOT / "jobs" / "train.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    rows = pd.read_csv(output)
    assert list(rows["dataset"]) == ["iris", "iris", "wine", "wine"]
    assert list(rows.columns) == list(train.COLUMNS)
    assert rows["test"].min() > 0.8
    assert f"{rows['test'][2:].mean():.4f}" in done.stdout
    monkeypatch.setattr(tune, "connect_cluster", lambda address: ray_here)
    assert train.run_train(train.train_parser().parse_args(flags)) == 0
    assert capsys.readouterr().out.count("finished before, nothing was trained") == 2
    assert pd.read_csv(output).equals(rows)
