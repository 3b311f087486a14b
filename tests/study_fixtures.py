"""Ray in this process and a study of seconds; a pytest plugin named by the modules that use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bishop_ray.config import StudyConfig
from bishop_ray.data.refs import embedded_ref
from bishop_ray.data.split import SplitProtocol
from bishop_ray.search.cluster import Cluster, connect
from bishop_ray.tracking import check_tracking

SPACE = Path(__file__).with_name("tiny_space.yaml").read_text("utf-8")


@pytest.fixture(scope="module")
def ray_here() -> Iterator[Cluster]:
    import ray

    yield connect()
    ray.shutdown()


@pytest.fixture
def config(tmp_path: Path) -> StudyConfig:
    space = tmp_path / "tiny.yaml"
    space.write_text(SPACE)
    uri = check_tracking(f"sqlite:///{tmp_path}/mlflow.db")
    return StudyConfig(
        ref=embedded_ref("iris"),
        model="bishop",
        space=str(space),
        trials=3,
        max_epochs=3,
        metric="",
        split=SplitProtocol((0.7, 0.2, 0.1)),
        eval_seeds=1,
        max_concurrent=2,
        storage=str(tmp_path / "store"),
        tracking_uri=uri,
    )
