"""Short trials fill every slot: Tune's own choice of the next trial leaves all but one idle."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from ray import tune

from bishop_ray.tuning.cluster import Cluster
from bishop_ray.tuning.scheduler import PerModel

pytest_plugins = ("study_fixtures",)

TRIALS = 30
SECONDS = 0.2


class Short(tune.Trainable):
    """A trial far shorter than the start of its process, which takes a second at least."""

    def setup(self, config: dict[str, Any]) -> None:
        time.sleep(1.0)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        return True

    def step(self) -> dict[str, Any]:
        begun = time.time()
        time.sleep(SECONDS)
        return {"begun": begun, "ended": time.time(), "process": os.getpid(), "done": True}


def test_trials_shorter_than_the_start_of_a_process_use_both_slots(ray_here: Cluster, tmp_path: Path) -> None:
    if ray_here.cpus < 2:
        pytest.skip("needs two CPUs")
    slot = ray_here.cpus / 2
    results = tune.Tuner(
        tune.with_resources(Short, {"CPU": slot}),
        param_space={"model": "fake", "number": tune.grid_search(list(range(TRIALS)))},
        tune_config=tune.TuneConfig(
            scheduler=PerModel({"fake": tune.schedulers.FIFOScheduler()}),
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    ).fit()
    spans = [result.metrics for result in results]
    assert not results.errors
    assert len(spans) == TRIALS
    by_process = {span["process"]: 0 for span in spans}
    for span in spans:
        by_process[span["process"]] += 1
    assert len(by_process) == 2, "two slots, two processes, each one reused"
    assert min(by_process.values()) >= TRIALS // 4, f"both work: {by_process}"
