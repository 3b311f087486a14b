"""Command ``jobs/tune.py``: search, evaluation, registration."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bishop_ray import cli
from bishop_ray.cli import connect_cluster, quiet
from bishop_ray.cli.listing import describe, plan
from bishop_ray.cli.plan import (
    check_metric_fits,
    check_output,
    check_search,
    check_warm_start,
    chosen_models,
    datasets,
    studies,
)
from bishop_ray.data.refs import DatasetRef
from bishop_ray.errors import UserError
from bishop_ray.paths import check_storage, storage_folder

if TYPE_CHECKING:
    from bishop_ray.config import StudyConfig
    from bishop_ray.search.dataset import Loaded
    from bishop_ray.search.suite import Failure


def tune(args: argparse.Namespace) -> int:
    """The main job; returns the exit code: 0, or 1 when one of several studies ended without a result or alias.

    Raises:
        UserError: Bad input; nothing was written.
    """
    deadline = time.time() + args.time_budget if args.time_budget else 0.0
    quiet()
    models = chosen_models(args.models)
    check_search(args, models)
    check_warm_start(args.warm_start, models)
    check_output(args.output)
    storage = storage_folder(args.storage)
    if not args.dry_run:
        check_storage(storage)
    refs, failures = datasets(args)
    check_metric_fits(args.metric, refs)
    if args.dry_run:
        return _dry_run(args, refs, models, storage, failures)
    from bishop_ray.search.cluster import check_shared, shared_slots
    from bishop_ray.search.dataset import load
    from bishop_ray.tracking import tracking_uri

    uri = tracking_uri(args.tracking_uri)
    if args.study_db:
        from bishop_ray.search.study import open_database

        open_database(args.study_db)
    configs = studies(args, refs, models, storage, uri, None)
    # A single bad table is answered before anything is started.
    loaded = load(configs[0]) if len(refs) == 1 else None
    # What only this process needs is imported and checked while Ray starts, which takes seconds.
    ready = _Background(lambda: _check(uri, configs, loaded))
    cluster = connect_cluster(args.ray_address)
    check_shared(storage)
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
    from bishop_ray.cli.console import announce, conclude, make_screen
    from bishop_ray.search.leaderboard import refused
    from bishop_ray.search.suite import run_studies

    groups: dict[str, list[StudyConfig]] = {}
    for config in configs:
        groups.setdefault(config.ref.key, []).append(config)
    announce(list(groups.values()), slots, own_space=bool(args.space))
    with make_screen(len(groups), deadline, several_models=len(configs) > len(groups)) as screen:
        results, failed, skipped = run_studies(list(groups.values()), slots, screen, deadline, loaded)
    first = configs[0]
    experiments = {config.ref.experiment for config in configs}
    name = first.ref.key if len(groups) == 1 else experiments.pop() if len(experiments) == 1 else "datasets"
    path = storage / "leaderboards" / f"{name}.csv"
    conclude(results, failures + failed, skipped, path, args.output, first.tracking_uri)
    return cli.EXIT_FAILED if failures or failed or any(refused(r.verdict) for r in results) else 0


def _check(uri: str, configs: list[StudyConfig], loaded: Loaded | None) -> None:
    """Everything that can be wrong before the first study: spaces, a single table's columns, the tracking server."""
    from bishop_ray.models import not_installed
    from bishop_ray.search.dataset import prepare
    from bishop_ray.search.space import load_space
    from bishop_ray.tracking import check_tracking

    for space, model in {(config.space, config.model) for config in configs}:
        if not not_installed(model):
            load_space(space, model)
    if loaded is not None and len(configs) == 1:
        prepare(loaded)
    check_tracking(uri)


def _dry_run(
    args: argparse.Namespace, refs: list[DatasetRef], models: list[str], storage: Path, failures: list[Failure]
) -> int:
    """Prints what would be done; Ray is asked what there is, and datasets are loaded, since their shapes are shown."""
    from bishop_ray.models import not_installed

    configs = studies(args, refs, models, storage, "", None)
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
    cluster = connect_cluster(args.ray_address)
    planned = {c.model: c for c in studies(args, refs, models, storage, "", cluster) if c.model in usable}
    print("\n".join([*lines, *(plan(config, cluster, len(models) > 1) for config in planned.values())]))
    return cli.EXIT_FAILED if failed else 0


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
