"""The trained models that studies left on disk, and the ensemble of them; nothing is trained here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray

from bishop_ray.data.table import TaskType
from bishop_ray.errors import UserError
from bishop_ray.predictor import EnsembleMember, EnsemblePredictor, Predictor
from bishop_ray.predictor.combine import combine
from bishop_ray.training.ensemble import STEPS, TOP_K, Member, cross_fitted, select
from bishop_ray.training.trial import PREDICTOR, VALIDATION
from bishop_ray.tuning.trials import kept_models

ENSEMBLE = "ensemble"


@dataclass(frozen=True)
class Contender:
    """A trained model on disk.

    Attributes:
        model: Registry name.
        number: Its trial.
        score: Validation score, larger is better.
        folder: Holds its predictor and its predictions of the validation rows.
    """

    model: str
    number: int
    score: float
    folder: Path

    def load(self) -> Predictor:
        """The predictor."""
        return Predictor.load(self.folder / PREDICTOR)

    def predictions(self) -> NDArray[np.float32]:
        """(R, K) outputs for the R validation rows."""
        found: NDArray[np.float32] = np.load(self.folder / VALIDATION, allow_pickle=False)
        return found


@dataclass(frozen=True)
class Problem:
    """What validation predictions are scored against.

    Attributes:
        y: (R,) class indices, or the standardised target, of the validation rows.
        metric: Selection metric.
        task: The task type.
        scale: Units of the target per unit of `y`.
        seed: Of the folds.
    """

    y: NDArray[Any]
    metric: str
    task: TaskType
    scale: float
    seed: int


@dataclass(frozen=True)
class Ensemble:
    """An ensemble and how good it is on the validation rows.

    Attributes:
        members: Contenders and their weights, the largest first.
        score: Cross-fitted: weights fitted on four fifths of the rows, scored on the fifth.
        pooled: (R, K) the predictions of the validation rows that `score` is made of.
    """

    members: tuple[tuple[Contender, float], ...]
    score: float
    pooled: NDArray[Any] = field(repr=False, compare=False)

    def load(self) -> EnsemblePredictor:
        """The predictor, with every member in it."""
        return self.assemble([contender.load() for contender, _ in self.members])

    def assemble(self, predictors: Sequence[Predictor]) -> EnsemblePredictor:
        """The predictor, of the members' own in their order."""
        members = [
            EnsembleMember(f"trial {contender.number}", weight, predictor)
            for (contender, weight), predictor in zip(self.members, predictors, strict=True)
        ]
        seconds = sum(float(m.predictor.info.get("fit_seconds", 0.0)) for m in members)
        return EnsemblePredictor(members=tuple(members), info={"fit_seconds": seconds})

    def predictions(self, problem: Problem) -> NDArray[np.float64]:
        """(R, K) what the members' processes said of the validation rows, by the weights that the ensemble has."""
        outputs = [contender.predictions() for contender, _ in self.members]
        return combine(outputs, [weight for _, weight in self.members], problem.task.is_classification)

    def words(self) -> str:
        """Members and weights in one line."""
        return ", ".join(f"{weight:.2f} {c.model} (trial {c.number})" for c, weight in self.members)


def contenders(studies: Iterable[tuple[str, optuna.Study, Path]]) -> list[Contender]:
    """Of each (model, study, folder): the models that its best trials left, the best of all first."""
    found = [
        Contender(model, number, score, path)
        for model, study, folder in studies
        for number, score, path in kept_models(study, folder)
    ]
    return sorted(found, key=lambda c: -c.score)


def build_ensemble(
    found: Sequence[Contender], problem: Problem, *, top_k: int = TOP_K, steps: int = STEPS
) -> Ensemble | None:
    """Greedy selection over the contenders; None when a single one is all it takes, or none is usable.

    Args:
        found: The contenders, the best first.
        problem: What they are scored on.
        top_k: Contenders per model that take part.
        steps: Members drawn.
    """
    members = [Member(c.model, str(c.number), c.score) for c in found]
    if len(members) < 2:
        return None
    predictions = [c.predictions() for c in found]
    arguments = (members, predictions, problem.y, problem.metric, problem.task, problem.scale)
    try:
        weights = select(*arguments, top_k=top_k, steps=steps)
    except UserError:
        return None  # no member's predictions are finite
    if len(weights) < 2:
        return None
    chosen = sorted(((found[i], weight) for i, weight in weights.items()), key=lambda pair: -pair[1])
    fitted = cross_fitted(*arguments, top_k=top_k, steps=steps, seed=problem.seed)
    return Ensemble(tuple(chosen), fitted.score, fitted.pooled)
