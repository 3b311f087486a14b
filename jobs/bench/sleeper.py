"""A model that only sleeps, for measuring what a search adds to its trials; no part of the product's registry.

Its module registers it wherever it is imported: in the bench itself, and in every process that Ray starts, by a hook of
Ray's own (``RAY_RUNTIME_ENV_HOOK`` leads to ``worker_process_setup_hook``,
https://docs.ray.io/en/latest/ray-core/handling-dependencies.html). So the search is the product's, down to `connect`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bishop_ray.data.table import Table, TableSpec
from bishop_ray.models import MODELS, ModelInfo
from bishop_ray.models.base import Array, Estimator

NAME = "sleeper"
SPACE = """# a bench's own: one number that decides the score, and how long a trial sleeps
model:
  skill: {{float: [0.0, 1.0]}}
  seconds: {seconds}
"""


class Sleeper(Estimator):
    """Sleeps in equal parts and reports after each; how good it is, its hyperparameter decides.

    Args:
        spec: The table.
        skill: Weight, in [0, 1], of the first column, against the last one, in what it predicts.
        seconds: Sleep of a whole training.
    """

    reports: ClassVar[int] = 5

    def __init__(self, spec: TableSpec, *, skill: float = 0.5, seconds: float = 5.0) -> None:
        if not 0 <= skill <= 1:
            raise ValueError(f"skill must lie between 0 and 1; found {skill}")
        if seconds < 0:
            raise ValueError(f"seconds must be >= 0; found {seconds}")
        self.spec, self.skill, self.seconds = spec, skill, seconds

    def fit(self, train: Table, val: Table, on_round: Callable[[int, Array], bool]) -> None:
        """Sleeps `seconds` in all; what reporting takes comes on top, as in any training."""
        for number in range(1, self.reports + 1):
            time.sleep(self.seconds / self.reports)
            self.rounds = number
            if number < self.reports and on_round(number, self.predict(val.x_num, val.x_cat)):
                return

    def refit(self, train: Table, rounds: int) -> None:
        """Sleeps."""
        time.sleep(self.seconds)

    def predict(self, x_num: Array, x_cat: NDArray[np.int64]) -> Array:
        """(R, N) -> (R, K): probabilities of two classes from the first and the last column, mixed by `skill`."""
        score = np.tanh(self.skill * x_num[:, 0] + (1 - self.skill) * x_num[:, -1])
        return np.stack([0.5 - score / 2, 0.5 + score / 2], axis=1).astype(np.float32)

    def save(self, folder: Path) -> None:
        """Writes the number of rounds."""
        (folder / "sleeper.json").write_text(json.dumps({"rounds": self.rounds}), "utf-8")

    def load(self, folder: Path) -> None:
        """Reads the number of rounds."""
        self.rounds = json.loads((folder / "sleeper.json").read_text("utf-8"))["rounds"]


def register() -> None:
    """Makes the model known in this process."""
    MODELS[NAME] = ModelInfo(f"{__name__}:Sleeper", "estimator", "bench", "bench", "CPU")


def in_every_worker(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """`runtime_env` with the registration in every process that Ray starts for this driver."""
    return {**(runtime_env or {}), "worker_process_setup_hook": f"{__name__}.register"}


def prepare_ray() -> None:
    """To be called before Ray starts in this process."""
    register()
    paths = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    os.environ["RAY_RUNTIME_ENV_HOOK"] = f"{__name__}.in_every_worker"
