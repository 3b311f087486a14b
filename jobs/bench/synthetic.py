"""A search of known work, with processes for its trials: what `tracking.py` measures a tracker by."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait

from bishop_ray.tracking import StudyTracker

METRICS = ("train_loss", "val_score", "best_val_score", "lr", "seconds", "rows_per_second", "grad_norm", "penalty")


class Search:
    """The calls of a search.

    Args:
        trials: Trials in all.
        epochs: Epochs of each.
        turns: Of `spin` in an epoch.
        pipes: To the processes that run trials; see `work`.
    """

    def __init__(self, trials: int, epochs: int, turns: int, pipes: Sequence[Connection]) -> None:
        self.trials, self.epochs, self.turns, self.pipes = trials, epochs, turns, pipes

    def run(self, tracker: StudyTracker | None, latencies: list[float]) -> float:
        """Seconds from the first trial's start to the last one's end."""
        began = time.perf_counter()
        waiting = list(range(self.trials))
        running: dict[Connection, int] = {}
        idle = list(self.pipes)
        while waiting or running:
            while idle and waiting:
                pipe, number = idle.pop(), waiting.pop(0)
                running[pipe] = number
                start_trial(tracker, number)
                pipe.send((self.epochs, self.turns))
            for pipe in ready(running):
                if epoch := pipe.recv():
                    report(tracker, running[pipe], epoch, latencies)
                    pipe.send(True)
                else:
                    end_trial(tracker, running.pop(pipe))
                    idle.append(pipe)
        return time.perf_counter() - began


def work(pipe: Connection) -> None:
    """A process that runs one trial after the other, each told as number of epochs and turns; None ends it."""
    while (job := pipe.recv()) is not None:
        epochs, turns = job
        for epoch in range(1, epochs + 1):
            spin(turns)
            pipe.send(epoch)
            pipe.recv()
        pipe.send(0)


@contextlib.contextmanager
def processes(number: int) -> Iterator[list[Connection]]:
    """Pipes to as many `work` processes."""
    spawn = multiprocessing.get_context("spawn")
    ours, started = [], []
    for _ in range(number):
        mine, theirs = spawn.Pipe()
        started.append(spawn.Process(target=work, args=(theirs,), daemon=True))
        started[-1].start()
        ours.append(mine)
    try:
        yield ours
    finally:
        for pipe in ours:
            pipe.send(None)
        for process in started:
            process.join(10)


def start_trial(tracker: StudyTracker | None, number: int) -> None:
    """Tells that a trial begins."""
    if tracker:
        tracker.trial_started(number, {"model": {"width": number}, "train": {"lr": 1e-3}})


def report(tracker: StudyTracker | None, number: int, epoch: int, latencies: list[float]) -> None:
    """Tells an epoch, and keeps the seconds that it took."""
    metrics = {f"epoch/{name}": epoch / (number + 3) for name in METRICS}
    before = time.perf_counter()
    if tracker:
        tracker.trial_reported(number, epoch, metrics)
    latencies.append(time.perf_counter() - before)


def end_trial(tracker: StudyTracker | None, number: int) -> None:
    """Tells that a trial ended."""
    if tracker:
        tracker.trial_finished(number, "FINISHED", "max epochs", {"seconds": 1.0})


def spin(turns: int) -> None:
    """Works without giving the interpreter away of its own accord."""
    while turns:
        turns -= 1


def turns_of(milliseconds: float) -> int:
    """Turns of `spin` that take so long here, by the fastest of twenty."""
    trial = 100_000
    seconds = []
    for _ in range(20):
        before = time.perf_counter()
        spin(trial)
        seconds.append(time.perf_counter() - before)
    return int(trial * milliseconds / 1000 / min(seconds))


def ready(pipes: Iterable[Connection]) -> list[Connection]:
    """Those that have something to say, as soon as one has."""
    listed = list(pipes)
    said = wait(listed)
    return [pipe for pipe in listed if pipe in said]
