"""What a search says of its table before it begins, and where that is kept."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bishop_ray.config import StudyConfig
from bishop_ray.data.refs import file_ref
from bishop_ray.search.cluster import Cluster
from bishop_ray.search.dataset import FINDINGS
from bishop_ray.search.search import run_automl, run_study
from bishop_ray.tracking import runs_frame

pytest_plugins = ("study_fixtures",)
pytestmark = pytest.mark.slow


@pytest.fixture
def leaking(config: StudyConfig, tmp_path: Path) -> StudyConfig:
    """A study of a table with its target written into a second column."""
    rng = np.random.default_rng(0)
    label = rng.choice(["no", "yes"], 300)
    frame = pd.DataFrame({"size": rng.normal(size=300), "answer": np.where(label == "yes", "J", "N"), "label": label})
    frame.to_csv(tmp_path / "table.csv", index=False)
    return replace(config, ref=file_ref(tmp_path / "table.csv", "label"), trials=1, max_epochs=1)


def tags(config: StudyConfig) -> dict[int, object]:
    """The tag of each run, by trial; the study's own is -1."""
    frame = runs_frame(config.tracking_uri, config.ref.experiment)
    column = f"tags.{FINDINGS}"
    return dict(zip(frame.trial, frame[column] if column in frame else [None] * len(frame), strict=True))


def test_a_leak_is_told_and_kept_with_the_study_alone(
    ray_here: Cluster, leaking: StudyConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="bishop_ray"):
        run_study(leaking)
    assert "answer" in caplog.text
    found = tags(leaking)
    (finding,) = [f for f in json.loads(str(found[-1])) if f["kind"] == "leak"]
    assert "answer" in finding["column"]
    assert pd.isna(found[0])
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="bishop_ray"):
        run_study(replace(leaking, trials=2))  # it goes on: it was told
    assert "answer" not in caplog.text
    assert tags(leaking)[-1] == found[-1]


def test_nobody_looks_where_nobody_shall(
    ray_here: Cluster, leaking: StudyConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="bishop_ray"):
        run_study(replace(leaking, doctor=False))
    assert "answer" not in caplog.text
    assert all(pd.isna(tag) for tag in tags(leaking).values())


def test_a_search_over_several_models_looks_once(
    ray_here: Cluster, leaking: StudyConfig, caplog: pytest.LogCaptureFixture
) -> None:
    group = [
        replace(leaking, model=model, space=model, trials=2, max_epochs=epochs)
        for model, epochs in (("lightgbm", 10), ("random_forest", 1))
    ]
    with caplog.at_level(logging.WARNING, logger="bishop_ray"):
        run_automl(group, {"cpu": 1}, lambda study, progress: None, 0.0, None)
    assert caplog.text.count("answer") == 1
    frame = runs_frame(leaking.tracking_uri, leaking.ref.experiment)
    kept = frame[f"tags.{FINDINGS}"].dropna()
    assert len(kept) == 1
    assert "leak" in kept.iloc[0]
