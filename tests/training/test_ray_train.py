"""An early-stopped Ray Train trial gives back its CPUs, whatever Ray's dashboard does."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from bishop_ray.config import Resources, StudyConfig
from bishop_ray.data.refs import embedded_ref
from bishop_ray.data.split import SplitProtocol
from bishop_ray.search.callback import Progress
from bishop_ray.search.cluster import QUIET, _own_token
from bishop_ray.search.search import run_study
from bishop_ray.tracking import check_tracking

pytestmark = pytest.mark.faults

SPACE = (
    Path(__file__)
    .parents[1]
    .joinpath("tiny_space.yaml")
    .read_text("utf-8")
    .split("first:")[0]
    .replace("lr: {float: [1.0e-3, 1.0e-2], log: true}", "lr: {choice: [5.0e-3, 1.0e-7]}")
    + "first:\n  - {model: {d_model: 16, dropout: 0.0}, train: {lr: 5.0e-3}}\n"
    + "  - {model: {d_model: 8, dropout: 0.0}, train: {lr: 1.0e-7}}\n"
)


@pytest.fixture(params=["no dashboard", "dashboard", "dashboard and a stale cluster file"])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="b", dir="/tmp")  # sockets lie below it, and their paths may have 107 bytes
    monkeypatch.setenv("RAY_TMPDIR", folder)
    for name, value in QUIET.items():
        monkeypatch.setenv(name, os.environ.get(name, value))
    _own_token()  # Ray would write one to the home folder
    options = {"include_dashboard": request.param != "no dashboard", "_temp_dir": folder, "num_cpus": 2}
    ray.init(address="local", log_to_driver=False, **options)
    if "stale" in request.param:  # what a killed driver leaves; Ray's State API then asks an address where nobody is
        Path(folder, "ray_current_cluster").write_text("127.0.0.1:1")
    yield request.param
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def test_an_early_stopped_worker_group_frees_its_cpus(cluster: str, tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(SPACE)
    config = StudyConfig(
        embedded_ref("breast_cancer"), "bishop", str(tmp_path / "space.yaml"), 3, 30, "auc",
        SplitProtocol((0.7, 0.2, 0.1)), eval_seeds=1, trainer="ray", resources=Resources(cpus=2.0), max_concurrent=1,
        storage=str(tmp_path / "store"), tracking_uri=check_tracking(f"sqlite:///{tmp_path}/mlflow.db"),
    )  # fmt: skip
    free: list[float] = []

    def listener(progress: Progress) -> None:
        if " pruned (early-stopped)" not in progress.last:
            return
        began = time.monotonic()
        # The trial itself, which holds next to nothing, ends after this call.
        while ray.available_resources().get("CPU", 0.0) < 1.9 and time.monotonic() < began + 30:
            time.sleep(0.1)
        free.append(time.monotonic() - began)
        signal.raise_signal(signal.SIGINT)  # all that was to be seen

    with pytest.raises(KeyboardInterrupt):
        run_study(config, listener)
    assert free, "no trial was stopped early"
    assert free[0] < 10, f"{cluster}: CPUs were held for {free[0]:.0f} s"
