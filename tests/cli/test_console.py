"""What a person sees while a study runs."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bishop_ray.cli.console import LiveScreen, PlainScreen, announce, conclude, time_left
from bishop_ray.config import StudyConfig, StudyResult
from bishop_ray.data.refs import embedded_ref
from bishop_ray.data.split import DATASETS_I
from bishop_ray.search.callback import Progress
from bishop_ray.search.leaderboard import clock


@pytest.fixture
def config() -> StudyConfig:
    ref = embedded_ref("iris")
    return StudyConfig(
        ref=ref, model="bishop", space="bishop_small", trials=8, max_epochs=30, metric="", split=DATASETS_I
    )


def progress(last: str = "trial 1 epoch 3: 0.9000") -> Progress:
    return Progress(8, "auc", Counter(running=2, complete=1, pruned=2, failed=1), 0.91234, 9, last)


def test_plain_lines_show_ends_at_once_and_epochs_now_and_then(
    config: StudyConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    with PlainScreen(studies=1, deadline=0.0, every=1000) as screen:
        for event in ("trial 1 started", "trial 1 epoch 1: 0.5", "trial 1 epoch 2: 0.6", "trial 1 complete (patience)"):
            screen(config, progress(event))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" (4/8")[0] for line in lines] == [
        "iris: trial 1 started",
        "iris: trial 1 epoch 1: 0.5",
        "iris: trial 1 complete (patience)",
    ]
    assert all("4/8 trials, best 0.9123" in line for line in lines)


def test_splits_are_told_apart_where_several_run(config: StudyConfig, capsys: pytest.CaptureFixture[str]) -> None:
    splits = [config, replace(config, seed=1)]
    plain = PlainScreen(studies=1, deadline=0.0, several_models=True, several_splits=True)
    live = LiveScreen(studies=2, deadline=0.0, several_splits=True)
    for split in splits:
        plain(split, progress("trial 0 started"))
        live(split, progress())
    assert [line.split(": ")[0] for line in capsys.readouterr().out.splitlines()] == [
        "iris bishop split 0",
        "iris bishop split 1",
    ]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(live._render())
    live._live.stop()
    text = console.export_text()
    assert "study 1 of 2" in text, "two splits of one dataset"
    assert "iris split 0" in text
    assert "iris split 1" in text


def test_live_table_shows_states_best_and_time_left(config: StudyConfig) -> None:
    screen = LiveScreen(studies=2, deadline=0.0)
    screen(config, progress())
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(screen._render())
    text = console.export_text()
    for words in ("study 1 of 2", "iris", "4/8", "0.9123 auc", "trial 1 epoch 3: 0.9000", "early", "failed", "left"):
        assert words in text
    screen._live.stop()


def test_time_left() -> None:
    assert time_left(progress(), 40.0) == "~40s"
    assert time_left(Progress(8, "auc"), 40.0) == ""


def test_announcement_says_when_the_space_is_the_small_one(
    config: StudyConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    announce([[config]], {}, own_space=False)
    announce([[config]], {}, own_space=True)
    lines = capsys.readouterr().out.splitlines()
    assert "no GPU: the small space" in lines[0]
    assert "no GPU" not in lines[1]


def test_clock() -> None:
    assert [clock(s) for s in (5.9, 75, 3700)] == ["5s", "1m15s", "1h01m"]


def test_what_becomes_of_a_registered_version_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(champion: bool, verdict: str) -> str:
        result = StudyResult(
            "wine", "mlp", "auc", {"complete": 1}, 0, 0.9, 0.8, 0.0, [0.8], 0.7, 0.5, "wine", "3", 1.0, [7, 2, 1], {},
            "run", champion, verdict,
        )  # fmt: skip
        conclude([result], [], [], tmp_path / "board.csv", "", "http://127.0.0.1:5000")
        return capsys.readouterr().out

    assert "wine (version 3, alias mlp; also champion)" in told(True, "yes: better")
    assert "stays champion: 0.9 against 0.91 of version 1)" in told(False, "no: 0.9 against 0.91 of version 1")
    assert "alias mlp; another version is champion by now)" in told(False, "yes: better")
    text = told(False, "refused: one row: other predictions")
    assert "no alias: wine (mlp), version 3: refused: one row: other predictions" in text
    assert "wine (version 3, no alias; models.py promote checks it again)" in text
