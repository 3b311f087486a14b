"""Runs of ablations, from MLflow or from a CSV file."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from bishop_ray.errors import UserError
from bishop_ray.reporting.records import Ablation
from bishop_ray.tracking.reading import Reader, RunRecord

COURSES = ("epoch/train_loss", "epoch/val_score")
"""Metrics whose course a picture of convergence shows."""


def collect_ablations(reader: Reader, experiment: str, datasets: set[str]) -> list[Ablation]:
    """Ablation runs of an experiment, and those of these datasets in any; of repeated ones the newest."""
    runs = reader.runs({"bishop.kind": "ablation"})
    found: dict[tuple[str, ...], RunRecord] = {}
    for run in runs:
        if run.status == "FINISHED" and (run.experiment == experiment or run.tags.get("dataset", "") in datasets):
            key = [run.params.get(name, "") for name in ("ablation", "setting", "model", "seed")]
            found[(run.tags.get("dataset", ""), *key)] = run
    return [_ablation(reader, run) for run in found.values()]


def read_ablations(path: Path) -> list[Ablation]:
    """The rows of a CSV file that ``jobs/ablate.py`` wrote.

    Raises:
        UserError: No such file, or a column is missing.
    """
    wanted = ("ablation", "dataset", "model", "setting", "metric", "seed", "validation", "test")
    try:
        frame = pd.read_csv(path, dtype=dict.fromkeys(wanted[:6], str), keep_default_na=False, na_values=[""])
    except (OSError, ValueError) as error:
        raise UserError(f"--ablations: expected a CSV file of jobs/ablate.py; found {path} ({error})") from None
    if missing := [name for name in wanted if name not in frame.columns]:
        raise UserError(f"--ablations: {path}: expected columns {', '.join(wanted)}; found none named {missing[0]!r}")
    rows = frame.dropna(subset=["validation"]).to_dict("records")
    return [Ablation(**{name: row[name] for name in wanted}) for row in rows]


def _ablation(reader: Reader, run: RunRecord) -> Ablation:
    courses = {}
    if run.params.get("ablation") == "convergence":
        courses = {name: reader.course(run.run_id, name) for name in COURSES if name in run.metrics}
    return Ablation(
        ablation=run.params.get("ablation", ""),
        dataset=run.tags.get("dataset", ""),
        model=run.params.get("model", run.tags.get("model", "")),
        setting=run.params.get("setting", ""),
        metric=run.tags.get("metric", ""),
        seed=run.params.get("seed", ""),
        validation=float(run.metrics.get("validation", math.nan)),
        test=float(run.metrics.get("test", math.nan)),
        courses=courses,
    )
