"""Studies for tests of the report: records made by hand, and studies in MLflow written by the real tracker."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from bishop_ray.data.table import TaskType
from bishop_ray.data.target import TargetCoder
from bishop_ray.report.study_records import COMPLETE, EARLY, FAILED, Predictions, Study, Trial
from bishop_ray.search.evaluate import PREDICTIONS, predictions_csv
from bishop_ray.tracking import StudyTracker
from bishop_ray.tracking.query import MetricPoint

HOSTILE = "<script>alert(1)</script>|*x*"
"""A class label that must stay text."""

TRIALS = 21


def record(
    dataset: str = "qsar_biodeg", model: str = "bishop", scores: str = "[0.9, 0.8]", metric: str = "auc", **more: object
) -> Study:
    """A study record with three trials: complete, stopped early, failed."""
    states = ((COMPLETE, 0.9, 4), (EARLY, 0.7, 2), (FAILED, math.nan, 0))
    trials = tuple(
        Trial(i, state, "", {"train.lr": f"1e-{i + 1}"}, score, 1000 * i, 1000 * i + 60_000, 60.0, math.nan,
              [MetricPoint(e + 1, 1000 * i + 10_000 * e, score) for e in range(last)], f"run{i}")
        for i, (state, score, last) in enumerate(states)
    )  # fmt: skip
    tags = {"test_scores": scores, "search_space": "bishop_small"} if scores else {}
    defaults = {
        "name": f"{dataset}-{model}-s0", "run_id": "r", "experiment": "e", "dataset": dataset, "model": model,
        "task": TaskType.REGRESSION if metric in ("r2", "rmse") else TaskType.BINARY, "metric": metric,
        "params": {"seed": "0", "workers_per_trial": "2", "cpus_per_worker": "3", "gpus_per_worker": "0.5",
                   "space.train.lr": "log [0.0001, 0.1]"},
        "metrics": {"best_val_score": 0.9, "test_score_linear": 0.5, "test_score_constant": 0.4}, "tags": tags,
        "start": 0, "end": 3_600_000, "trials": trials,
    }  # fmt: skip
    return Study(**{**defaults, **more})  # type: ignore[arg-type]


def predictions(seed: int, rows: int = 40) -> Predictions:
    """Probabilities of two classes that know something of them."""
    random = np.random.default_rng(seed)
    y = random.integers(0, 2, rows)
    p = np.clip(0.25 + 0.5 * y + random.normal(0, 0.2, rows), 0.01, 0.99)
    return Predictions(y.astype(float), np.column_stack([1 - p, p]))


def write_study(folder: Path, uri: str, name: str, model: str, trials: int) -> None:
    """A study of `model` on qsar_biodeg; its score depends on train.lr and little else."""
    random = np.random.default_rng(0)
    tags = {"dataset": "qsar_biodeg", "model": model, "task": "binary", "metric": "auc", "processor": "some CPU",
            "search_space": model, "suite": ""}  # fmt: skip
    params = {"seed": 0, "scheduler": "asha", "workers_per_trial": 1, "cpus_per_worker": 1.0, "gpus_per_worker": 0.0,
              "space": {"train.lr": "log [0.0001, 0.1]", "model.width": "{16, 32}",
                        "model.kind": "{a, b}"}}  # fmt: skip
    tracker = StudyTracker(uri, "exp", name, folder=folder / name, study_id=f"id-{name}", params=params, tags=tags)
    for number in range(trials):
        lr = 10 ** random.uniform(-4, -1)
        kind, width = ("a", "b")[number % 2], int(random.choice([16, 32]))
        tracker.trial_started(number, {"train.lr": lr, "model.width": width, "model.kind": kind})
        score = 0.9 - 0.05 * abs(math.log10(lr) + 2) + 0.001 * (width == 32)
        last = 4 if number % 3 == 0 else 2
        for epoch in range(1, last + 1):
            metrics = {"epoch/val_score": score - 0.02 * (last - epoch)}
            if number == 0 and model == "bishop":
                metrics |= {"layers/alpha/enc1": 1.5 + 0.01 * epoch, "layers/nonzero/enc1": 1 - 0.1 * epoch}
            tracker.trial_reported(number, epoch, metrics)
        summary = {"seconds": 2.0, "best_val_score": score, "epochs": float(last), "peak_memory_mb": 500.0 + number}
        ends = ("FINISHED", "max_epochs") if last == 4 else ("KILLED", "early-stopped")
        tracker.trial_finished(number, *ends, summary)
    y, output = predictions(1).y.astype(np.int64), predictions(1).output
    coder = TargetCoder("y", TaskType.BINARY, ("no", HOSTILE))
    tracker.log_final(
        {"best_val_score": 0.9, "test_score": 0.8, "test_score_linear": 0.75, "test_score_constant": 0.5},
        tags={"best_trial": "0", "test_scores": "[0.82, 0.78]", "trained_on": "train"},
        texts={PREDICTIONS: predictions_csv(coder, (y, output), (y, output))},
    )
    assert tracker.close(timeout=60)
