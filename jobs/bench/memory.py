"""What concurrent trials take of memory on one large table: the table once, and little per trial.

    python jobs/bench/memory.py [--gigabytes 1] [--trials 4]

A study's rows lie in Ray's object store once; each trial, a process of its own, trains a small MLP on them for one
epoch on one thread. Shown is the unique memory (USS: pages that no other process maps) of every trial at the end of
the epoch, of one trial alone and of several at a time, and of one on a table of 1,000 rows, which is what the
libraries take.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.append(sys.path.pop(0))  # last: an entmax.py lies in this folder, which is not the package
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bishop_ray import cli
from bishop_ray.tracking.environment import processor

if TYPE_CHECKING:
    from bishop_ray.training.job import StudyData

COLUMNS, VALIDATION_ROWS = 250, 1000
MB = 1e6


def make_data(rows: int) -> StudyData:
    """Synthetic rows of 250 numbers whose class the first one decides."""
    from bishop_ray.data.table import Table, TableSpec, TaskType
    from bishop_ray.training.job import StudyData

    rng = np.random.default_rng(0)

    def table(n: int) -> Table:
        x_num = rng.standard_normal((n, COLUMNS), dtype=np.float32)
        return Table(x_num, np.zeros((n, 0), np.int64), (x_num[:, 0] > 0).astype(np.int64))

    return StudyData(TableSpec(TaskType.BINARY, COLUMNS, (), 2), table(rows), table(VALIDATION_ROWS), {}, 1.0)


def unique_bytes() -> int:
    """This process's unique memory."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def trial(data: StudyData, folder: str) -> tuple[int, float]:
    """Trains one epoch; unique memory at its end, in bytes, and the validation score."""
    from bishop_ray.config import TrialConfig
    from bishop_ray.training.job import ReportCallback, train_here

    params = {"model": {"n_blocks": 1, "d_block": 16}, "train": {"batch_size": 4096, "lr": 1e-2}}
    job = TrialConfig.from_params("mlp", params, metric="accuracy", max_epochs=1)
    seen: list[tuple[int, float]] = []

    def on_epoch(report: ReportCallback) -> bool:
        seen.append((unique_bytes(), report.metrics()["val_score"]))
        return False

    train_here(job, data, Path(folder), on_epoch)
    return seen[-1]


def at_a_time(data: Any, count: int) -> list[int]:
    """Unique memory of `count` concurrent trials, each in a fresh process, in bytes."""
    import ray

    # One call per process, and as many processes as trials whatever the number of CPUs.
    run = ray.remote(num_cpus=0, max_calls=1)(trial)
    with tempfile.TemporaryDirectory() as folder:
        done = ray.get([run.remote(data, f"{folder}/{number}") for number in range(count)])
    assert min(score for _, score in done) > 0.5, "a trial learned nothing: it did not see the rows"
    return [memory for memory, _ in done]


def main() -> int:
    """Prints one JSON line and a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gigabytes", type=cli.positive_float, default=1.0, help="size of the training rows (1)")
    parser.add_argument("--trials", type=cli.positive_int, default=4, help="trials at a time (4)")
    args = parser.parse_args()
    import ray

    from bishop_ray.search.cluster import connect

    rows = max(1000, int(args.gigabytes * 1e9 / (4 * COLUMNS)))
    connect()
    bare = at_a_time(ray.put(make_data(1000)), 1)[0] / MB
    data = ray.put(make_data(rows))
    alone = at_a_time(data, 1)[0] / MB
    together = [memory / MB for memory in at_a_time(data, args.trials)]
    table = rows * COLUMNS * 4 / MB
    facts = {
        "processor": processor(),
        "table_mb": table,
        "bare_mb": bare,
        "one_mb": alone,
        "together_mb": together,
        "sum_mb": sum(together),
    }
    print(json.dumps(facts))
    print(f"| rows | table | trial on 1,000 rows | one trial | {args.trials} trials | sum | with the table / one |")
    print("|---|---|---|---|---|---|---|")
    ratio = (table + sum(together)) / (table + alone)
    each = ", ".join(f"{memory:.0f}" for memory in together)
    print(f"| {rows:,} | {table:.0f} MB | {bare:.0f} | {alone:.0f} | {each} | {sum(together):.0f} | {ratio:.2f} |")
    return 0


if __name__ == "__main__":
    cli.run(main)
