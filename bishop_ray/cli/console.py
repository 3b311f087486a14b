"""Terminal output of searches: live progress display and summary."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from bishop_ray.cli.listing import trials_words
from bishop_ray.config import NO_LIMIT
from bishop_ray.metrics import display
from bishop_ray.models import MODELS
from bishop_ray.search.leaderboard import clock, leaderboard, refused, render, score_words, standing, to_csv, write_csv
from bishop_ray.tracking import public_uri
from bishop_ray.tracking.logger import log_leaderboard

if TYPE_CHECKING:
    from rich.table import Table

    from bishop_ray.config import Skipped, StudyConfig, StudyResult
    from bishop_ray.search.callback import Progress
    from bishop_ray.search.suite import Failure


class Screen(Protocol):
    """A listener with a beginning and an end."""

    def __enter__(self) -> Screen: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __call__(self, config: StudyConfig, progress: Progress) -> None:
        """Something happened in a study."""


def make_screen(studies: int, deadline: float, several_models: bool = False, several_splits: bool = False) -> Screen:
    """A live table when standard output is a terminal, else lines; models and splits are named where several run."""
    if sys.stdout.isatty():
        return LiveScreen(studies, deadline, several_splits=several_splits)
    return PlainScreen(studies, deadline, several_models=several_models, several_splits=several_splits)


class PlainScreen:
    """A line for each trial that starts or ends, and at most one per `every` seconds for epochs."""

    def __init__(
        self,
        studies: int,
        deadline: float,
        every: float = 10.0,
        several_models: bool = False,
        several_splits: bool = False,
    ) -> None:
        self._studies, self._deadline, self._every = studies, deadline, every
        self._several, self._splits = several_models, several_splits
        self._seen: list[str] = []
        self._last = -every

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def __call__(self, config: StudyConfig, progress: Progress) -> None:
        """Prints the event, epochs only now and then."""
        key = config.ref.key
        if key not in self._seen:
            self._seen.append(key)
        is_epoch = " epoch " in progress.last
        if is_epoch:
            if time.monotonic() - self._last < self._every:
                return
            self._last = time.monotonic()
        best = "" if progress.best is None else f", best {display(progress.metric, progress.best):.4f}"
        where = f"[{len(self._seen)}/{self._studies}] " if self._studies > 1 else ""
        state = f"{progress.share} trials{best}{_left(self._deadline)}"
        if self._several:
            key = f"{key} {config.model}"
            state = state if config.model != "automl" else _left(self._deadline).removeprefix(", ")
        if self._splits:
            key = f"{key} split {config.seed}"
        print(f"{where}{key}: {progress.last}" + (f" ({state})" if state else ""), flush=True)


class LiveScreen:
    """One row per study, redrawn at most four times a second (rich's Live)."""

    def __init__(self, studies: int, deadline: float, several_splits: bool = False) -> None:
        from rich.console import Console
        from rich.live import Live

        self._studies, self._deadline, self._splits = studies, deadline, several_splits
        self._rows: dict[str, tuple[StudyConfig, Progress, float]] = {}
        self._live = Live(console=Console(), refresh_per_second=4, get_renderable=self._render)

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def __call__(self, config: StudyConfig, progress: Progress) -> None:
        """Remembers the state; the table draws itself."""
        started = self._rows[config.name][2] if config.name in self._rows else time.monotonic()
        self._rows[config.name] = (config, progress, started)

    def _render(self) -> Table:
        from rich import box
        from rich.table import Table

        begun = len({config.ref.key for config, _, _ in self._rows.values()})  # of which several models, splits run
        title = f"study {begun} of {self._studies}" if self._studies > 1 else ""
        table = Table(box=box.SIMPLE_HEAD, title=(title + _left(self._deadline)).removeprefix(", "), pad_edge=False)
        for name in ("dataset", "model", "trials", "running", "early", "failed", "best", "time", "left", "last event"):
            table.add_column(name)
        for config, progress, started in self._rows.values():
            counts = progress.counts
            best = "" if progress.best is None else f"{display(progress.metric, progress.best):.4f} {progress.metric}"
            table.add_row(
                config.ref.key + (f" split {config.seed}" if self._splits else ""),
                config.model,
                progress.share,
                str(counts["running"]),
                str(counts["pruned"]),
                str(counts["failed"]),
                best,
                clock(time.monotonic() - started),
                time_left(progress, time.monotonic() - started),
                progress.last,
            )
        return table


def time_left(progress: Progress, elapsed: float) -> str:
    """A guess at what the search still takes: as long per trial as so far; "" before the first trial ended.

    Args:
        progress: Of the study.
        elapsed: Seconds since it began in this process.
    """
    if not progress.finished or not 0 < progress.total < NO_LIMIT:
        return ""
    return f"~{clock(elapsed / progress.finished * (progress.total - progress.finished))}"


def _left(deadline: float) -> str:
    return f", {clock(max(0.0, deadline - time.time()))} left" if deadline else ""


def announce(groups: Sequence[Sequence[StudyConfig]], slots: Mapping[str, int], own_space: bool) -> None:
    """Says what is about to run: studies of one model, or searches over several, a group per dataset."""
    first = groups[0][0]
    many = len(groups) > 1
    if len(groups[0]) > 1:
        several = f"{len(groups)} searches" if many else "1 search"
        places = " and ".join(f"{count} on {kind.upper()}s" for kind, count in slots.items())
        budget = trials_words(first, "a search")
        print(
            f"{several} over {len(groups[0])} models, {budget}; defaults first, then the better half of the "
            f"models goes on with twice as many trials; at a time {places}",
            flush=True,
        )
        return
    small = " (no GPU: the small space, not the paper's)" if first.space.endswith("_small") and not own_space else ""
    gpus = f", {first.resources.gpus:g} GPU" if first.resources.gpus else ""
    budget = trials_words(first, "each")
    steps = "epochs" if MODELS[first.model].kind == "network" else "reports"
    print(
        f"{len(groups)} stud{'ies' if many else 'y'}, {budget}, up to "
        f"{first.max_epochs} {steps}; search space {first.space}{small}; {first.max_concurrent} at a time with "
        f"{first.resources.cpus:g} CPU{gpus} per worker",
        flush=True,
    )


def conclude(
    results: Sequence[StudyResult],
    failures: Sequence[Failure],
    skipped: Sequence[Skipped],
    path: Path,
    output: str,
    uri: str,
) -> None:
    """Prints leaderboard, failures and how to use what was registered; writes the CSV files and MLflow's copy."""
    if results:
        rows = leaderboard(results, skipped)
        print(f"\n{render(rows)}\n")
        for target in (path, *([Path(output)] if output else [])):
            write_csv(target, rows)
        print(f"leaderboard: {output or path}")
        if reused := list(dict.fromkeys(r.dataset for r in results if r.reused)):
            print(f"finished before, nothing was trained: {', '.join(reused)} (--fresh starts over)")
    for model in skipped:
        print(f"skipped: {model.dataset} ({model.model}): {model.reason}")
    for result in results:
        if refused(result.verdict):
            print(f"no alias: {result.dataset} ({result.model}), version {result.version}: {result.verdict}")
    for failure in failures:
        print(f"failed: {failure.dataset} ({failure.model}): {failure.reason}")
    datasets = list(dict.fromkeys(r.dataset for r in results))
    if results:
        # The best of the last dataset: results of several models come with the best one first.
        _show_use(next(r for r in results if r.dataset == datasets[-1]), uri)
    sys.stdout.flush()
    if len(datasets) > 1:
        log_leaderboard(uri, list(dict.fromkeys(r.parent_run for r in results)), to_csv(rows))


def _show_use(result: StudyResult, uri: str) -> None:
    """The lines that load and use a registered model, and the command that opens the MLflow UI."""
    title = standing(result.champion, result.verdict)
    print(f"\ntest score of {result.dataset}: {score_words(result)}")
    rows = "" if result.trained_on == "train" else f", trained on {result.trained_on}"
    alias = "no alias" if refused(result.verdict) else f"alias {result.model}"
    print(f"registered model: {result.registered} (version {result.version}, {alias}{rows}; {title})")
    show_loading(result.registered, "" if result.champion else result.version, uri)
    folder = Path(sys.executable).parent
    command = "mlflow" if str(folder) in os.environ.get("PATH", "").split(os.pathsep) else str(folder / "mlflow")
    if uri.startswith("sqlite"):
        print(f"compare runs:\n    {command} ui --backend-store-uri {public_uri(uri)}")
    else:
        print(f"compare runs: {public_uri(uri)}")


def show_loading(name: str, version: str, uri: str) -> None:
    """The lines that load and use a registered model: a version of it, or the champion for ""."""
    arguments = [f'"{name}"']
    if version:
        arguments.append(f'"{version}"')
    if uri != f"sqlite:///{Path('~/bishop_ray').expanduser()}/mlflow.db":
        arguments.append(f'tracking_uri="{public_uri(uri)}"')
    print("load and use it, in any folder:")
    print("    import bishop_ray")
    print(f"    model = bishop_ray.load({', '.join(arguments)})")
    print("    model.predict(frame)  # a pandas DataFrame with the training columns, in any order")
