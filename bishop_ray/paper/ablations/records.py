"""What each run of an ablation gave, in a file of its own: the same command again trains only what is missing."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bishop_ray.data.refs import path_part
from bishop_ray.errors import UserError
from bishop_ray.paths import write_whole
from bishop_ray.search.study import locked

COMPLETE, FAILED = "complete", "failed"
_FACTS, _RUNS = "ablation.json", "runs"


@dataclass(frozen=True)
class AblationRun:
    """One run: a training with a seed, its validation score, and the test score of that one training.

    Attributes:
        setting: Name of the setting.
        model: Registry name.
        seed: Of the training.
        status: `COMPLETE` or `FAILED`.
        reason: Why training ended, or why the run failed.
        validation: Best validation score, in the metric's own sign; None when it failed.
        test: Test score of the weights of that epoch; None when it failed.
        seconds: From its start to its end.
        started: Unix time.
        epochs: Epoch -> metrics under the names that trials have (``epoch/val_score``, ...).
        params: All hyperparameters, flat.
        test_openings: How often the test split was opened for this run; 1 unless it failed after that and ran again.
    """

    setting: str
    model: str
    seed: int
    status: str
    reason: str
    validation: float | None
    test: float | None
    seconds: float
    started: float
    epochs: dict[int, dict[str, float]] = field(default_factory=dict, repr=False)
    params: dict[str, Any] = field(default_factory=dict, repr=False)
    test_openings: int = 0

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells it from the other runs of one ablation and dataset."""
        return self.setting, self.model, self.seed


class Records:
    """The runs of one ablation on one dataset.

    Attributes:
        folder: Where they lie.
        identity: Tells two ablations of one name apart (a fresh start).
        runs: By `AblationRun.key`.
    """

    def __init__(self, folder: Path, given: Mapping[str, Any]) -> None:
        """Opens the folder, or begins it with what decides its results.

        Raises:
            UserError: It was begun with other data or settings, or a file is damaged.
        """
        self.folder = folder
        kept = _read(folder / _FACTS) if (folder / _FACTS).is_file() else {}
        now = json.loads(json.dumps(given, default=str))
        before: dict[str, Any] = kept.get("facts", {})
        changed = [name for name in now if name in before and before[name] != now[name]]
        if changed:
            was = ", ".join(f"{name} was {before[name]}, is {now[name]}" for name in changed)
            raise UserError(f"{folder.name}: the ablation was begun with other settings ({was}); --fresh starts over")
        self.identity = str(kept.get("id", "")) or uuid.uuid4().hex
        if facts := {name: now[name] for name in now if name not in before}:  # a further model brings its own
            write_whole(folder / _FACTS, json.dumps({"id": self.identity, "facts": before | facts}, indent=1))
        self.runs: dict[tuple[str, str, int], AblationRun] = {}
        for path in sorted((folder / _RUNS).glob("*.json")):
            record = _record(path)
            self.runs[record.key] = record

    def keep(self, record: AblationRun) -> None:
        """Writes a run, in place of an earlier one of its key that failed."""
        self.runs[record.key] = record
        name = path_part(f"{record.model}-{record.setting}-s{record.seed}")
        write_whole(self.folder / _RUNS / f"{name}.json", json.dumps(asdict(record)))

    def complete(self, key: tuple[str, str, int]) -> bool:
        """Whether the run is there; one that failed is not."""
        return key in self.runs and self.runs[key].status == COMPLETE


def identity_in(folder: Path) -> str:
    """The identity of the ablation in a folder, "" where there is none."""
    path = folder / _FACTS
    return str(_read(path).get("id", "")) if path.is_file() else ""


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keeps a second process out; raises `UserError` where one is at work, or the folder cannot be written."""
    with locked(folder):
        yield


def remove(folder: Path) -> None:
    """Forgets all runs."""
    shutil.rmtree(folder, ignore_errors=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: damaged ({type(error).__name__}); remove it, or --fresh starts over") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: damaged (no mapping); remove it, or --fresh starts over")
    return content


def _record(path: Path) -> AblationRun:
    content = _read(path)
    try:
        epochs = {int(step): dict(metrics) for step, metrics in content.pop("epochs").items()}
        return AblationRun(**content, epochs=epochs)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({type(error).__name__}); remove it, or --fresh starts over") from None
