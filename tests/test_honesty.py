"""What a search can see: neither test rows nor labels through the order of rows; the test split is opened once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import cheating_model
import numpy as np
import pandas as pd
import pytest
from fault_tools import ray_with

from bishop_ray.config import StudyConfig
from bishop_ray.data.refs import file_ref
from bishop_ray.data.split import SplitProtocol, split_indices
from bishop_ray.data.table import RawDataset, TaskType
from bishop_ray.search.dataset import load, open_test
from bishop_ray.search.search import run_study
from bishop_ray.search.study import read_study, study_folder
from bishop_ray.tracking import check_tracking, runs_frame


def sorted_table(rows: int) -> pd.DataFrame:
    """Noise, sorted by its label: only the order of the rows tells the classes apart."""
    noise = np.random.default_rng(0).normal(size=(rows, 2))
    return pd.DataFrame(
        {
            "a": noise[:, 0],
            "b": noise[:, 1],
            "row": cheating_model.MARK + np.arange(rows),
            "y": np.arange(rows) // (rows // 2),
        }
    )


@pytest.mark.parametrize("kind", [TaskType.BINARY, TaskType.REGRESSION])
def test_the_order_of_scored_rows_says_nothing(kind: TaskType) -> None:
    """As over 40 seeds the correlation of place and label has the spread of independent draws, not more."""
    rows = 1000
    frame = sorted_table(rows)
    raw = RawDataset("t", frame[["a"]], frame["y"] if kind is TaskType.BINARY else frame["row"], kind, ())
    scaled = []
    for seed in range(40):
        split = split_indices(raw, seed)
        assert (np.diff(split.train) > 0).all()
        for part in (split.validation, split.test):
            labels = raw.target.to_numpy()[part]
            scaled.append(np.corrcoef(np.arange(len(part)), labels)[0, 1] * np.sqrt(len(part)))
    assert abs(np.mean(scaled)) < 0.4
    assert 0.75 < np.std(scaled) < 1.25


@pytest.fixture
def planted_here() -> Iterator[None]:
    with ray_with(cheating_model):
        yield


@pytest.mark.slow
def test_a_model_that_cheats_gains_nothing(planted_here: None, tmp_path: Path) -> None:
    """It reads the order of rows, and looks for the test rows in the memory of its trials."""
    table = tmp_path / "sorted.csv"
    sorted_table(3000).to_csv(table, index=False)
    space, found = tmp_path / "space.yaml", tmp_path / "found"
    found.mkdir()
    space.write_text(f"# a cheat\nmodel:\n  place: {found}\n  shift: {{float: [0.0, 1.0]}}\n")
    config = StudyConfig(
        file_ref(str(table), "y"), cheating_model.NAME, str(space), 3, 1, "auc", SplitProtocol((0.6, 0.2, 0.2)),
        scheduler="none", eval_seeds=2, storage=str(tmp_path / "store"),
        tracking_uri=check_tracking(f"sqlite:///{tmp_path}/mlflow.db"),
    )  # fmt: skip
    result = run_study(config)
    assert abs(result.val_score - 0.5) < 0.1
    assert abs(result.test_mean - 0.5) < 0.1
    loaded = load(config)
    hidden = {int(row - cheating_model.MARK) for row in open_test(replace(config, metric="auc")).frame["row"]}
    given = {int(row - cheating_model.MARK) for part in (loaded.train, loaded.validation) for row in part.frame["row"]}
    assert len(hidden) == 600
    notes = [set(json.loads(note.read_text())) for note in found.iterdir()]
    assert len(notes) == 5, "three trials and two trainings of the final evaluation"
    for note in notes:
        assert note >= given, "it does find what it was given"
        assert not note & hidden
    assert read_study(study_folder(config)).user_attrs["test_openings"] == 1
    parent = runs_frame(config.tracking_uri, config.ref.experiment).query("trial == -1")
    assert set(parent["tags.test_openings"]) == {"1"}
