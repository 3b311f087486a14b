"""Lists of models, datasets, spaces and metrics, and the plan of a dry run; nothing is trained."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from bishop_ray.config import NO_LIMIT
from bishop_ray.data.refs import list_datasets
from bishop_ray.models import MODELS
from bishop_ray.search.leaderboard import columns

if TYPE_CHECKING:
    from bishop_ray.config import StudyConfig
    from bishop_ray.search.cluster import Cluster


def listing(args: argparse.Namespace) -> str:
    """The text of the ``--list-...`` flag given, or "" when none is; imports neither torch nor ray."""
    if args.list_datasets:
        shape = {d.name: f"{d.rows} x {d.features}" if d.rows else "" for d in list_datasets()}
        return columns([(d.name, d.kind, d.task, shape[d.name]) for d in list_datasets()])
    if args.list_models:
        return columns([(n, m.kind, m.library, m.device, m.space) for n, m in MODELS.items()])
    if args.list_metrics:
        from bishop_ray.metrics.scorers import metric_tasks

        return columns([(n, ", ".join(sorted(t.value for t in tasks))) for n, tasks in metric_tasks().items()])
    if args.list_spaces:
        from bishop_ray.search.space import named_spaces

        return columns([(n, str(p)) for n, p in sorted(named_spaces().items())])
    return ""


def describe(config: StudyConfig) -> str:
    """A study's dataset, shapes and split; the dataset is loaded for it.

    Raises:
        UserError: The data cannot be loaded or trained on.
    """
    from bishop_ray.search.dataset import load, prepare, unable

    loaded = load(config)
    prepared = prepare(loaded)
    skipped = unable(config, prepared)
    spec, rows = prepared.data.spec, prepared.rows
    return (
        f"{config.name}: {spec.task.value}, {spec.n_num} numerical + {spec.n_cat} categorical columns, {rows[0]} train "
        f"/ {rows[1]} validation / {rows[2]} test rows; selects by {loaded.config.metric}"
        + (f"; will be skipped: {skipped}" if skipped else "")
    )


def plan(config: StudyConfig, cluster: Cluster, several: bool) -> str:
    """Budget, resources and search space of the studies of one model; `several`: it shares its trials with others."""
    from bishop_ray.search.space import load_space

    space = load_space(config.space, config.model)
    gpus = f" + {config.resources.gpus:g} GPU" if cluster.gpus else ""
    steps = "epochs" if MODELS[config.model].kind == "network" else "reports"
    trials = trials_words(config, "per " + ("dataset, shared with the other models" if several else "study"))
    then = "" if several else f"; then {config.eval_seeds} training(s) of the winner"
    lines = [
        f"{config.model}: {trials}, up to {config.max_epochs} {steps} each{then}",
        f"resources: {config.max_concurrent} trial(s) at a time, each {config.resources.workers} worker(s) with "
        f"{config.resources.cpus:g} CPU{gpus}; the cluster has {cluster.cpus:g} CPUs, {cluster.gpus:g} GPUs",
        f"search space {space.name}, {len(space.first)} point(s) tried first:",
        columns([(f"  {name}", str(value)) for name, value in space.entries.items()]),
    ]
    return "\n".join(lines)


def trials_words(config: StudyConfig, share: str) -> str:
    """``8 trials each`` for a `share` "each", or that the time budget ends them."""
    return f"{config.trials} trials {share}" if config.trials < NO_LIMIT else "trials until the time budget ends"
