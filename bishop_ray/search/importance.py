"""Which hyperparameters mattered, from logged trials alone: the paper's random forest, and fANOVA.

The paper (appendix, "Hyperparameter Importance Analysis") takes the feature importances of a random forest over logged
trials, as Weights & Biases computes them: https://docs.wandb.ai/guides/app/features/panels/parameter-importance.
fANOVA is Hutter et al. 2014 as in Optuna:
https://optuna.readthedocs.io/en/stable/reference/generated/optuna.importance.FanovaImportanceEvaluator.html.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import optuna
import pandas as pd
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

LEAST_TRIALS = 20
"""Fewer trials with a score give no importance: a forest over them explains nothing that it has not memorised."""
TREES = 300
"""Of the forest; W&B's is not documented."""


@dataclass(frozen=True)
class Observed:
    """A trial with a score: its parameters as logged, flat, and its best validation score, larger is better."""

    params: Mapping[str, str]
    score: float


@dataclass(frozen=True)
class Importance:
    """What mattered in one study.

    Attributes:
        trials: Trials with a score.
        forest: Parameter -> share (sums to 1), impurity decrease in a random forest, as in the paper; empty if none.
        fanova: Parameter -> share of the variance, normalised to 1, over the search space; empty if none.
        out_of_bag: R² of the forest on trials it was not grown on: near or below 0 its importances are noise.
        problem: Why there are none, or "".
    """

    trials: int
    forest: dict[str, float] = field(default_factory=dict)
    fanova: dict[str, float] = field(default_factory=dict)
    out_of_bag: float = math.nan
    problem: str = ""


def importance_of(trials: Sequence[Observed], space: Mapping[str, str]) -> Importance:
    """Both importances of the parameters that differ between trials.

    Args:
        trials: Of one study; those without a finite score are left out.
        space: Searched parameter -> its range as a study's run has it (`Range`'s text); tells which scales are
            logarithmic. Parameters that are not in it are left out.
    """
    scored = [t for t in trials if math.isfinite(t.score)]
    columns = {name: [t.params.get(name, "") for t in scored] for name in space}
    columns = {name: values for name, values in columns.items() if len(set(values)) > 1}
    if len(scored) < LEAST_TRIALS:
        return Importance(
            len(scored), problem=f"too few trials with a score: {len(scored)}, at least {LEAST_TRIALS} are needed"
        )
    if not columns:
        return Importance(len(scored), problem="no parameter differs between the trials")
    scores = np.array([t.score for t in scored])
    if float(np.ptp(scores)) == 0.0:
        return Importance(len(scored), problem="all trials have the same score")
    forest, out_of_bag = _forest(columns, scores)
    return Importance(len(scored), forest, _fanova(columns, scores, space), out_of_bag)


def average(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean share per parameter over several studies, the largest first; one that was not searched counts 0."""
    names = {name for shares in found for name in shares}
    means = {name: sum(shares.get(name, 0.0) for shares in found) / len(found) for name in names}
    return dict(sorted(means.items(), key=lambda item: (-item[1], item[0])))


def numbers(values: Sequence[str]) -> list[float] | None:
    """The values as numbers, or None where one is none (True and False are names)."""
    try:
        found = [float(value) for value in values]
    except ValueError:
        return None
    return found if all(map(math.isfinite, found)) else None


def _forest(columns: Mapping[str, Sequence[str]], scores: NDArray[np.float64]) -> tuple[dict[str, float], float]:
    """Impurity importances, those of a category's indicator columns added up, and the out-of-bag R²."""
    from sklearn.ensemble import RandomForestRegressor

    parts: list[NDArray[np.float64]] = []
    owners: list[str] = []
    for name, values in columns.items():
        found = numbers(values)
        block = (
            np.array(found)[:, None]
            if found is not None
            else pd.get_dummies(pd.Series(list(values)), dtype=float).to_numpy()
        )
        parts.append(block)
        owners += [name] * block.shape[1]
    forest = RandomForestRegressor(TREES, oob_score=True, random_state=0, n_jobs=1)
    forest.fit(np.hstack(parts), scores)
    shares = dict.fromkeys(columns, 0.0)
    for name, share in zip(owners, forest.feature_importances_, strict=True):
        shares[name] += float(share)
    return dict(sorted(shares.items(), key=lambda item: -item[1])), float(forest.oob_score_)


def _fanova(
    columns: Mapping[str, Sequence[str]], scores: NDArray[np.float64], space: Mapping[str, str]
) -> dict[str, float]:
    """Optuna's evaluator on a study in memory that is rebuilt from the logged values."""
    coded = {name: numbers(values) for name, values in columns.items()}
    ranges: dict[str, BaseDistribution] = {}
    for name, values in columns.items():
        found = coded[name]
        if found is None:
            ranges[name] = CategoricalDistribution(sorted(set(values)))
        else:
            ranges[name] = _range(found, space[name])
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize")
    for row, score in enumerate(scores):
        params = {n: found[row] if (found := coded[n]) is not None else columns[n][row] for n in columns}
        study.add_trial(optuna.create_trial(params=params, distributions=ranges, value=float(score)))
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {name: float(share) for name, share in shares.items()}


def _range(found: Sequence[float], text: str) -> FloatDistribution:
    """The searched range, widened to values of first points that lie outside it."""
    low, high = min(found), max(found)
    interval = re.fullmatch(r"(?:log )?\[([^,]+), ([^\]]+)\]", text)
    if interval and (ends := numbers(interval.groups())):
        low, high = min(low, ends[0]), max(high, ends[1])
    return FloatDistribution(low, high, log=text.startswith("log ") and low > 0)
