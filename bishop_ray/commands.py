"""What the jobs do with their parsed flags."""

from __future__ import annotations

import argparse
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bishop_ray import cli
from bishop_ray.data.suites import SUITES, DatasetRef, embedded_ref, file_ref
from bishop_ray.errors import UserError
from bishop_ray.home import home
from bishop_ray.listing import NO_LIMIT, describe, plan
from bishop_ray.models import MODELS

if TYPE_CHECKING:
    from bishop_ray.config import StudyConfig
    from bishop_ray.tuning.cluster import Cluster
    from bishop_ray.tuning.prepare import Loaded
    from bishop_ray.tuning.suite import Failure


def tune(args: argparse.Namespace) -> int:
    """The main job; returns the exit code: 0, or 1 when one of several studies ended without a result.

    Raises:
        UserError: Bad input; nothing was written.
    """
    deadline = time.time() + args.time_budget if args.time_budget else 0.0
    _quiet()
    models = cli.known("model", args.models, MODELS)
    _check_output(args.output)
    refs, failures = datasets(args)
    _check_metric(args.metric, refs)
    storage = Path(args.storage).expanduser().resolve() if args.storage else home()
    if args.dry_run:
        return _dry_run(args, refs, models, storage, failures)
    from bishop_ray.tracking import tracking_uri
    from bishop_ray.tuning.prepare import load

    uri = tracking_uri(args.tracking_uri)
    configs = studies(args, refs, models, storage, uri, None)
    # A single bad table is answered before anything is started.
    loaded = load(configs[0]) if len(configs) == 1 else None
    # What only this process needs is imported and checked while Ray starts, which takes seconds.
    ready = _Background(lambda: _check(uri, configs, loaded))
    cluster = _connect(args.ray_address)
    ready.result()
    return _run(args, studies(args, refs, models, storage, uri, cluster), storage, deadline, loaded, failures)


def _run(
    args: argparse.Namespace,
    configs: list[StudyConfig],
    storage: Path,
    deadline: float,
    loaded: Loaded | None,
    failures: list[Failure],
) -> int:
    from bishop_ray.screen import announce, conclude, make_screen
    from bishop_ray.tuning.suite import run_studies

    announce(configs, own_space=bool(args.space))
    with make_screen(len(configs), deadline) as screen:
        results, failed = run_studies(configs, screen, deadline, loaded)
    name = configs[0].ref.experiment if len(configs) > 1 else configs[0].ref.key
    conclude(results, failures + failed, storage / "leaderboards" / f"{name}.csv", args.output, configs[0].tracking_uri)
    return cli.EXIT_FAILED if failures or failed else 0


def _connect(address: str) -> Cluster:
    from bishop_ray.tuning.cluster import connect

    cluster = connect(address)
    cli.catch_signals()  # Ray has put its own handlers in place
    return cluster


def datasets(args: argparse.Namespace) -> tuple[list[DatasetRef], list[Failure]]:
    """The datasets of the flags, and the tasks of several that cannot be had.

    Raises:
        UserError: Flags that do not fit together, unknown names, an unreachable server.
    """
    source = cli.one_source(args)
    if source == "dataset":
        return [embedded_ref(args.dataset)], []
    if source == "table":
        return [file_ref(args.table, args.target or "", args.task_type or "")], []
    from bishop_ray.data.sources import suite_datasets, task_dataset

    if source == "suite":
        return suite_datasets(args.suite, args.openml_server, args.paper_tasks), []
    from bishop_ray.tuning.suite import Failure

    refs, failures, errors = [], [], []
    for task in dict.fromkeys(args.task):
        try:
            refs.append(task_dataset(task, args.openml_server))
        except UserError as error:
            errors.append(error)
            failures.append(Failure(f"task {task}", "all models", str(error)))
    if not refs:
        raise errors[0]
    return refs, failures


def _check_output(output: str) -> None:
    if output and (Path(output).is_dir() or not Path(output).absolute().parent.is_dir()):
        raise UserError(f"--output: expected a file in an existing folder; found {output!r}")


def _check_metric(metric: str | None, refs: list[DatasetRef]) -> None:
    """The name is checked always, the fit where the task is known: for the four suites, and for tasks already fetched.

    Raises:
        UserError: An unknown metric, or one that does not fit.
    """
    if not metric:
        return
    from bishop_ray.data.table import TaskType
    from bishop_ray.errors import UnknownName
    from bishop_ray.training.metrics import METRICS, check_metric

    if metric not in METRICS:
        raise UnknownName("metric", metric, METRICS)
    short = {str(number): name for name, number in SUITES.items()} | {name: name for name in SUITES}
    for group in {short[ref.group] for ref in refs if ref.group in short}:
        check_metric(metric, TaskType.BINARY if group.endswith("C") else TaskType.REGRESSION)
    for ref in refs:
        if ref.kind == "openml" and ref.group == ref.locator:
            from bishop_ray.data.sources import load_dataset

            check_metric(metric, load_dataset(ref).task)


def _check(uri: str, configs: list[StudyConfig], loaded: Loaded | None) -> None:
    """Everything that can be wrong before the first study: spaces, a single table's columns, the tracking server."""
    from bishop_ray.tracking import check_tracking
    from bishop_ray.tuning.prepare import prepare
    from bishop_ray.tuning.space import load_space

    for space, model in {(config.space, config.model) for config in configs}:
        load_space(space, model)
    if loaded is not None:
        prepare(loaded)
    check_tracking(uri)


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
            space, epochs = default_space(args.space, model, gpus=cluster is not None and cluster.gpus > 0)
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
                    time_budget=args.time_budget or 0.0,
                    fresh=args.fresh,
                )
            )
    return configs


def default_space(given: str | None, model: str, gpus: bool) -> tuple[str, int]:
    """Search space and epochs of a model: its small space where there is no GPU, unless a space is named."""
    from bishop_ray.tuning.space import space_names

    small = f"{model}_small"
    space = given or (small if not gpus and small in space_names() else model)
    return space, 30 if Path(space).stem == small else 200


def _dry_run(
    args: argparse.Namespace, refs: list[DatasetRef], models: list[str], storage: Path, failures: list[Failure]
) -> int:
    """Prints what would be done; Ray is asked what there is, and datasets are loaded, since their shapes are shown."""
    configs = studies(args, refs, models, storage, "", None)
    lines = [f"{failure.dataset}: {failure.reason}" for failure in failures]
    failed = bool(failures)
    for config in configs:
        try:
            lines.append(describe(config))
        except UserError as error:
            if len(configs) == 1:
                raise
            failed = True
            lines.append(f"{config.name}: {error}")
    cluster = _connect(args.ray_address)
    planned = {config.model: config for config in studies(args, refs, models, storage, "", cluster)}
    print("\n".join([*lines, *(plan(config, cluster) for config in planned.values())]))
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
