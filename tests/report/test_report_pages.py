"""A real study's report in a real browser: every figure is drawn, nothing is complained about, nothing is loaded."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from bishop_ray.cli import ablate, report
from bishop_ray.config import StudyConfig, StudyResult
from bishop_ray.report.build import Written, make_report
from bishop_ray.report.collect import Selection
from bishop_ray.search.cluster import Cluster
from bishop_ray.search.evaluate import PREDICTIONS
from bishop_ray.search.search import run_study
from bishop_ray.search.study import read_study
from bishop_ray.tracking import runs_frame
from bishop_ray.tracking.client import open_client
from bishop_ray.tracking.query import Reader

pytest_plugins = ("study_fixtures",)
pytestmark = pytest.mark.slow

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="module")
def browser() -> str:
    """A Chromium on this machine."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), "")
    if not found:
        pytest.skip("needs a browser: apt-get install chromium")
    return found


def look(browser: str, page: Path, scratch: Path, *how: str) -> tuple[str, list[str]]:
    """What the browser made of a page, and the lines of its console."""
    command = [
        browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        f"--user-data-dir={scratch / 'profile'}", "--virtual-time-budget=60000", "--enable-logging=stderr",
        "--log-level=0", *how, page.as_uri(),
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, [line for line in ended.stderr.splitlines() if ":CONSOLE" in line]


def test_a_broken_page_is_seen(browser: str, tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text("<!doctype html><p id=a></p><script>document.getElementById('b').textContent = 1</script>")
    text, console = look(browser, page, tmp_path, "--dump-dom")
    assert "<p " in text
    assert len(console) == 1


def test_report_of_a_study(ray_here: Cluster, config: StudyConfig, browser: str, tmp_path: Path) -> None:
    result = run_study(replace(config, trials=4, eval_seeds=2))
    study = read_study(Path(config.storage) / "studies" / config.name)
    assert study.user_attrs["test_openings"] == 1
    selection = Selection((config.name,))
    written = make_report(selection, storage=Path(config.storage), uri=config.tracking_uri)
    check_numbers(config, result, written)
    names = check_drawn(browser, written, tmp_path)
    assert len(names) >= 7
    assert {name.split("-")[0] for name in names} >= {"best", "parallel", "alpha", "nonzero", "calibration",
                                                       "confusion"}  # fmt: skip
    pdf = tmp_path / "report.pdf"
    look(browser, written.folder / "report.html", tmp_path, f"--print-to-pdf={pdf}")
    assert len(re.findall(rb"/Type\s*/Page\b", pdf.read_bytes())) >= 3
    check_completion(config)


def check_drawn(browser: str, written: Written, tmp_path: Path) -> list[str]:
    """The names of the figures, each of which the browser has drawn, without a complaint."""
    text, console = look(browser, written.folder / "report.html", tmp_path, "--dump-dom")
    assert console == []
    assert 'data-drawn="all"' in text
    names = re.findall(r'<div id="([\w-]+)" class="plot', text)
    assert len(names) == written.figures
    for name in names:  # Plotly puts its drawing into the element
        element = text[text.index(f'<div id="{name}"') :].partition("<figcaption>")[0]
        assert 'class="main-svg"' in element, name
        assert re.search(r'class="(trace|bars|point|heatmaplayer|plot)\b', element), name
    return names


def test_report_of_ablations(ray_here: Cluster, config: StudyConfig, browser: str, tmp_path: Path) -> None:
    place = ["--storage", config.storage, "--tracking-uri", config.tracking_uri]
    tiny = ["--dataset", "iris", "--metric", "log_loss", "--space", config.space, "--max-epochs", "2", "--runs", "2"]
    for name, only in (("depth", ["--settings", "1", "3"]), ("convergence", [])):
        flags = [name, *tiny, *only, *place, "--output", str(tmp_path / f"{name}.csv")]
        assert ablate.run_ablate(ablate.ablate_parser().parse_args(flags)) == 0
        # The same runs from the file are no further runs.
        given = [tmp_path / f"{name}-runs.csv"]
        written = make_report(
            Selection(experiment=f"ablation-{name}"), storage=Path(config.storage), uri=config.tracking_uri,
            ablations=given,
        )  # fmt: skip
        told = pd.read_csv(tmp_path / f"{name}.csv", dtype={"setting": str}).set_index("setting")
        found = pd.read_csv(written.folder / "ablations.csv", dtype={"setting": str, "base": str}).set_index("setting")
        assert list(found.index) == list(told.index)
        assert set(found["base"]) == set(told.index[told["note"] == "base"])
        assert found["ours"].tolist() == pytest.approx(told["test"].tolist())
        assert found["±"].tolist() == pytest.approx(told["test_std"].tolist())
        assert found["difference"].tolist() == pytest.approx(told["difference"].tolist(), nan_ok=True)
        assert set(found["runs"]) == {2}
        assert f"\n{2 * len(found)} ablation runs" in (written.folder / "report.md").read_text("utf-8")
        names = check_drawn(browser, written, tmp_path)
    assert names == [f"ablation-convergence-{what}-iris" for what in
                     ("training-loss", "validation-loss", "validation-log-loss")]  # fmt: skip


def test_report_of_a_study_in_a_database(ray_here: Cluster, config: StudyConfig, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/studies.db"
    config = replace(config, study_db=url)
    result = run_study(config)
    place = ["--storage", config.storage, "--tracking-uri", config.tracking_uri]
    runs = runs_frame(config.tracking_uri, study=config.name)
    open_client(config.tracking_uri).delete_run(runs[runs.trial == 1].iloc[0]["run_id"])
    folder = Path(config.storage) / "reports" / config.name
    for flags, trials in ((["--study-db", url], 3), ([], 2)):
        assert report.run_report(report.report_parser().parse_args([config.name, *place, *flags])) == 0
        assert pd.read_csv(folder / "cost.csv").iloc[0]["trials"] == trials
        assert pd.read_csv(folder / "results.csv").iloc[0]["ours"] == pytest.approx(100 * result.test_mean)
    command = [sys.executable, str(Path(__file__).resolve().parents[2] / "jobs" / "report.py"), "nosuch", *place]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr == f"error: unknown study 'nosuch' (known: {config.name})\n"


def check_numbers(config: StudyConfig, result: StudyResult, written: Written) -> None:
    """The tables say what the study ended with."""
    row = pd.read_csv(written.folder / "results.csv").iloc[0]
    assert row["ours"] == pytest.approx(100 * result.test_mean)
    assert row["validation"] == pytest.approx(100 * result.val_score)
    assert row["linear"] == pytest.approx(100 * result.linear)
    assert row["constant"] == pytest.approx(100 * result.mean)
    assert row["trainings"] == 2
    cost = pd.read_csv(written.folder / "cost.csv").iloc[0]
    assert cost["trials"] == 4
    assert cost["peak memory MB"] > 50
    reader = Reader(config.tracking_uri)
    kept = reader.text(result.parent_run, PREDICTIONS)
    frame = pd.read_csv(pd.io.common.StringIO(kept))
    assert frame["part"].value_counts().to_dict() == {"validation": result.rows[1], "test": result.rows[2]}
    runs = runs_frame(config.tracking_uri, study=config.name)
    parent = runs[runs.kind == "study"].iloc[0]
    assert parent["metrics.test_score_mean"] == pytest.approx(result.test_mean)
    assert parent["metrics.test_score_constant"] == pytest.approx(result.mean)


def check_completion(config: StudyConfig) -> None:
    """A trial that MLflow does not have comes from the study on disk."""
    runs = runs_frame(config.tracking_uri, study=config.name)
    open_client(config.tracking_uri).delete_run(runs[runs.trial == 1].iloc[0]["run_id"])
    selection, storage = Selection((config.name,)), Path(config.storage)
    for place, trials in ((storage, 4), (storage / "elsewhere", 3)):
        written = make_report(selection, storage=place, uri=config.tracking_uri)
        assert pd.read_csv(written.folder / "cost.csv").iloc[0]["trials"] == trials
