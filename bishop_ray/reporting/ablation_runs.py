"""Runs of ablations, from MLflow or from a CSV file."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from bishop_ray.errors import UserError
from bishop_ray.reporting.records import Ablation
from bishop_ray.tracking.ablation import KIND
from bishop_ray.tracking.reading import Reader, RunRecord

COURSES = ("epoch/train_loss", "epoch/val_loss", "epoch/val_score")
"""Metrics whose course a picture of convergence shows."""
ENDED = ("FINISHED", "FAILED")
OWN = ("seed", "train.seed")
"""Parameters in which the runs of one setting differ."""
SAME = ("metric", "data_hash", "rows", "base_setting")
"""Tags that all runs of one ablation have in common."""


def collect_ablations(reader: Reader, experiment: str, datasets: set[str]) -> tuple[list[Ablation], int]:
    """Ablation runs of an experiment, and those of these datasets in any; and how many more do not go with them.

    Of several ablations of one name, dataset, model and metric (a search of another storage folder, another seed of the
    split) the newest counts, and those of the same configurations with other seeds; others would not compare.
    """
    runs = reader.runs({"bishop.kind": KIND})
    runs = [run for run in runs if run.status in ENDED]
    runs = [run for run in runs if run.experiment == experiment or run.tags.get("dataset", "") in datasets]
    groups: dict[tuple[str, ...], dict[str, list[RunRecord]]] = {}
    for run in runs:
        name = (run.params.get("ablation", ""), *(run.tags.get(tag, "") for tag in ("dataset", "model", "metric")))
        groups.setdefault(name, {}).setdefault(run.tags.get("bishop.ablation_id", ""), []).append(run)
    kept = [run for ablations in groups.values() for run in _comparable(list(ablations.values()))]
    return [_ablation(reader, run) for run in kept], len(runs) - len(kept)


def _comparable(ablations: list[list[RunRecord]]) -> list[RunRecord]:
    """The runs of the newest of these ablations, and of those that repeat it with other seeds."""
    newest, *others = sorted(ablations, key=lambda own: max(run.start for run in own), reverse=True)
    taken = list(newest)
    for own in others:
        known, configurations = _configurations(taken), _configurations(own)
        common = known.keys() & configurations.keys()
        same = common and all(known[setting] == configurations[setting] for setting in common)
        if same and not {run.params.get("seed") for run in own} & {run.params.get("seed") for run in taken}:
            taken += own
    return taken


def _configurations(runs: list[RunRecord]) -> dict[str, tuple[object, ...]]:
    """Setting -> what decides its results, but for the seed."""
    return {
        run.params.get("setting", ""): (
            {name: value for name, value in run.params.items() if name not in OWN},
            [run.tags.get(tag, "") for tag in SAME],
        )
        for run in runs
    }


def read_ablations(path: Path) -> list[Ablation]:
    """The rows of a CSV file of runs that ``jobs/ablate.py`` wrote; of a column ``base_setting``, where it has one.

    Raises:
        UserError: No such file, or a column is missing.
    """
    wanted = ("ablation", "dataset", "model", "setting", "metric", "seed", "validation", "test")
    try:
        frame = pd.read_csv(
            path, dtype=dict.fromkeys((*wanted[:6], "base_setting"), str), keep_default_na=False, na_values=[""]
        )
    except (OSError, ValueError) as error:
        raise UserError(f"--ablations: expected a CSV file of jobs/ablate.py; found {path} ({error})") from None
    if missing := [name for name in wanted if name not in frame.columns]:
        raise UserError(f"--ablations: {path}: expected columns {', '.join(wanted)}; found none named {missing[0]!r}")
    frame["base"] = frame["base_setting"].fillna("") if "base_setting" in frame.columns else ""
    columns = (*wanted, "base")
    return [Ablation(**{name: row[name] for name in columns}) for row in frame.to_dict("records")]


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
        base=run.tags.get("base_setting", ""),
        courses=courses,
    )
