"""``jobs/models.py explain``: the library's table printed and written, files read as predict.py does, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from fakes import make_table
from predictor_fakes import make_predictor

from bishop_ray.cli import models
from bishop_ray.data.schema import make_raw
from bishop_ray.data.table import TaskType
from bishop_ray.errors import UserError
from bishop_ray.predictor import Predictor
from bishop_ray.registry import register_best
from bishop_ray.registry.compare import score_file
from bishop_ray.tracking import StudyTracker

pytest_plugins = ("tracking_fixtures",)
RAW = make_table(TaskType.BINARY, rows=60, with_missing=True)
ROWS = make_table(TaskType.BINARY, rows=50, with_missing=True, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_predictor(RAW).save(tmp_path_factory.mktemp("saved") / "model")


def run(*words: object) -> int:
    return models.run_models(models.models_parser().parse_args(["explain", *map(str, words)]))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_it_prints_and_writes_what_the_predictor_says(
    folder: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / f"rows{suffix}", tmp_path / "table.csv"
    frame = ROWS.frame.assign(label=ROWS.target.mask(ROWS.target.index == 3), other="x")
    frame.to_csv(file, index=False) if suffix == ".csv" else frame.to_parquet(file)
    flags = ["--folder", "--target", "label", "--repeats", 3, "--seed", 2, "--metric", "accuracy"]
    assert run(folder, file, *flags, "--output", output) == 0
    known = ROWS.target.index != 3
    expected = Predictor.load(folder).explain(
        ROWS.frame[known], ROWS.target[known], repeats=3, seed=2, metric="accuracy"
    )
    table = pd.read_csv(output)
    assert list(table.columns) == ["feature", "importance", "sd", "attention", "inputs"]
    pd.testing.assert_frame_equal(table[["feature", "importance", "sd"]], expected.importances, rtol=1e-5, atol=1e-6)
    said = capsys.readouterr().out
    assert "49 of 49 rows, 3 exchanges of each column" in said
    assert "importance: mean loss of accuracy" in said
    assert all(name in said for name, _ in Predictor.load(folder).schema)


def test_labels_in_a_text_file_mean_those_of_training(tmp_path: Path) -> None:
    """The 1.0 and the true of a CSV are the 1 and the True of training."""
    for labels, written in (([0, 1], ["0.0", "1.0"]), ([False, True], ["false", "TRUE"])):
        raw = make_raw("t", RAW.frame.assign(y=pd.Series(labels * 30)), "y")
        saved = make_predictor(raw).save(tmp_path / "model")
        RAW.frame.assign(y=written * 30).to_csv(tmp_path / "rows.csv", index=False)
        assert run(saved, tmp_path / "rows.csv", "--folder", "--target", "y", "--repeats", 1) == 0


@pytest.mark.parametrize("task", list(TaskType))
def test_what_a_text_file_has_for_missing_is_no_target(task: TaskType, tmp_path: Path) -> None:
    """As training reads it, here and in a hold-out file."""
    raw = make_table(task, rows=60)
    predictor, target = make_predictor(raw), raw.target.astype(object)
    target[[3, 4, 5, 6]] = ["NA", "nan", None, " "]
    raw.frame.assign(y=target).to_csv(tmp_path / "rows.csv", index=False)
    assert len(score_file(predictor, tmp_path / "rows.csv")) == 56
    saved = predictor.save(tmp_path / "model")
    assert run(saved, tmp_path / "rows.csv", "--folder", "--target", "y", "--repeats", 1) == 0


@pytest.mark.slow
def test_a_registered_model_is_explained(
    uri: str, tracker_of: Callable[..., StudyTracker], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predictor = make_predictor(RAW)
    run_id = tracker_of(uri).parent_run_id()
    example = RAW.frame.head(2)
    register_best(predictor, "wine", alias="bishop", val_score=0.5, example=example, run_id=run_id, uri=uri)
    ROWS.frame.to_csv(tmp_path / "rows.csv", index=False)
    assert run("wine", tmp_path / "rows.csv", "--tracking-uri", uri, "--repeats", 1, "--max-rows", 20) == 0
    assert "20 of 50 rows" in capsys.readouterr().out


def test_mistakes_are_told_and_nothing_is_written(folder: Path, tmp_path: Path) -> None:
    file, output = tmp_path / "rows.csv", tmp_path / "out.csv"
    ROWS.frame.to_csv(file, index=False)
    for words, message in [
        ([file, "--target", "label"], r"--target: .*rows.csv: missing column 'label'"),
        ([file, "--metric", "auc"], "needs the rows' targets"),
        ([tmp_path / "none.csv"], "no such file"),
        ([file, "--output", tmp_path / "t.txt"], r"expected a \.csv file"),
        ([file, "--output", file], "another one than is read"),
    ]:
        flags = [] if "--output" in words else ["--output", output]
        with pytest.raises(UserError, match=message) as said:
            run(folder, *words, "--folder", *flags)
        assert "\n" not in str(said.value)
    ROWS.frame.assign(label=None).to_csv(file, index=False)
    with pytest.raises(UserError, match=r"rows.csv: expected rows with a value of the target 'label'; found none"):
        run(folder, file, "--folder", "--target", "label")
    ROWS.frame.head(0).to_csv(file, index=False)
    with pytest.raises(UserError, match=r"rows.csv: explain: expected rows"):
        run(folder, file, "--folder")
    ROWS.frame.drop(columns="num_1").to_csv(file, index=False)
    with pytest.raises(UserError, match="num_1"):
        run(folder, file, "--folder")
    assert not output.exists()
