"""``jobs/models.py replay``: trials of real studies come out again, and what has changed is told."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from mlflow.tracking import MlflowClient

from bishop_ray.cli import models
from bishop_ray.config import Resources, StudyConfig
from bishop_ray.data.refs import embedded_ref, file_ref
from bishop_ray.data.split import SplitProtocol
from bishop_ray.errors import UserError
from bishop_ray.search.cluster import Cluster
from bishop_ray.search.dataset import load, prepare
from bishop_ray.search.fixed import FixedConfig, run_fixed
from bishop_ray.search.replay import Replayed, replay_run, train_again, untold
from bishop_ray.search.search import run_study
from bishop_ray.search.study import RECORD, config_text, read_config
from bishop_ray.tracking.query import RunRecord
from bishop_ray.training.job import TrialSettings, train_here

pytest_plugins = ["study_fixtures", "tracking_fixtures"]
ROOT = Path(__file__).resolve().parents[2]

BISHOP = (Path(__file__).parents[1].joinpath("tiny_space.yaml")).read_text("utf-8").partition("first:")[0]
SPACES = {
    "bishop": f"{BISHOP}first:\n"
    "  - {model: {d_model: 16, dropout: 0.1}, train: {lr: 5.0e-3}}\n"
    "  - {model: {d_model: 8, dropout: 0.0}, train: {lr: 6.0e-3}}\n"
    "  - {model: {d_model: 8, dropout: 0.2}, train: {lr: 1.0e-3}}\n",
    "mlp": "model: {n_blocks: 2, d_block: 16, dropout: 0.1}\n"
    "train: {lr: {choice: [0.01, 0.02, 0.00001]}, batch_size: 32}\n"
    "first: [{train: {lr: 0.01}}, {train: {lr: 0.02}}, {train: {lr: 0.00001}}, {train: {lr: 0.00001}}]\n",
    "xgboost": "model: {n_rounds: 60, subsample: 0.7, learning_rate: {choice: [0.3, 0.2, 0.001]}}\n"
    "first: [{model: {learning_rate: 0.3}}, {model: {learning_rate: 0.2}}, {model: {learning_rate: 0.001}}]\n",
}
EPOCHS = {"bishop": 6, "mlp": 9, "xgboost": 30}  # XGBoost reports 20 times in 60 rounds


@dataclass(frozen=True)
class Kept:
    """A study in MLflow: its own run, and the runs of its trials by status."""

    uri: str
    table: Path
    parent: str
    trials: dict[str, list[str]]


def table(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, 4))
    frame = pd.DataFrame(x, columns=list("abcd")).assign(kind=rng.choice(["u", "v", None], 160))
    frame["price"] = x @ [1.0, -2.0, 0.5, 0.0] + (frame["kind"] == "u") + rng.normal(scale=0.3, size=160)
    folder.mkdir(parents=True)
    frame.to_csv(folder / "prices.csv", index=False)
    return folder / "prices.csv"


def study_of(model: str, folder: Path = Path("nowhere"), **more: Any) -> StudyConfig:
    return StudyConfig(
        ref=more.pop("ref", embedded_ref("iris")), model=model, space=str(folder / "space.yaml"), trials=4,
        max_epochs=EPOCHS[model], metric="", split=SplitProtocol((0.7, 0.2, 0.1)), eval_seeds=1,
        storage=str(folder / "store"), tracking_uri=f"sqlite:///{folder}/mlflow.db", **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def studies(
    tmp_path_factory: pytest.TempPathFactory, ray_here: Cluster, new_database: tuple[Path, object]
) -> dict[str, Kept]:
    found = {}
    for model in SPACES:
        folder = tmp_path_factory.mktemp("replay") / model
        config = study_of(model, folder, ref=file_ref(table(folder), "price"))
        Path(config.space).write_text(SPACES[model])
        shutil.copy(new_database[0], folder / "mlflow.db")
        parent = run_study(config).parent_run
        runs = MlflowClient(config.tracking_uri).search_runs(["1"], "tags.`bishop.kind` = 'trial'")
        trials: dict[str, list[str]] = {}
        for run in sorted(runs, key=lambda run: int(run.data.tags["bishop.trial"])):
            trials.setdefault(run.info.status, []).append(run.info.run_id)
        found[model] = Kept(config.tracking_uri, folder / "prices.csv", parent, trials)
    return found


def command(*flags: str) -> int:
    return models.run_models(models.models_parser().parse_args(["replay", *flags]))


@pytest.mark.slow
@pytest.mark.parametrize("model", SPACES)
def test_trials_of_a_study_come_out_again(studies: dict[str, Kept], model: str) -> None:
    """Case 50: the best one through its study's run, one that ended by itself, one that was stopped early."""
    kept = studies[model]
    recorded = []
    for run_id in (kept.parent, kept.trials["FINISHED"][-1], kept.trials["KILLED"][0]):
        again = replay_run(run_id, kept.uri)
        assert again.same, again
        assert (again.problem, again.untold, again.differs) == ("", "", ())
        recorded.append(again.recorded)
    metrics = MlflowClient(kept.uri).get_run(kept.trials["KILLED"][0]).data.metrics
    assert again.epochs == metrics["epochs"] < min(EPOCHS[model], 20)
    assert recorded[0] >= recorded[1] > recorded[2] == metrics["best_val_score"]


@pytest.mark.slow
def test_the_command_and_what_has_changed(studies: dict[str, Kept], tmp_path: Path) -> None:
    kept = studies["xgboost"]
    run_id, client = kept.trials["KILLED"][0], MlflowClient(kept.uri)
    line = [sys.executable, str(ROOT / "jobs" / "models.py"), "replay", run_id, "--tracking-uri", kept.uri]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(
        r"prices-xgboost-s0 trial \d+: validation r2 \S+ after \d+ epochs, and .*: difference \S+\n", done.stdout
    )

    moved = tmp_path / "moved.csv"
    moved.write_bytes(kept.table.read_bytes())
    kept.table.rename(kept.table.with_suffix(".gone"))
    try:
        with pytest.raises(UserError, match=r"prices\.csv: cannot be read: No such file"):
            replay_run(run_id, kept.uri)
        assert replay_run(run_id, kept.uri, str(moved)).same
        frame = pd.read_csv(moved)
        frame.loc[3, "a"] += 1
        frame.to_csv(moved, index=False)
        with pytest.raises(UserError, match=r"moved\.csv: expected the rows of study prices-xgboost-s0 \(fingerprint"):
            replay_run(run_id, kept.uri, str(moved))
    finally:
        kept.table.with_suffix(".gone").rename(kept.table)

    # What MLflow keeps is edited by hand: another score, another library, a GPU.
    score = client.get_run(run_id).data.metrics["best_val_score"]
    client.log_metric(run_id, "best_val_score", score + 1e-5, step=10**6)
    client.set_tag(kept.parent, "version.numpy", "1.0")
    again = replay_run(run_id, kept.uri)
    assert not again.same
    assert again.found == pytest.approx(score, abs=1e-6)
    assert again.difference == pytest.approx(1e-5, abs=1e-6)
    assert again.differs == (f"numpy 1.0, now {np.__version__}",)


@pytest.mark.slow
def test_a_training_with_fixed_settings_is_replayed_by_its_seed(uri: str, tmp_path: Path, ray_here: Cluster) -> None:
    base = study_of("mlp", tmp_path, ref=embedded_ref("diabetes"))
    settings = {"model": {"n_blocks": 1, "d_block": 16}, "train": {"lr": 1e-2}}
    values = {field.name: getattr(base, field.name) for field in fields(StudyConfig)} | {"eval_seeds": 2}
    assert base.tracking_uri == uri
    result = run_fixed(FixedConfig(**values, params=settings))
    runs = MlflowClient(base.tracking_uri).search_runs(["1"], "tags.`bishop.kind` = 'trial'")
    by_seed = {run.data.params["train.seed"]: run.info.run_id for run in runs}
    for score in result.seeds:
        again = replay_run(by_seed[str(score.seed)], base.tracking_uri)
        assert again.same, again
        assert again.recorded == score.validation
        assert again.study == Path(result.folder).name


@pytest.mark.parametrize("stopped", [1, 3, 8])
@pytest.mark.parametrize("model", ["xgboost", "mlp"])
def test_a_training_that_a_time_limit_ended_is_ended_there_again(model: str, stopped: int, tmp_path: Path) -> None:
    """A library that is asked to stop reports once more, with the rounds it has by then."""
    config = study_of(model)
    data = prepare(load(replace(config, ref=embedded_ref("diabetes"), metric="r2"))).data
    params = {"xgboost": {"n_rounds": 60, "learning_rate": 0.1}, "mlp": {"n_blocks": 1, "d_block": 16}}[model]
    settings = TrialSettings(model, "r2", 9, 3, Resources(), "inprocess", "", None)
    job = settings.trial({"model": params, "train": {}})
    reports: list[Any] = []

    def note(report: Any) -> bool:
        reports.append(report)
        return len(reports) >= stopped

    train_here(job, data, tmp_path, note)
    last = reports[-1]
    assert last.epoch == stopped + (model == "xgboost")
    assert train_again(job, data, last.epoch, stopped) == (last.best_val_score, "")
    found, problem = train_again(job, data, 99, 99)
    assert found is None
    assert re.fullmatch(r"the training ended by itself after \d+ reports instead of 99", problem)


def test_settings_survive_the_way_through_text() -> None:
    config = replace(
        study_of("mlp"), split=SplitProtocol((0.5, 0.3, 0.2), 100), tracking_uri="http://user:word@host",
        study_db="postgresql://user:word@host", resources=Resources(2, 0.5), precision="bf16",
    )  # fmt: skip
    text = config_text(config)
    assert "word" not in text
    assert read_config(text) == replace(config, storage="", tracking_uri="", study_db="")
    with pytest.raises(UserError, match=f"tag {RECORD}: written by a newer version: this one knows no 'zeal'"):
        read_config(text.replace('"model"', '"zeal": 1, "model"', 1))
    for damaged in ("", "[]", "1", text[:-5], '{"ref": {}}', "null"):
        with pytest.raises(UserError, match=f"tag {RECORD}"):
            read_config(damaged)


def run_of(client: MlflowClient, **tags: str) -> str:
    run_id: str = client.create_run("0", tags={f"bishop.{key}": value for key, value in tags.items()}).info.run_id
    return run_id


def test_runs_that_cannot_be_repeated_are_one_line(uri: str, tmp_path: Path) -> None:
    client = MlflowClient(uri)
    deleted = run_of(client, kind="trial", study_id="gone")
    client.delete_run(deleted)
    words = {
        "no-such-run": "expected the id of a run in sqlite:.*found 'no-such-run'",
        "../x": "found '../x'",
        deleted: "which was deleted",
        run_of(client): "found one that this package did not write",
        run_of(client, kind="report"): "found one of kind 'report'",
        run_of(client, kind="trial", study_id="1"): "expected the run of its study beside it",
        run_of(client, kind="study", study_id="2"): "expected a study with a scored trial",
    }
    client.log_metric(run_of(client, kind="trial", study_id="3"), "best_val_score", 0.5)
    words[run_of(client, kind="study", study_id="3")] = "expected tag bishop.config .* an older version"
    for run_id, expected in words.items():
        with pytest.raises(UserError, match=expected) as error:
            command(run_id, "--tracking-uri", uri)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"found no file .*other\.db"):
        command("1", "--tracking-uri", f"sqlite:///{tmp_path}/other.db")
    assert not (tmp_path / "other.db").exists()


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (
            {"found": -0.5 - 9e-7},
            ["s trial 3: validation rmse 0.5 after 4 epochs, and 0.5000009 again: difference 9.0e-07"],
        ),
        (
            {"found": -0.25},
            [
                "s trial 3: recorded validation rmse 0.5 .*; 0.25 now: difference 2.5e-01, more",
                "differs: nothing that was",
            ],
        ),
        (
            {"found": None, "problem": "it diverged", "untold": "it was trained on a GPU", "differs": ("a 1, now 2",)},
            ["not so again: it diverged", "limit of 1e-06 holds for one CPU .*: it was trained on a GPU", "a 1, now 2"],
        ),
    ],
)
def test_what_is_said(change: dict[str, Any], lines: list[str]) -> None:
    base = Replayed("s", 3, "mlp", "rmse", 4, -0.5, -0.5, "", "", ())
    said = models.lines(replace(base, **change))
    assert len(said) == len(lines)
    for line, expected in zip(said, lines, strict=True):
        assert re.search(expected, line), line


def test_why_the_limit_does_not_hold() -> None:
    config = read_config(config_text(study_of("mlp")))
    run = RunRecord("1", "e", "trial", "FINISHED", 0, 0, {}, {}, {})
    assert untold(config, run) == ""
    for resources, metrics, words in (
        (Resources(1, 0.5), {}, "on a GPU"),
        (Resources(), {"peak_gpu_memory_mb": 10.0}, "on a GPU"),
        (Resources(workers=2), {}, "by 2 workers"),
        (Resources(4), {}, "with 4 threads"),
    ):
        assert words in untold(replace(config, resources=resources), replace(run, metrics=metrics))
