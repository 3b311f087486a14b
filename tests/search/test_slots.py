"""Short trials fill every slot: Tune's own choice of the next trial leaves all but one idle."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ray import tune

from bishop_ray.search.cluster import Cluster
from bishop_ray.search.scheduler import PerModel

pytest_plugins = ("study_fixtures",)

TRIALS = 30


@pytest.mark.slow
def test_trials_shorter_than_the_start_of_a_process_use_both_slots(ray_here: Cluster, tmp_path: Path) -> None:
    if ray_here.cpus < 2:
        pytest.skip("needs two CPUs")

    def short(config: dict[str, Any]) -> None:  # local, so that it travels by value
        import os
        import time

        if "SHORT_TRIAL_BEGAN" not in os.environ:
            os.environ["SHORT_TRIAL_BEGAN"] = "1"
            time.sleep(1.0)  # the start of a process, which takes a second at least
        time.sleep(0.2)
        tune.report({"process": os.getpid()})

    results = tune.Tuner(
        tune.with_resources(short, {"CPU": ray_here.cpus / 2}),
        param_space={"model": "fake", "number": tune.grid_search(list(range(TRIALS)))},
        tune_config=tune.TuneConfig(
            scheduler=PerModel({"fake": tune.schedulers.FIFOScheduler()}),
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    ).fit()
    assert not results.errors
    by_process = Counter(result.metrics["process"] for result in results)
    assert by_process.total() == TRIALS
    assert len(by_process) == 2, "two slots, two processes, each one reused"
    assert min(by_process.values()) >= TRIALS // 4, f"both work: {by_process}"
