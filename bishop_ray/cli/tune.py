"""Command ``jobs/tune.py``: search, evaluation, registration."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from bishop_ray import cli
from bishop_ray.cli import check_output, connect_cluster, quiet
from bishop_ray.cli.flags import read
from bishop_ray.cli.listing import describe, plan
from bishop_ray.data.refs import DatasetRef
from bishop_ray.errors import UserError
from bishop_ray.paths import storage_folder
from bishop_ray.search.options import DataOptions, SearchOptions
from bishop_ray.search.plan import check_metric_fits, check_options, datasets, plan_studies

if TYPE_CHECKING:
    from bishop_ray.search.suite import Failure
    from bishop_ray.search.tuner import Search


def tune(args: argparse.Namespace) -> int:
    """The main job; returns the exit code: 0, or 1 when one of several studies ended without a result or alias.

    Raises:
        UserError: Bad input; nothing was written.
    """
    options = read(SearchOptions, args)
    deadline = options.deadline()
    quiet()
    check_options(options, writes=not args.dry_run)
    check_output(args.output)
    refs, failures = datasets(read(DataOptions, args))
    if args.dry_run:
        return _dry_run(options, refs, failures)
    from bishop_ray.search.tuner import open_search

    search = open_search(options, refs, deadline, connect_cluster)
    return _run(search, options, args.output, failures)


def _run(search: Search, options: SearchOptions, output: str, failures: list[Failure]) -> int:
    from bishop_ray.cli.console import announce, conclude, make_screen
    from bishop_ray.search.leaderboard import refused

    groups = search.groups
    announce(groups, search.slots, own_space=bool(options.space))
    with make_screen(len(groups), search.deadline, several_models=len(groups[0]) > 1) as screen:
        results, failed, skipped = search.run(screen)
    first = groups[0][0]
    experiments = {group[0].ref.experiment for group in groups}
    name = first.ref.key if len(groups) == 1 else experiments.pop() if len(experiments) == 1 else "datasets"
    path = storage_folder(options.storage) / "leaderboards" / f"{name}.csv"
    conclude(results, failures + failed, skipped, path, output, first.tracking_uri)
    return cli.EXIT_FAILED if failures or failed or any(refused(r.verdict) for r in results) else 0


def _dry_run(options: SearchOptions, refs: list[DatasetRef], failures: list[Failure]) -> int:
    """Prints what would be done; Ray is asked what there is, and datasets are loaded, since their shapes are shown."""
    from bishop_ray.models import not_installed

    check_metric_fits(options.metric, refs)
    configs = plan_studies(options, refs, None)
    lines = [f"{failure.dataset}: {failure.reason}" for failure in failures]
    failed = bool(failures)
    usable = []
    for config in configs:
        if reason := not_installed(config.model):
            lines.append(f"{config.name}: will be skipped: {reason}")
            continue
        usable.append(config.model)
        try:
            lines.append(describe(config))
        except UserError as error:
            if len(configs) == 1:
                raise
            failed = True
            lines.append(f"{config.name}: {error}")
    cluster = connect_cluster(options.ray_address)
    planned = {config.model: config for config in plan_studies(options, refs, cluster)}
    shown = (plan(config, cluster, len(planned) > 1) for config in planned.values() if config.model in usable)
    print("\n".join([*lines, *shown]))
    return cli.EXIT_FAILED if failed else 0
