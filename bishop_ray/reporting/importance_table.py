"""Importance of hyperparameters per dataset and averaged, beside the paper's figures."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from bishop_ray.paper import importance
from bishop_ray.reporting.records import Table
from bishop_ray.tuning.importance import Importance, average

ABOUT = (
    "Shares of the differences in validation scores that a hyperparameter explains. forest: impurity decrease in a "
    "random forest over logged trials, as the paper computes it; its figures are an average over its datasets, from "
    "random search without early stopping, and sum to 0.80. fANOVA: over the search space. Trials that were stopped "
    "early count with the score they had reached. A dash: not searched, or not in the paper's table."
)

Found = Mapping[str, Mapping[str, Importance]]
"""Dataset -> study -> its importances."""


def importance_table(model: str, found: Found) -> Table | None:
    """Importance of one model's hyperparameters; None where no study has enough trials and the paper no figures.

    Args:
        model: Registry name.
        found: Its studies.
    """
    columns = _columns(model, found)
    if not columns:
        return None
    names = list(dict.fromkeys(name for shares in reversed(columns.values()) for name in shares))
    rows = [{"parameter": n} | {c: s.get(n, math.nan) for c, s in columns.items()} for n in names]
    order = next((c for c in columns if not c.startswith("paper")), next(iter(columns)))
    frame = pd.DataFrame(rows).sort_values(order, ascending=False, kind="stable", na_position="last")
    return Table(f"importance-{model}", model, frame, notes(found), dict.fromkeys(columns, 3))


def _columns(model: str, found: Found) -> dict[str, Mapping[str, float]]:
    """Title -> parameter -> share: the paper's, means over several datasets, then each dataset's."""
    usable = {d: own for d, rows in found.items() if (own := [one for one in rows.values() if one.forest])}
    forests = {dataset: average([one.forest for one in rows]) for dataset, rows in usable.items()}
    fanovas = {dataset: average([one.fanova for one in rows]) for dataset, rows in usable.items()}
    columns: dict[str, Mapping[str, float]] = {}
    if model == "bishop":
        columns["paper, forest"] = importance()["average"]
    if len(usable) > 1:
        columns["mean, forest"] = average(list(forests.values()))
        columns["mean, fANOVA"] = average(list(fanovas.values()))
    for dataset in usable:
        columns |= {f"{dataset}, forest": forests[dataset], f"{dataset}, fANOVA": fanovas[dataset]}
    return columns


def notes(found: Found) -> tuple[str, ...]:
    """How far each study's shares can be trusted, or why it has none."""
    notes = []
    for rows in found.values():
        for name, one in rows.items():
            noise = ", so its shares are noise" if one.out_of_bag <= 0 else ""
            words = (
                f"{one.trials} trials; the forest explains {one.out_of_bag:.2f} of the variance (R²) of trials it was "
                f"not grown on{noise}"
            )
            notes.append(f"{name}: {one.problem or words}.")
    return tuple(notes)
