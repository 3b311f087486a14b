"""Where a study stands, and what Tune's results say in the words of people and of MLflow's charts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from bishop_ray.config import NO_LIMIT
from bishop_ray.training.memory import GPU_PEAK, PEAK
from bishop_ray.training.worker import last_error


@dataclass
class Progress:
    """Where a study stands, for the live table.

    Attributes:
        total: Trials asked for, 0 where nothing limits their number.
        metric: Selection metric.
        counts: Trials by state: running, complete, pruned, failed.
        best: Best validation score so far, or None.
        epochs: Epochs reported in all.
        last: The last event in words.
    """

    total: int
    metric: str
    counts: Counter[str] = field(default_factory=Counter)
    best: float | None = None
    epochs: int = 0
    last: str = ""

    @property
    def finished(self) -> int:
        """Trials that ended, in whatever way."""
        return self.counts["complete"] + self.counts["pruned"] + self.counts["failed"]

    @property
    def share(self) -> str:
        """``3/8``, or ``3`` where nothing limits the number of trials."""
        return f"{self.finished}/{self.total}" if 0 < self.total < NO_LIMIT else str(self.finished)


_CAUSES = ("exit code", "killed", "node", "out of memory", "oom", "preempt")
_BOOKKEEPING = {
    "timestamp", "training_iteration", "time_this_iter_s", "time_total_s", "time_since_restore", "pid", "epoch",
    "iterations_since_restore", "done", "should_checkpoint",
}  # fmt: skip


def curves(result: dict[str, Any]) -> dict[str, float]:
    """One epoch's numbers under the names of MLflow's charts: ``epoch/...`` first, then ``layers/...`` by kind."""
    numbers = {name: float(value) for name, value in result.items() if is_metric(name, value)}
    for once in ("workers", "best_epoch", PEAK, GPU_PEAK):
        numbers.pop(once, None)
    return {
        f"layers/{name}" if "/" in name else f"epoch/{name.removeprefix('epoch_')}": value
        for name, value in numbers.items()
    }


def is_metric(name: str, value: Any) -> bool:
    """Whether a key of a Tune result is a number of ours rather than Tune's bookkeeping."""
    if name in _BOOKKEEPING or name.startswith("config/"):
        return False
    return isinstance(value, int | float) and not isinstance(value, bool)


def error_reason(trial: Any) -> str:
    """What killed a trial's process, or the error it raised, e.g. ``OutOfMemoryError: CUDA out of memory``."""
    path = trial.error_file
    if not path:
        return "its process died"
    with open(path, encoding="utf-8", errors="replace") as file:
        # Of several failures the last one.
        text = file.read().rsplit("Failure # ", 1)[-1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(line.startswith(("The actor ", "The worker ", "The node ")) for line in lines):
        causes = [line for line in lines if any(word in line.lower() for word in _CAUSES)]
        return (causes or lines[1:] or lines)[-1][:300]
    return last_error(lines)
