"""Datasets, models and study configurations that the flags of a search choose."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bishop_ray import cli
from bishop_ray.config import NO_LIMIT
from bishop_ray.data.paper_datasets import PAPER_SETS
from bishop_ray.data.refs import EMBEDDED, SUITES, DatasetRef, Roles, embedded_ref, file_ref
from bishop_ray.errors import SourceUnavailable, UserError
from bishop_ray.models import MODELS
from bishop_ray.redact import redacted

if TYPE_CHECKING:
    from bishop_ray.config import Resources, StudyConfig
    from bishop_ray.search.cluster import Cluster
    from bishop_ray.search.suite import Failure


logger = logging.getLogger(__name__)


def datasets(args: argparse.Namespace) -> tuple[list[DatasetRef], list[Failure]]:
    """The datasets of the flags, and the tasks of several that cannot be had.

    Raises:
        UserError: Flags that do not fit together, unknown names, an unreachable server.
    """
    roles = Roles(args.weights, args.groups, args.time, args.balance)
    refs, failures = _datasets(args, cli.one_source(args))
    return [replace(ref, roles=roles) for ref in refs], failures


def _datasets(args: argparse.Namespace, source: str) -> tuple[list[DatasetRef], list[Failure]]:
    if source == "dataset":
        return [named_ref(name, args) for name in cli.known("dataset", args.dataset, (*EMBEDDED, *PAPER_SETS))], []
    if source == "table":
        return [file_ref(args.table, args.target or "", args.task_type or "")], []
    from bishop_ray.data.load import suite_datasets, task_dataset

    if source == "suite":
        return suite_datasets(args.suite, args.openml_server, args.paper_tasks), []
    found, failures = obtained(args.task, lambda task: task_dataset(task, args.openml_server), "task ")
    return list(found.values()), failures


def obtained(
    names: Iterable[str], find: Callable[[str], DatasetRef], prefix: str = ""
) -> tuple[dict[str, DatasetRef], list[Failure]]:
    """By name, the datasets that can be had; and the others, `prefix` before their names, with the reason.

    Raises:
        UserError: None can be had: the reason of the first.
    """
    refs, errors = {}, {}
    for name in dict.fromkeys(names):
        try:
            refs[name] = find(name)
        except UserError as error:
            errors[name] = error
            if isinstance(error, SourceUnavailable):  # took its time, and the next one may take it too
                logger.warning("%s%s: %s", prefix, name, redacted(error))
    if not refs:
        raise next(iter(errors.values()))
    from bishop_ray.search.suite import Failure

    return refs, [Failure(f"{prefix}{name}", "all models", redacted(error)) for name, error in errors.items()]


def named_ref(name: str, args: argparse.Namespace) -> DatasetRef:
    """The reference of a name: one of scikit-learn's tables, or of the paper's.

    Raises:
        UserError: The paper's table is neither in ``--data-dir`` nor on OpenML.
    """
    if name in EMBEDDED:
        return embedded_ref(name)
    from bishop_ray.data.load import paper_dataset

    return paper_dataset(name, args.data_dir or os.environ.get("BISHOP_DATA_DIR", "").strip(), args.openml_server)


def chosen_models(given: list[str]) -> list[str]:
    """The models of ``--models``: names, or "all".

    Raises:
        UnknownName: One is not known.
        UserError: The library of one that was named is not installed; the message has the pip line.
    """
    from bishop_ray.models import not_installed

    names = cli.known("model", given, [*MODELS, "all"])
    if names == ["all"]:
        return list(MODELS)
    if "all" in names:
        raise UserError(f"--models: expected all, or names; found {' '.join(given)!r}")
    for name in names:
        if reason := not_installed(name):
            raise UserError(f"--models: {reason}")
    return names


def check_search(args: argparse.Namespace, models: list[str]) -> None:
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


def check_warm_start(warm_start: str, models: list[str]) -> None:
    """Nothing, if ``--warm-start`` can give a point to one of the models.

    Raises:
        UserError: It is "paper", and BiSHop is not among them.
    """
    if warm_start == "paper" and "bishop" not in models:
        raise UserError(f"--warm-start paper has configurations of bishop only; found --models {' '.join(models)}")


def check_output(output: str, flag: str = "--output") -> None:
    """Nothing, if the file of ``--output`` or another `flag` can be written.

    Raises:
        UserError: It names a folder, or lies in none.
    """
    if output and (Path(output).is_dir() or not Path(output).absolute().parent.is_dir()):
        raise UserError(f"{flag}: expected a file in an existing folder; found {output!r}")


def check_metric_fits(metric: str | None, refs: list[DatasetRef]) -> None:
    """The name is checked always, the fit where the task is known: for the four suites, and for tasks already fetched.

    Raises:
        UserError: An unknown metric, or one that does not fit.
    """
    if not metric:
        return
    from bishop_ray.data.table import TaskType
    from bishop_ray.metrics import check_metric, find_metric

    find_metric(metric)
    short = {str(number): name for name, number in SUITES.items()} | {name: name for name in SUITES}
    for group in {short[ref.group] for ref in refs if ref.group in short}:
        check_metric(metric, TaskType.BINARY if group.endswith("C") else TaskType.REGRESSION)
    for ref in refs:
        if ref.kind == "paper":
            check_metric(metric, TaskType(PAPER_SETS[ref.name].task))
        if ref.kind == "openml" and ref.group == ref.locator:
            from bishop_ray.data.load import load_dataset

            check_metric(metric, load_dataset(ref).task)


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
    from bishop_ray.search.cluster import concurrency, trial_resources

    def room(model: str) -> tuple[Resources, int]:
        if cluster is None:
            return Resources(), 1
        info = MODELS[model]
        gpus = args.gpus_per_trial if "GPU" in info.device else 0.0
        workers = args.workers_per_trial if info.kind == "network" else 1
        pack = info.kind == "estimator" or args.trainer != "ray"  # worker groups all hold the same
        resources = trial_resources(cluster, args.cpus_per_trial, gpus, workers, pack)
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
                    study_db=args.study_db,
                    trial_limit=args.trial_time_limit or 0.0,
                    fresh=args.fresh,
                    refit=args.refit,
                    precision=args.precision,
                    warm_start=getattr(args, "warm_start", "none"),
                    doctor=not getattr(args, "no_doctor", False),
                )
            )
    return configs


def reports(model: str) -> int:
    """How often a full training of a model of another library reports, 0 for networks, which report every epoch."""
    from bishop_ray.models import model_class, not_installed

    if MODELS[model].kind == "network" or not_installed(model):
        return 0
    from bishop_ray.models.base import Estimator

    found = model_class(model)
    return found.reports if issubclass(found, Estimator) else 0


def default_space(given: str | None, model: str, gpus: bool) -> tuple[str, int]:
    """Search space and epochs of a model: its small space where there is no GPU, unless a space is named."""
    from bishop_ray.search.space import space_names

    small = f"{model}_small"
    space = given or (small if not gpus and small in space_names() else model)
    return space, 30 if Path(space).stem == small else 200
