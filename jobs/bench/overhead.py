"""What the platform costs: seconds to the first epoch, and seconds per trial beyond the training itself.

    python jobs/bench/overhead.py [--runs 5] [--trials 12] [--ray-trials 3]

The trainings of each search are repeated with the same parameters in a plain loop of this process; the difference of
wall times, divided by the number of trials, is the cost of a trial. One trial at a time, one thread each.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.append(sys.path.pop(0))  # last: an entmax.py lies in this folder, which is not the package
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bishop_ray import cli
from bishop_ray.config import StudyConfig
from bishop_ray.data.refs import embedded_ref
from bishop_ray.data.split import DATASETS_I
from bishop_ray.tracking.environment import processor

JOB = Path(__file__).resolve().parents[1] / "tune.py"


def first_epoch(home: str, seed: int) -> float:
    """Seconds from starting ``jobs/tune.py`` to the first epoch that it reports."""
    flags = ["--dataset", "breast_cancer", "--trials", "1", "--max-epochs", "1", "--eval-seeds", "1"]
    command = [sys.executable, str(JOB), *flags, "--seed", str(seed)]
    started = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"BISHOP_RAY_HOME": home}
    ) as job:
        assert job.stdout is not None
        seconds = next((time.perf_counter() - started for line in job.stdout if " epoch 1" in line), float("nan"))
        job.stdout.read()
    return seconds


def study(folder: str, trials: int, trainer: str) -> StudyConfig:
    """A search without early stopping: every trial trains all its epochs."""
    from bishop_ray.tracking import check_tracking

    return StudyConfig(
        ref=embedded_ref("breast_cancer"), model="bishop", space="bishop_small", trials=trials, max_epochs=3, metric="",
        split=DATASETS_I, sampler="random", scheduler="none", eval_seeds=1, trainer=trainer, max_concurrent=1,
        storage=f"{folder}/{trainer}", tracking_uri=check_tracking(f"sqlite:///{folder}/mlflow.db"),
    )  # fmt: skip


def per_trial(config: StudyConfig) -> tuple[float, float]:
    """Wall seconds per trial in the search and in a plain loop over the same trainings."""
    from bishop_ray.search.callback import Progress
    from bishop_ray.search.dataset import load, prepare
    from bishop_ray.search.search import run_study
    from bishop_ray.search.space import load_space
    from bishop_ray.search.study import open_study, params_of
    from bishop_ray.training.job import TrialSettings, train_here

    times: list[float] = []

    def listener(progress: Progress) -> None:
        if "started" in progress.last or "complete" in progress.last:
            times.append(time.perf_counter())

    run_study(config, listener)
    loaded = load(config)
    prepared = prepare(loaded)
    opened = open_study(
        replace(config, metric=loaded.config.metric), load_space("bishop_small", "bishop"), prepared.fingerprint
    )
    settings = TrialSettings(
        "bishop", loaded.config.metric, config.max_epochs, 0, config.resources, "inprocess", "", None
    )
    jobs = [settings.trial(params_of(opened.study, number)) for number in range(config.trials)]
    with tempfile.TemporaryDirectory() as scratch:
        train_here(jobs[0], prepared.data, Path(scratch) / "warm-up", lambda _: False)
        started = time.perf_counter()
        for number, job in enumerate(jobs):
            train_here(job, prepared.data, Path(scratch) / str(number), lambda _: False)
        plain = time.perf_counter() - started
    return (times[-1] - times[0]) / config.trials, plain / config.trials


def main() -> int:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=cli.positive_int, default=5, help="starts of the job, after one warm-up (5)")
    parser.add_argument("--trials", type=cli.positive_int, default=12, help="in-process trials (12)")
    parser.add_argument("--ray-trials", type=cli.positive_int, default=3, help="trials through Ray Train (3)")
    args = parser.parse_args()
    from importlib.metadata import version

    from bishop_ray.search.cluster import connect

    versions = [f"{name} {version(name)}" for name in ("ray", "torch", "optuna", "mlflow")]
    machine = processor()
    print(", ".join([machine, f"{os.cpu_count()} CPUs", f"Python {platform.python_version()}", *versions]))
    with tempfile.TemporaryDirectory() as folder:
        seconds = [first_epoch(folder, seed) for seed in range(args.runs + 1)][1:]
        print(f"command to first epoch: median {statistics.median(seconds):.1f} s of {args.runs} "
              f"({min(seconds):.1f} to {max(seconds):.1f})", flush=True)  # fmt: skip
        connect()
        for trainer, trials in (("inprocess", args.trials), ("ray", args.ray_trials)):
            search, plain = per_trial(study(folder, trials, trainer))
            print(
                f"{trainer}: {search:.2f} s per trial, {plain:.2f} s for its training alone, so "
                f"{search - plain:.2f} s of overhead (ratio {search / plain:.2f}; {trials} trials)",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    cli.run(main)
