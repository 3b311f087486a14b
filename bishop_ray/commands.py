"""What the jobs do with their parsed flags: lists, and the main job."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bishop_ray import cli
from bishop_ray.data.suites import SUITES, DatasetRef, embedded_ref, file_ref, list_datasets
from bishop_ray.errors import UserError
from bishop_ray.home import home
from bishop_ray.models import MODELS

if TYPE_CHECKING:
    from bishop_ray.config import StudyConfig, StudyResult
    from bishop_ray.tuning.cluster import Cluster
    from bishop_ray.tuning.suite import Failure

T = TypeVar("T")
NO_LIMIT = 100_000
"""Trials of a study that only a time budget ends."""


def listing(args: argparse.Namespace) -> str:
    """The text of the ``--list-...`` flag given, or "" when none is; imports neither torch nor ray."""
    if args.list_datasets:
        shape = {d.name: f"{d.rows} x {d.features}" if d.rows else "" for d in list_datasets()}
        return _columns([(d.name, d.kind, d.task, shape[d.name]) for d in list_datasets()])
    if args.list_models:
        return _columns([(n, m.kind, m.library, m.device, m.space) for n, m in MODELS.items()])
    if args.list_metrics:
        from bishop_ray.training.metrics import METRICS

        return _columns([(n, ", ".join(sorted(t.value for t in m.tasks))) for n, m in METRICS.items()])
    if args.list_spaces:
        from bishop_ray.tuning.space import named_spaces

        return _columns([(n, str(p)) for n, p in sorted(named_spaces().items())])
    return ""


def _columns(rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return "none found"
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def tune(args: argparse.Namespace) -> int:
    """The main job; returns the exit code: 0, or 1 when a study of several ended without a result.

    Raises:
        UserError: Bad input; nothing was written.
    """
    deadline = time.time() + args.time_budget if args.time_budget else 0.0
    _quiet()
    refs = datasets(args)
    models = cli.known("model", args.models, MODELS)
    storage = Path(args.storage).expanduser().resolve() if args.storage else home()
    if args.dry_run:
        return _dry_run(args, refs, models, storage)
    from bishop_ray.tracking import tracking_uri
    from bishop_ray.tuning.prepare import load

    uri = tracking_uri(args.tracking_uri)
    configs = studies(args, refs, models, storage, uri, None)
    _check_metric(args.metric, refs)
    # A single bad table is answered before anything is started.
    loaded = load(configs[0]) if len(configs) == 1 else None
    # What only this process needs is imported and checked while Ray starts, which takes seconds.
    ready = _Background(lambda: _check(uri, configs))
    from bishop_ray.tuning.cluster import connect

    cluster = connect(args.ray_address)
    cli.catch_signals()  # Ray has put its own handlers in place
    ready.result()
    configs = studies(args, refs, models, storage, uri, cluster)
    return _run(args, configs, storage, deadline, loaded)


def _check(uri: str, configs: list[StudyConfig]) -> None:
    from bishop_ray.tracking import check_tracking
    from bishop_ray.tuning.space import load_space

    check_tracking(uri)
    for space, model in {(config.space, config.model) for config in configs}:
        load_space(space, model)


def _check_metric(metric: str | None, refs: list[DatasetRef]) -> None:
    """For the four known suites the task is known before anything is loaded."""
    from bishop_ray.data.table import TaskType
    from bishop_ray.training.metrics import check_metric

    for group in {ref.group for ref in refs} & set(SUITES):
        if metric:
            check_metric(metric, TaskType.BINARY if group.endswith("C") else TaskType.REGRESSION)


def _run(args: argparse.Namespace, configs: list[StudyConfig], storage: Path, deadline: float, loaded: Any) -> int:
    from bishop_ray.screen import make_screen
    from bishop_ray.tuning.suite import run_studies

    _announce(configs)
    with make_screen(len(configs), deadline) as screen:
        results, failures = run_studies(configs, screen, deadline, loaded)
    name = configs[0].ref.experiment if len(configs) > 1 else configs[0].ref.key
    path = storage / "leaderboards" / f"{name}.csv"
    _conclude(results, failures, path, args.output, configs[0].tracking_uri)
    return cli.EXIT_FAILED if failures else 0


def datasets(args: argparse.Namespace) -> list[DatasetRef]:
    """The datasets of the flags.

    Raises:
        UserError: Flags that do not fit together, unknown names, an unreachable server.
    """
    source = cli.one_source(args)
    if source == "dataset":
        return [embedded_ref(args.dataset)]
    if source == "table":
        return [file_ref(args.table, args.target or "", args.task_type or "")]
    from bishop_ray.data.sources import suite_datasets, task_dataset

    if source == "suite":
        return suite_datasets(args.suite, args.openml_server, args.paper_tasks)
    return [task_dataset(task, args.openml_server) for task in dict.fromkeys(args.task)]


def studies(
    args: argparse.Namespace,
    refs: list[DatasetRef],
    models: list[str],
    storage: Path,
    uri: str,
    cluster: Cluster | None,
) -> list[StudyConfig]:
    """One study per dataset and model; without a cluster, resources stay at their defaults."""
    from bishop_ray.config import Resources, StudyConfig
    from bishop_ray.data.split import protocol
    from bishop_ray.tuning.cluster import concurrency, trial_resources

    resources, concurrent = Resources(), 1
    if cluster is not None:
        resources = trial_resources(cluster, args.cpus_per_trial, args.gpus_per_trial, args.workers_per_trial)
        concurrent = concurrency(cluster, resources, args.max_concurrent)
    fractions = cli.fractions(args.split) if args.split else None
    configs = []
    for ref in refs:
        for model in models:
            space, epochs = default_space(args, model, resources.gpus > 0)
            configs.append(
                StudyConfig(
                    ref=ref,
                    model=model,
                    space=space,
                    trials=args.trials or (NO_LIMIT if args.time_budget else 20),
                    max_epochs=args.max_epochs or epochs,
                    metric=args.metric or "",
                    split=protocol(ref, fractions, args.max_rows),
                    sampler=args.sampler,
                    scheduler=args.scheduler,
                    seed=args.seed,
                    eval_seeds=args.eval_seeds,
                    trainer=args.trainer,
                    resources=resources,
                    max_concurrent=concurrent,
                    storage=str(storage),
                    tracking_uri=uri,
                    fresh=args.fresh,
                )
            )
    return configs


def default_space(args: argparse.Namespace, model: str, gpu: bool) -> tuple[str, int]:
    """Space and epochs of a model: its small space where trials have no GPU, unless a space is named."""
    from bishop_ray.tuning.space import space_names

    small = f"{model}_small"
    if args.space:
        return args.space, 30 if args.space.endswith("_small") else 200
    return (small, 30) if not gpu and small in space_names() else (model, 200)


def _announce(configs: list[StudyConfig]) -> None:
    first = configs[0]
    small = " (no GPU: the small space, not the paper's)" if first.space.endswith("_small") else ""
    gpus = f", {first.resources.gpus:g} GPU" if first.resources.gpus else ""
    trials = f"{first.trials} trials" if first.trials < NO_LIMIT else "trials until the time budget ends"
    print(
        f"{len(configs)} stud{'y' if len(configs) == 1 else 'ies'}, {trials} each, up to {first.max_epochs} epochs; "
        f"search space {first.space}{small}; {first.max_concurrent} at a time with {first.resources.cpus:g} CPU{gpus} "
        f"per worker",
        flush=True,
    )


def _conclude(results: list[StudyResult], failures: list[Failure], path: Path, output: str, uri: str) -> None:
    """Leaderboard, files, and how to use what was registered."""
    from bishop_ray.reports import leaderboard, render, to_csv, write_csv
    from bishop_ray.tracking.leaderboard import log_leaderboard

    if results:
        rows = leaderboard(results)
        print(f"\n{render(rows)}\n")
        for target in (path, *([Path(output)] if output else [])):
            write_csv(target, rows)
        if len(results) > 1:
            log_leaderboard(uri, [r.parent_run for r in results], to_csv(rows))
        print(f"leaderboard: {output or path}")
        if reused := [r.dataset for r in results if r.reused]:
            print(f"finished before, nothing was trained: {', '.join(reused)} (--fresh starts over)")
    for failure in failures:
        print(f"failed: {failure.dataset} ({failure.model}): {failure.reason}")
    if results:
        _show_use(results[-1], uri)


def _show_use(result: StudyResult, uri: str) -> None:
    """The lines that load and use a registered model, and the command that opens the MLflow UI."""
    from bishop_ray.reports import score_words
    from bishop_ray.tracking import public_uri, tracking_uri

    shown = public_uri(uri)
    where = "" if uri == tracking_uri("") else f', tracking_uri="{shown}"'
    print(f"\ntest score of {result.dataset}: {score_words(result)}")
    print(f"registered model: {result.registered} (version {result.version}, alias {result.model})")
    print("load and use it, in any folder:")
    print("    import bishop_ray")
    print(f'    model = bishop_ray.load("{result.registered}"{where})')
    print("    model.predict(frame)  # a pandas DataFrame with the training columns, in any order")
    if uri.startswith("sqlite"):
        print(f"compare runs:\n    mlflow ui --backend-store-uri {shown}")
    else:
        print(f"compare runs: {shown}")


def _dry_run(args: argparse.Namespace, refs: list[DatasetRef], models: list[str], storage: Path) -> int:
    """Prints what would be done; datasets are loaded, since their shapes are shown."""
    from bishop_ray.tuning.prepare import load, prepare
    from bishop_ray.tuning.space import load_space

    failed = False
    for config in studies(args, refs, models, storage, "", None):
        space = load_space(config.space, config.model)
        try:
            loaded = load(config)
            prepared = prepare(loaded)
        except UserError as error:
            if len(refs) == 1:
                raise
            failed = True
            print(f"{config.ref.key}: {error}")
            continue
        spec, rows = prepared.data.spec, prepared.rows
        print(
            f"{config.ref.key}: {spec.task.value}, {spec.n_num} numerical + {spec.n_cat} categorical columns, "
            f"{rows[0]} train / {rows[1]} validation / {rows[2]} test rows; {loaded.config.metric}; study {config.name}"
        )
    trials = config.trials if config.trials < NO_LIMIT else "unlimited"
    cpus = args.cpus_per_trial or 1.0
    print(f"trials per study: {trials}, up to {config.max_epochs} epochs each; {args.workers_per_trial} worker(s) with "
          f"{cpus:g} CPU; machine: {os.cpu_count()} CPUs")  # fmt: skip
    print(f"search space {space.name} ({len(space.first)} point(s) tried first):")
    print(_columns([(f"  {name}", str(value)) for name, value in space.entries.items()]))
    return cli.EXIT_FAILED if failed else 0


def _quiet() -> None:
    """Keeps library noise out of the output; errors still show."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    for name in ("mlflow", "alembic", "openml", "optuna", "ray"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Our own notes (columns dropped, rows without target) belong to the output.
    notes = logging.StreamHandler(sys.stdout)
    notes.setFormatter(logging.Formatter("note: %(message)s"))
    own = logging.getLogger("bishop_ray")
    own.handlers, own.propagate = [notes], False
    own.setLevel(logging.INFO)


class _Background:
    """A call in a thread, whose error appears where its result is asked for."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self._error = error

    def result(self) -> None:
        """Waits; raises what the call raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
