"""Questions to a study: which trial is best, how many ended how, with what parameters."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from bishop_ray.config import Params
from bishop_ray.training.trial import PREDICTOR, model_folder
from bishop_ray.tuning.space import OUTSIDE, unflatten

PARAMS = "params"
"""User attribute of a trial: its whole point, flat, as JSON."""


def best_of(study: optuna.Study) -> tuple[int, float] | None:
    """Number and score of the best trial, early-stopped ones included; ties go to the earlier trial."""
    scored = [
        (value, -t.number)
        for t in study.get_trials(deepcopy=False)
        if t.state in (TrialState.COMPLETE, TrialState.PRUNED)
        and (value := t.value if t.value is not None else last_value(t)) is not None
        and math.isfinite(value)
    ]
    return (-max(scored)[1], max(scored)[0]) if scored else None


KEPT = 5
"""Trials of a study whose models stay on disk."""


def kept_models(study: optuna.Study, folder: Path | str) -> list[tuple[int, float, Path]]:
    """Number, validation score and folder of the best trials that saved a model, best first; ties: the earlier trial.

    Args:
        study: The Optuna study.
        folder: The study's folder.
    """
    scored = [
        (-t.value, t.number, model_folder(folder, t.number))
        for t in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if t.value is not None and math.isfinite(t.value)
    ]
    saved = [row for row in sorted(scored) if (row[2] / PREDICTOR).is_dir()]
    return [(number, -negated, path) for negated, number, path in saved[:KEPT]]


def last_value(trial: optuna.trial.FrozenTrial) -> float | None:
    """The last reported score of a trial (scores are best-so-far, so it is its best)."""
    values = trial.intermediate_values
    return values[max(values)] if values else None


def count_states(study: optuna.Study) -> Counter[str]:
    """Trials by state, in the words of `Progress`."""
    names = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
    return Counter(names[t.state] for t in study.get_trials(deepcopy=False) if t.state in names)


def seconds_of(study: optuna.Study) -> float:
    """What all trials took together."""
    return float(sum(t.user_attrs.get("seconds", 0.0) for t in study.get_trials(deepcopy=False)))


def params_of(study: optuna.Study, number: int) -> Params:
    """The full parameters of a trial, as its searcher stored them."""
    return unflatten(json.loads(study.get_trials(deepcopy=False)[number].user_attrs[PARAMS]))


def trial_rows(study: optuna.Study) -> list[dict[str, Any]]:
    """The study's trials, best first, for the leaderboard table in MLflow."""
    rows = [
        {
            "trial": t.number,
            "state": t.state.name.lower(),
            "best_val_score": t.value if t.value is not None else last_value(t),
            "epochs": max(t.intermediate_values, default=0),
            "seconds": t.user_attrs.get("seconds", 0.0),
            "reason": t.user_attrs.get("reason", ""),
            **t.params,
            **json.loads(t.user_attrs.get(OUTSIDE, "{}")),
        }
        for t in study.get_trials(deepcopy=False)
        if t.state.is_finished()
    ]
    return sorted(
        rows, key=lambda row: -math.inf if row["best_val_score"] is None else row["best_val_score"], reverse=True
    )
