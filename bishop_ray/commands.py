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
from bishop_ray.config import NO_LIMIT
from bishop_ray.data.suites import SUITES, DatasetRef, embedded_ref, file_ref
from bishop_ray.errors import UserError
from bishop_ray.home import home
from bishop_ray.listing import describe, plan
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
    quiet()
    models = chosen_models(args.models)
    _check_search(args, models)
    _check_output(args.output)
    refs, failures = datasets(args)
    _check_metric(args.metric, refs)
    storage = Path(args.storage).expanduser().resolve() if args.storage else home()
    if args.dry_run:
        return _dry_run(args, refs, models, storage, failures)
    from bishop_ray.tracking import tracking_uri
    from bishop_ray.tuning.cluster import shared_slots
    from bishop_ray.tuning.prepare import load

    uri = tracking_uri(args.tracking_uri)
    configs = studies(args, refs, models, storage, uri, None)
    # A single bad table is answered before anything is started.
    loaded = load(configs[0]) if len(refs) == 1 else None
    # What only this process needs is imported and checked while Ray starts, which takes seconds.
    ready = _Background(lambda: _check(uri, configs, loaded))
    cluster = _connect(args.ray_address)
    ready.result()
    configs = studies(args, refs, models, storage, uri, cluster)
    slots = shared_slots(cluster, [config.resources for config in configs], args.max_concurrent)
    return _run(args, configs, slots, storage, deadline, loaded, failures)


def _run(
    args: argparse.Namespace,
    configs: list[StudyConfig],
    slots: dict[str, int],
    storage: Path,
    deadline: float,
    loaded: Loaded | None,
    failures: list[Failure],
) -> int:
    from bishop_ray.screen import announce, conclude, make_screen
    from bishop_ray.tuning.suite import run_studies

    groups: dict[str, list[StudyConfig]] = {}
    for config in configs:
        groups.setdefault(config.ref.key, []).append(config)
    announce(list(groups.values()), slots, own_space=bool(args.space))
    with make_screen(len(groups), deadline, several_models=len(configs) > len(groups)) as screen:
        results, failed, skipped = run_studies(list(groups.values()), slots, screen, deadline, loaded)
    first = configs[0]
    name = first.ref.experiment if len(groups) > 1 else first.ref.key
    path = storage / "leaderboards" / f"{name}.csv"
    conclude(results, failures + failed, skipped, path, args.output, first.tracking_uri)
    return cli.EXIT_FAILED if failures or failed else 0


def _connect(address: str) -> Cluster:
    from bishop_ray.tuning.cluster import connect

    cluster = connect(address)
    cli.catch_signals()  # Ray has put its own handlers in place
    return cluster


def chosen_models(given: list[str]) -> list[str]:
    """The models of ``--models``: names, or "all".

    Raises:
        UnknownName: One is not known.
        UserError: The library of one that was named is not installed; the message has the pip line.
    """
    from bishop_ray.models import not_installed

    if given == ["all"]:
        return list(MODELS)
    names = cli.known("model", given, [*MODELS, "all"])
    if "all" in names:
        raise UserError(f"--models: expected all, or names; found {' '.join(given)!r}")
    for name in names:
        if reason := not_installed(name):
            raise UserError(f"--models: {reason}")
    return names


def _check_search(args: argparse.Namespace, models: list[str]) -> None:
    """Flags that make no sense with several models.

    Raises:
        UserError: One of them is given.
    """
    if len(models) == 1:
        return
    for flag, value, why in (
        ("--space", args.space, "every model has its own space"),
        ("--eval-seeds", args.eval_seeds, "with several, the models that the search trained are scored"),
    ):
        if value is not None:
            raise UserError(f"{flag} goes with one model ({why}); found --models {' '.join(models[:3])} ...")


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
    from bishop_ray.models import not_installed
    from bishop_ray.tracking import check_tracking
    from bishop_ray.tuning.prepare import prepare
    from bishop_ray.tuning.space import load_space

    for space, model in {(config.space, config.model) for config in configs}:
        if not not_installed(model):
            load_space(space, model)
    if loaded is not None and len(configs) == 1:
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

    def room(model: str) -> tuple[Resources, int]:
        if cluster is None:
            return Resources(), 1
        info = MODELS[model]
        gpus = args.gpus_per_trial if "GPU" in info.device else 0.0
        workers = args.workers_per_trial if info.kind == "network" else 1
        resources = trial_resources(cluster, args.cpus_per_trial, gpus, workers)
        return resources, concurrency(cluster, resources, args.max_concurrent)

    fractions = cli.fractions(args.split) if args.split else None
    trials = 20 if len(models) == 1 else 10 * len(models)
    configs = []
    for ref in refs:
        for model in models:
            space, epochs = default_space(args.space, model, gpus=cluster is not None and cluster.gpus > 0)
            resources, concurrent = room(model)
            configs.append(
                StudyConfig(
                    ref=ref,
                    model=model,
                    space=space,
                    trials=args.trials or (NO_LIMIT if args.time_budget else trials),
                    max_epochs=reports(model) or args.max_epochs or epochs,
                    metric=args.metric or "",
                    split=protocol(ref, fractions, args.max_rows),
                    sampler=args.sampler,
                    scheduler=args.scheduler,
                    seed=args.seed,
                    eval_seeds=args.eval_seeds or 3,
                    trainer=args.trainer,
                    resources=resources,
                    max_concurrent=concurrent,
                    storage=str(storage),
                    tracking_uri=uri,
                    time_budget=args.time_budget or 0.0,
                    fresh=args.fresh,
                    refit=args.refit,
                )
            )
    return configs


def reports(model: str) -> int:
    """How often a full training of a model of another library reports, 0 for networks, which report every epoch."""
    from bishop_ray.models import model_class, not_installed
    from bishop_ray.models.base import Estimator

    if MODELS[model].kind == "network" or not_installed(model):
        return 0
    found = model_class(model)
    return found.reports if issubclass(found, Estimator) else 0


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


def quiet() -> None:
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
