"""What must be known to build an ensemble later, without data or training: the studies, and what they are scored on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bishop_ray.config import StudyConfig
from bishop_ray.data.table import TaskType
from bishop_ray.data.units import Units
from bishop_ray.errors import UserError
from bishop_ray.home import write_whole
from bishop_ray.tuning.contenders import Problem
from bishop_ray.tuning.prepare import Prepared

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
