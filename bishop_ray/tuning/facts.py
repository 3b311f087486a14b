"""What must be known to build an ensemble later, without data or training: the studies, and what they are scored on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bishop_ray.config import StudyConfig
from bishop_ray.data.table import TaskType
from bishop_ray.errors import UserError
from bishop_ray.tuning.contenders import Problem
from bishop_ray.tuning.prepare import Prepared

FACTS, TARGET, EXAMPLE = "automl.json", "validation_target.npy", "example.parquet"


@dataclass(frozen=True)
class SearchFacts:
    """A search over several models, as it is found on disk.

    Attributes:
        problem: What its members are scored on.
        studies: Model -> name of its study, in the same ``studies`` folder.
        dataset: Key of the dataset, the registered model's name.
        experiment: MLflow experiment.
        data_key: Data and split, as the registry compares them.
        folder: Of the search.
    """

    problem: Problem
    studies: dict[str, str]
    dataset: str
    experiment: str
    data_key: str
    folder: Path


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
        "seed": problem.seed,
        "studies": {config.model: config.name for config in configs},
        "dataset": whole.ref.key,
        "experiment": whole.ref.experiment,
        "data_key": f"{prepared.fingerprint} {whole.split}",
    }
    part = folder / (FACTS + ".part")
    part.write_text(json.dumps(facts, indent=1), "utf-8")
    part.replace(folder / FACTS)


def load_facts(folder: Path) -> SearchFacts:
    """The facts of a search.

    Raises:
        UserError: The folder holds no search over several models, or a damaged one.
    """
    try:
        facts: dict[str, Any] = json.loads((folder / FACTS).read_text("utf-8"))
        y = np.load(folder / TARGET, allow_pickle=False)
        problem = Problem(y, facts["metric"], TaskType(facts["task"]), facts["scale"], facts["seed"])
        return SearchFacts(
            problem, dict(facts["studies"]), facts["dataset"], facts["experiment"], facts["data_key"], folder
        )
    except FileNotFoundError:
        raise UserError(f"{folder}: no search over several models ended here (no {FACTS})") from None
    except (KeyError, ValueError, OSError) as error:
        raise UserError(f"{folder / FACTS}: damaged ({type(error).__name__}: {error})") from None
