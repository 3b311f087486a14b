"""Private MLflow stores for tests; a pytest plugin named by the modules that use it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bishop_ray.tracking import StudyTracker

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def new_database(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, str]]]:
    """A database that two processes created at once, and what each ended with and printed."""
    folder = tmp_path_factory.mktemp("database")
    path = folder / "deep" / "mlflow.db"
    code = f"from bishop_ray.tracking import check_tracking; check_tracking('sqlite:///{path}')"
    started = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=240)[0].decode() for process in started]
    return path, [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


@pytest.fixture
def uri(new_database: tuple[Path, object], tmp_path: Path) -> str:
    """A fresh SQLite store: a copy, because MLflow takes seconds to make one."""
    shutil.copy(new_database[0], tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def tracker_of(tmp_path: Path) -> Iterator[Callable[..., StudyTracker]]:
    """Makes trackers and closes them at the end."""
    made: list[StudyTracker] = []

    def make(uri: str, name: str = "CC-wine-bishop-s0", **more: object) -> StudyTracker:
        made.append(StudyTracker(uri, "CC", name, folder=tmp_path / "study", **more))
        return made[-1]

    yield make
    for tracker in made:
        tracker.close(timeout=20)
