"""How full a search's slots are: trials that only sleep, against the time they would take back to back.

Used by ``search.py --fake-trials``.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import sleeper

from bishop_ray.config import Resources, StudyConfig
from bishop_ray.data.refs import file_ref
from bishop_ray.data.split import SplitProtocol
from bishop_ray.search.callback import Progress

NEVER_STOPPED = 10 * sleeper.Sleeper.reports + 10
"""Epochs of the study: with so many, ASHA's first rung lies behind the last report. A trial stopped early would be no
trial of full length, and what is left without it would not be the ideal time."""


def study(folder: Path, table: Path, trials: int, seconds: float, slots: int) -> StudyConfig:
    """A search of `trials` trials that sleep `seconds`; TPE, ASHA and all records on."""
    from bishop_ray.tracking import check_tracking

    space = folder / "sleeper.yaml"
    space.write_text(sleeper.SPACE.format(seconds=float(seconds)), "utf-8")
    return StudyConfig(
        ref=file_ref(table, "y"), model=sleeper.NAME, space=str(space), trials=trials, max_epochs=NEVER_STOPPED,
        metric="auc", split=SplitProtocol((0.7, 0.2, 0.1)), eval_seeds=1, max_concurrent=slots, storage=str(folder),
        tracking_uri=check_tracking(f"sqlite:///{folder}/mlflow.db"), resources=Resources(1.0),
    )  # fmt: skip


@dataclass
class Clock:
    """A listener that notes when trials began and ended, in seconds since it was made."""

    began: float = field(default_factory=time.perf_counter)
    starts: dict[int, float] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=dict)

    def __call__(self, progress: Progress) -> None:
        """Notes the event that `progress` names."""
        words = progress.last.split()
        if words[:1] != ["trial"] or "epoch" in words:
            return
        now, number = time.perf_counter() - self.began, int(words[1])
        if words[2] == "started":
            self.starts[number] = now
        elif words[2] == "complete":
            self.ends[number] = now
        else:
            raise RuntimeError(f"every trial should end by itself; found: {progress.last}")

    def gaps(self, slots: int) -> list[float]:
        """Seconds that a slot waited for its next trial, in order: the n-th end frees the slot of a later start."""
        ends, starts = sorted(self.ends.values()), sorted(self.starts.values())[slots:]
        return [start - end for end, start in zip(ends, starts, strict=False)]


def measure(folder: Path, table: Path, trials: int, seconds: float, slots: int) -> float:
    """Runs the search and prints where its time went; wall time over ideal, less 1."""
    from bishop_ray.search.search import run_study

    config = study(folder, table, trials, seconds, slots)
    clock, cpu = Clock(), time.process_time()
    run_study(config, clock)
    whole, cpu = time.perf_counter() - clock.began, time.process_time() - cpu
    if len(clock.ends) != trials:
        raise RuntimeError(f"expected {trials} complete trials; found {len(clock.ends)}")
    ideal = trials * seconds / slots
    first, last = min(clock.starts.values()), max(clock.ends.values())
    beyond = [clock.ends[number] - clock.starts[number] - seconds for number in clock.ends]
    gaps = clock.gaps(slots)
    parts = {
        "before the first trial": first,
        "in a trial beyond its sleep, median": statistics.median(beyond),
        "beyond its sleep, largest": max(beyond),
        "between two trials of a slot, median": statistics.median(gaps) if gaps else 0.0,
        "between two trials, largest": max(gaps, default=0.0),
    }
    print(f"{trials} trials of {seconds:g} s, {slots} at a time, ideal {ideal:.1f} s: {last:.1f} s from the command to "
          f"the last trial's end, {last / ideal - 1:.1%} over ideal; {last - first:.1f} s of it from the first trial's "
          f"start, {(last - first) / ideal - 1:.1%} over ideal", flush=True)  # fmt: skip
    for name, value in parts.items():
        print(f"  {name}: {value:.2f} s")
    print(f"  final evaluation and registration, once: {whole - last:.1f} s; CPU time of the driver: {cpu:.1f} s")
    return last / ideal - 1
