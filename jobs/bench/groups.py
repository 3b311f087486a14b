"""What Ray Train adds to a trial of one worker: as it comes, and as trials here use it.

    python jobs/bench/groups.py [--trials 5]

One side after the other, each training started by a process that has
imported everything; the training itself only reports once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(sys.path.pop(0))  # last: other files of this folder have the names of libraries
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ray

from bishop_ray import cli
from bishop_ray._compat.ray import lean_trainer
from bishop_ray.cli.flags import positive_int
from bishop_ray.search.cluster import connect
from bishop_ray.tracking.environment import processor
from bishop_ray.training.ray_train import TRAIN_ENVIRONMENT

DEFAULTS = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "2", "RAY_TRAIN_METRICS_ENABLED": "1"}
"""Ray's own values of what `TRAIN_ENVIRONMENT` sets; the third is off by default."""


@ray.remote(num_cpus=0.01)
class Driver:
    """Stands for a trial's process."""

    def __init__(self, lean: bool) -> None:
        from ray.train.torch import TorchTrainer

        # Ray Train hands such variables on from here to the processes it starts.
        os.environ.update(TRAIN_ENVIRONMENT if lean else DEFAULTS)
        self._trainer = lean_trainer() if lean else TorchTrainer

    def train(self, name: str, folder: str) -> tuple[float, float]:
        """Seconds until the training function runs, and from there until the training is over."""
        from ray.train import RunConfig, ScalingConfig

        note, began = Path(folder) / f"{name}.txt", time.time()

        def loop() -> None:
            import time

            from ray import train

            note.write_text(str(time.time()))
            train.report({"score": 1.0})

        self._trainer(
            loop,
            scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 0.9}),
            run_config=RunConfig(name=name, storage_path=folder),
        ).fit()
        inside = float(note.read_text())
        return inside - began, time.time() - inside


def main() -> int:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trials", type=positive_int, default=5, help="of each side, after one that warms up (5)")
    args = parser.parse_args()
    connect()
    print(f"{processor()}, {os.cpu_count()} CPUs, Ray {ray.__version__}")
    remote: Any = Driver
    sides = {"as it comes": remote.remote(False), "as used here": remote.remote(True)}
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        for side, driver in sides.items():  # not in turn: one side's rest would start processes ahead for the other
            for number in range(args.trials + 1):
                name = f"{side.replace(' ', '-')}-{number}"
                found[side].append(ray.get(driver.train.remote(name, folder)))
    medians = {}
    for side, times in found.items():
        start, end = (statistics.median(part) for part in zip(*times[1:], strict=True))
        medians[side] = statistics.median(sum(pair) for pair in times[1:])
        print(f"{side}: {medians[side]:.2f} s a trial: {start:.2f} s until it trains, {end:.2f} s after that")
    print(f"ratio {medians['as it comes'] / medians['as used here']:.2f}")
    return 0


if __name__ == "__main__":
    cli.run(main)
