"""Plan of a search: the datasets, models and studies that its options choose. Imports nothing heavy."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bishop_ray.config import NO_LIMIT, Resources, StudyConfig
from bishop_ray.data.paper_datasets import PAPER_SETS
from bishop_ray.data.refs import EMBEDDED, SUITES, DatasetRef, Roles, embedded_ref, file_ref
from bishop_ray.errors import SourceUnavailable, UnknownName, UserError
from bishop_ray.models import MODELS
from bishop_ray.paths import check_storage, storage_folder
from bishop_ray.redact import redacted
from bishop_ray.search.options import DataOptions, SearchOptions

if TYPE_CHECKING:
    from bishop_ray.search.cluster import Cluster
    from bishop_ray.search.suite import Failure


logger = logging.getLogger(__name__)


def one_source(data: DataOptions) -> str:
    """Which data option was given.

    Raises:
        UserError: None, several, or one without its companions.
    """
    given = [name for name in ("suite", "task", "table", "dataset") if getattr(data, name) is not None]
    if len(given) != 1:
        found = " and ".join(f"--{name}" for name in given) or "none of them"
        raise UserError(f"expected one of --suite, --task, --table, --dataset; found {found}")
    for flag, needs in (("target", "table"), ("task_type", "table"), ("data_dir", "dataset")):
        if getattr(data, flag) not in (None, "") and given[0] != needs:
            raise UserError(f"--{flag.replace('_', '-')} goes with --{needs}; found --{given[0]}")
    if data.paper_tasks and given[0] != "suite":
        raise UserError(f"--paper-tasks goes with --suite; found --{given[0]}")
    return given[0]


def known(kind: str, names: Iterable[str], registry: Any) -> list[str]:
    """`names` (also comma-separated), each one in the registry, without repeats.

    Raises:
        UnknownName: One is not.
        UserError: None is left.
    """
    split = [part for name in names for part in name.split(",") if part]
    if not split:
        raise UserError(f"--{kind}s: expected at least one of {', '.join(registry)}; found {' '.join(names)!r}")
    for name in split:
        if name not in registry:
            raise UnknownName(kind, name, registry)
    return list(dict.fromkeys(split))


def fractions(text: str) -> tuple[float, float, float]:
    """Three fractions that sum to one.

    Raises:
        UserError: Not three positive numbers with sum 1.
    """
    try:
        parts = tuple(float(part) for part in text.split(","))
    except ValueError:
        parts = ()
    if len(parts) != 3 or min(parts) <= 0 or abs(sum(parts) - 1) > 1e-6:
        raise UserError(f"--split: expected three positive fractions that sum to 1, e.g. 0.7,0.2,0.1; found {text!r}")
    return parts[0], parts[1], parts[2]


def datasets(data: DataOptions) -> tuple[list[DatasetRef], list[Failure]]:
    """The datasets of the options, and the tasks of several that cannot be had.

    Raises:
        UserError: Options that do not fit together, unknown names, an unreachable server.
    """
    roles = roles_of(data)
    refs, failures = _datasets(data, one_source(data))
    return [replace(ref, roles=roles) for ref in refs], failures


def roles_of(data: DataOptions) -> Roles:
    """What columns say of the rows."""
    return Roles(data.weights, data.groups, data.time, data.balance)


def _datasets(data: DataOptions, source: str) -> tuple[list[DatasetRef], list[Failure]]:
    if source == "dataset":
        return [named_ref(name, data) for name in known("dataset", data.dataset or (), (*EMBEDDED, *PAPER_SETS))], []
    if source == "table":
        return [file_ref(data.table or "", data.target or "", data.task_type or "")], []
    from bishop_ray.data.load import suite_datasets, task_dataset

    if source == "suite":
        return suite_datasets(data.suite or "", data.openml_server, data.paper_tasks), []
    found, failures = obtained(data.task or (), lambda task: task_dataset(task, data.openml_server), "task ")
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


def named_ref(name: str, data: DataOptions) -> DatasetRef:
    """The reference of a name: one of scikit-learn's tables, or of the paper's.

    Raises:
        UserError: The paper's table is neither in ``--data-dir`` nor on OpenML.
    """
    if name in EMBEDDED:
        return embedded_ref(name)
    from bishop_ray.data.load import paper_dataset

    return paper_dataset(name, data.data_dir or os.environ.get("BISHOP_DATA_DIR", "").strip(), data.openml_server)


def chosen_models(given: Sequence[str]) -> list[str]:
    """The models of ``--models``: names, or "all".

    Raises:
        UnknownName: One is not known.
        UserError: The library of one that was named is not installed; the message has the pip line.
    """
    from bishop_ray.models import not_installed

    names = known("model", given, [*MODELS, "all"])
    if names == ["all"]:
        return list(MODELS)
    if "all" in names:
        raise UserError(f"--models: expected all, or names; found {' '.join(given)!r}")
    for name in names:
        if reason := not_installed(name):
            raise UserError(f"--models: {reason}")
    return names


def check_options(options: SearchOptions, writes: bool = True) -> list[str]:
    """The models of the options, which fit together; if the search `writes`, its storage can be written.

    Raises:
        UserError: What makes no sense with several models is given, or ``--warm-start`` has a point for none of them;
            or as `chosen_models` and `check_storage`.
    """
    models = chosen_models(options.models)
    for flag, value, why in (
        ("--space", options.space, "every model has its own space"),
        ("--eval-seeds", options.eval_seeds, "with several, the models that the search trained are scored"),
    ):
        if value is not None and len(models) > 1:
            raise UserError(f"{flag} goes with one model ({why}); found --models {' '.join(models[:3])} ...")
    if options.warm_start == "paper" and "bishop" not in models:
        raise UserError(f"--warm-start paper has configurations of bishop only; found --models {' '.join(models)}")
    if writes:
        check_storage(storage_folder(options.storage))
    return models


def check_metric_fits(metric: str | None, refs: Sequence[DatasetRef]) -> None:
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


def plan_studies(options: SearchOptions, refs: Sequence[DatasetRef], cluster: Cluster | None) -> list[StudyConfig]:
    """One study per dataset and model; without a cluster, resources stay at their defaults.

    Raises:
        UserError: Options that make no study, or ask for more than the cluster has.
    """
    from bishop_ray.data.split import protocol

    models = chosen_models(options.models)
    trials = options.trials or (NO_LIMIT if options.time_budget else 20 if len(models) == 1 else 10 * len(models))
    every: dict[str, Any] = {option.name: getattr(options, option.name) for option in fields(options)}
    shared = {option.name: every[option.name] for option in fields(StudyConfig) if option.name in every}
    shared |= {
        "trials": trials, "metric": options.metric or "", "eval_seeds": options.eval_seeds or 3,
        "time_budget": options.time_budget or 0.0, "trial_limit": options.trial_time_limit or 0.0,
        "storage": str(storage_folder(options.storage)),
    }  # fmt: skip
    parts = fractions(options.split) if options.split else None
    configs = []
    for ref in refs:
        for model in models:
            space, epochs = default_space(options.space, model, gpus=cluster is not None and cluster.gpus > 0)
            own: dict[str, Any] = {"space": space, "max_epochs": reports(model) or options.max_epochs or epochs}
            own |= {"split": protocol(ref, parts, options.max_rows)} | _place(options, model, cluster)
            configs.append(StudyConfig(**{**shared, "ref": ref, "model": model, **own}))
    return configs


def _place(options: SearchOptions, model: str, cluster: Cluster | None) -> dict[str, Any]:
    """Resources of a trial of the model, and how many run at a time."""
    if cluster is None:
        return {"resources": Resources(), "max_concurrent": 1}
    from bishop_ray.search.cluster import concurrency, trial_resources

    info = MODELS[model]
    gpus = options.gpus_per_trial if "GPU" in info.device else 0.0
    workers = options.workers_per_trial if info.kind == "network" else 1
    pack = info.kind == "estimator" or options.trainer != "ray"  # worker groups all hold the same
    resources = trial_resources(cluster, options.cpus_per_trial, gpus, workers, pack)
    return {"resources": resources, "max_concurrent": concurrency(cluster, resources, options.max_concurrent)}


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
