"""A model whose trials go wrong in every way, registered in this process and in all that Ray starts for it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bishop_ray.data.table import Table, TableSpec
from bishop_ray.models import MODELS, ModelInfo
from bishop_ray.models.base import Array, Estimator

NAME = "unruly"
WAYS = ("fine", "raises", "memory", "dies", "dies once", "hangs", "full", "full at the end", "loses the card")


class Unruly(Estimator):
    """Predicts well enough, if it comes to that.

    Args:
        spec: The table.
        way: What happens after the first report.
        place: A folder where it remembers that it has died before.
    """

    reports: ClassVar[int] = 3

    def __init__(self, spec: TableSpec, *, way: str = "fine", place: str = "") -> None:
        if way not in WAYS:
            raise ValueError(f"way must be one of {', '.join(WAYS)}; found {way!r}")
        self.spec, self.way, self.place = spec, way, place

    def fit(self, train: Table, val: Table, on_round: Callable[[int, Array], bool]) -> None:
        """Goes wrong after its first report."""
        first = Path(self.place) / f"{self.way}.pid"
        if self.place and not first.exists():
            first.write_text(str(os.getpid()))
        for number in range(1, self.reports + 1):
            self.rounds = number
            if number < self.reports and on_round(number, self.predict(val.x_num, val.x_cat)):
                return
            if number == 1:
                time.sleep(0.5)  # the report is on its way
                self._go_wrong()

    def _go_wrong(self) -> None:
        died = Path(self.place) / f"{self.way}.died"
        if self.way == "raises":
            raise KeyError("a fault of its own")
        if self.way == "loses the card":  # the words of PyTorch, after which every call to the GPU fails
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if self.way == "memory":
            raise MemoryError("cannot allocate 5 terabytes")
        if self.way == "hangs":
            time.sleep(3600)
        begun = Path(self.place) / f"{self.way}.begun"
        again, freed = begun.exists(), (Path(self.place) / "freed").exists()
        begun.touch()
        if not freed and (self.way == "full" or (self.way == "full at the end" and again)):
            raise OSError(28, "No space left on device", "/somewhere")
        if self.way == "dies" or (self.way == "dies once" and not died.exists()):
            died.touch()
            os._exit(1)

    def refit(self, train: Table, rounds: int) -> None:
        """Nothing to learn."""
        self.rounds = rounds

    def predict(self, x_num: Array, x_cat: Any) -> Array:
        """(R, 3) probabilities from the first column."""
        logits = np.stack([-x_num[:, 2], np.zeros(len(x_num)), x_num[:, 2]], axis=1).astype(np.float32)
        return np.asarray(np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True), dtype=np.float32)

    def save(self, folder: Path) -> None:
        """Writes the number of rounds."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "unruly.json").write_text(json.dumps({"rounds": self.rounds}), "utf-8")

    def load(self, folder: Path) -> None:
        """Reads the number of rounds."""
        self.rounds = json.loads((folder / "unruly.json").read_text("utf-8"))["rounds"]


def register() -> None:
    """Makes the model known in this process."""
    MODELS[NAME] = ModelInfo(f"{__name__}:Unruly", "estimator", "tests", "tests", "CPU")


def in_every_worker(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """`runtime_env` with the registration in every process that Ray starts."""
    return {**(runtime_env or {}), "worker_process_setup_hook": f"{__name__}.register"}
