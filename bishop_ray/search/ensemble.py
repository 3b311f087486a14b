"""Ensemble candidates that studies left on disk, and the ensemble built of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.config import StudyConfig
from bishop_ray.data.table import TaskType
from bishop_ray.data.target import Units
from bishop_ray.errors import UserError
from bishop_ray.paths import write_whole
from bishop_ray.predictor import EnsembleMember, EnsemblePredictor, Predictor
from bishop_ray.predictor.ensemble_predictor import combine
from bishop_ray.search.dataset import Prepared
from bishop_ray.search.ensemble_selection import STEPS, TOP_K, Member, cross_fitted, select
from bishop_ray.search.study import kept_models
from bishop_ray.training.job import PREDICTOR, VALIDATION

ENSEMBLE = "ensemble"


@dataclass(frozen=True)
class Candidate:
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

    members: tuple[tuple[Candidate, float], ...]
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


def candidates(studies: Iterable[tuple[str, optuna.Study, Path]]) -> list[Candidate]:
    """Of each (model, study, folder): the models that its best trials left, the best of all first."""
    found = [
        Candidate(model, number, score, path)
        for model, study, folder in studies
        for number, score, path in kept_models(study, folder)
    ]
    return sorted(found, key=lambda c: -c.score)


def build_ensemble(
    found: Sequence[Candidate], problem: Problem, *, top_k: int = TOP_K, steps: int = STEPS
) -> Ensemble | None:
    """Greedy selection over the candidates; None when a single one is all it takes, or none is usable.

    Args:
        found: The candidates, the best first.
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


AUTOML = "automl"
"""Stands for the model in the name of a search over several."""
FACTS, TARGET, EXAMPLE, IDENTITY = "automl.json", "validation_target.npy", "example.parquet", "id"


@dataclass(frozen=True)
class SearchFacts:
    """A search over several models, as it is found on disk.

    Attributes:
        problem: What its members are scored on.
        studies: Model -> name of its study, in the same ``studies`` folder.
        dataset: Key of the dataset, the registered model's name.
        experiment: MLflow experiment.
        data_key: Data and split, as the registry compares them.
        identity: Of the search; its MLflow run carries it.
        rows: Says which validation rows, as the registry compares them; "" in a folder of an earlier version.
        folder: Of the search.
    """

    problem: Problem
    studies: dict[str, str]
    dataset: str
    experiment: str
    data_key: str
    identity: str
    rows: str
    folder: Path

    def example(self) -> pd.DataFrame:
        """A few feature rows.

        Raises:
            UserError: The file is missing or damaged.
        """
        try:
            return pd.read_parquet(self.folder / EXAMPLE)
        except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
            raise _damaged(self.folder / EXAMPLE, error) from None


def save_problem(
    folder: Path, problem: Problem, whole: StudyConfig, configs: Sequence[StudyConfig], prepared: Prepared
) -> None:
    """Writes the facts, atomically."""
    np.save(folder / TARGET, problem.y)
    prepared.example.frame.to_parquet(folder / EXAMPLE)
    facts = {
        "metric": problem.metric,
        "task": problem.task.value,
        "scale": problem.scale,
        "center": problem.scale.center if isinstance(problem.scale, Units) else None,
        "seed": problem.seed,
        "studies": {config.model: config.name for config in configs},
        "dataset": whole.ref.key,
        "experiment": whole.ref.experiment,
        "data_key": f"{prepared.fingerprint} {whole.split}",
        "validation": prepared.validation.fingerprint(),
    }
    write_whole(folder / FACTS, json.dumps(facts, indent=1))


def load_facts(folder: Path) -> SearchFacts:
    """The facts of a search.

    Raises:
        UserError: The folder holds no search over several models, or a damaged one.
    """
    try:
        facts: dict[str, Any] = json.loads((folder / FACTS).read_text("utf-8"))
        y = np.load(folder / TARGET, allow_pickle=False)
        problem = Problem(y, facts["metric"], TaskType(facts["task"]), _units(facts), facts["seed"])
        identity = (folder / IDENTITY).read_text("utf-8")
        named = [str(facts[key]) for key in ("dataset", "experiment", "data_key")]
        rows = str(facts.get("validation", ""))
        return SearchFacts(problem, dict(facts["studies"]), named[0], named[1], named[2], identity, rows, folder)
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise UserError(f"{folder}: no search over several models ended here (no {missing})") from None
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise _damaged(folder / FACTS, error) from None


def _units(facts: dict[str, Any]) -> float:
    """Folders of earlier versions know the scale alone, which is enough for the metrics of then."""
    center = facts.get("center")
    return float(facts["scale"]) if center is None else Units(facts["scale"], center)


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: damaged ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})")
