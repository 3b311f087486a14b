"""Models that cheat, registered in this process and in all that Ray starts for it."""

from __future__ import annotations

import gc
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from bishop_ray.data.table import Table, TableSpec
from bishop_ray.models import MODELS, ModelInfo
from bishop_ray.models.base import Array, Estimator

NAME = "planted"
MARK = 1e6
"""A column of the tables of these tests holds this plus the row's number."""


class Planted(Estimator):
    """Learns nothing: it answers by the position of a row among those that it is given.

    While it "trains", it also searches its process for marked rows that it was not given.

    Args:
        spec: The table.
        place: A folder where it leaves the numbers of all marked rows that it found.
    """

    reports: ClassVar[int] = 1

    def __init__(self, spec: TableSpec, *, place: str = "", shift: float = 0.0) -> None:
        self.spec, self.place, self.shift = spec, place, shift

    def fit(self, train: Table, val: Table, on_round: Callable[[int, Array], bool]) -> None:
        """Looks around."""
        found = sorted(marked_rows())
        (Path(self.place) / f"{uuid.uuid4().hex}.json").write_text(json.dumps(found), "utf-8")
        on_round(1, self.predict(val.x_num, val.x_cat))

    def refit(self, train: Table, rounds: int) -> None:
        """Nothing to learn."""

    def predict(self, x_num: Array, x_cat: Any) -> Array:
        """(R, 2): the later a row comes, the surer of the second class."""
        late = (np.arange(len(x_num)) + 0.5) / max(len(x_num), 1)
        return np.stack([1 - late, late], axis=1).astype(np.float32)

    def save(self, folder: Path) -> None:
        """There is nothing to keep."""
        folder.mkdir(parents=True, exist_ok=True)

    def load(self, folder: Path) -> None:
        """There is nothing to read."""


def marked_rows() -> set[int]:
    """Numbers of the marked rows in any array or table of this process."""
    found: set[int] = set()
    for item in gc.get_objects():
        if isinstance(item, Table):
            arrays = [item.x_num]
        elif isinstance(item, pd.DataFrame):
            arrays = [item[c].to_numpy() for c in item if pd.api.types.is_numeric_dtype(item[c])]
        elif isinstance(item, np.ndarray) and item.dtype.kind == "f":
            arrays = [item]
        else:
            continue
        for array in arrays:
            values = np.asarray(array, dtype=float).ravel()
            found |= {int(v - MARK) for v in values[(values >= MARK) & (values < MARK + 1e5)]}
    return found


def register() -> None:
    """Makes the model known in this process."""
    MODELS[NAME] = ModelInfo(f"{__name__}:Planted", "estimator", "tests", "tests", "CPU")


def in_every_worker(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """`runtime_env` with the registration in every process that Ray starts."""
    return {**(runtime_env or {}), "worker_process_setup_hook": f"{__name__}.register"}
