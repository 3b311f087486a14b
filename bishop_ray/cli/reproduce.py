"""The job ``jobs/reproduce.py``: the paper's tables 1 and 2 again, selected on validation rows only.

Per dataset, model and split: one search, as ``jobs/tune.py`` does it, then the best configuration trained with several
seeds; the test split is opened once, after that. Nothing of the paper's figures enters a search.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bishop_ray import cli
from bishop_ray.cli import check_output, connect_cluster, quiet
from bishop_ray.cli.flags import add_flag, place_flags, positive_int, read, training_flags
from bishop_ray.errors import UnknownName, UserError
from bishop_ray.paper import comparison
from bishop_ray.paths import check_storage, storage_folder, write_whole
from bishop_ray.search.options import DataOptions, SearchOptions
from bishop_ray.search.plan import chosen_models, named_ref, obtained, plan_studies

if TYPE_CHECKING:
    from bishop_ray.config import StudyConfig, StudyResult
    from bishop_ray.data.refs import DatasetRef
    from bishop_ray.paper.printed import PaperTable
    from bishop_ray.search.cluster import Cluster
    from bishop_ray.search.suite import Failure


TRIALS = 20


def reproduce_parser() -> argparse.ArgumentParser:
    """The parser of ``jobs/reproduce.py``."""
    parser = cli.Parser(
        prog="reproduce.py",
        allow_abbrev=False,
        description="Repeats a table of the paper with selection on validation rows only, and prints the paper's "
        "figures beside ours. The same command again continues, or says that it is finished.",
    )
    group = parser.add_argument_group("what")
    group.add_argument("--paper-table", required=True, choices=("1", "2"), help="1: Datasets I (AUC); 2: Datasets II")
    add_flag(group, "dataset", help="names, or OpenML tasks, of the table (all)")
    add_flag(group, "data_dir")
    add_flag(group, "openml_server")
    group = parser.add_argument_group("search")
    add_flag(group, "models", help="models, or all (bishop)")
    add_flag(group, "trials", help=f"per dataset, model and split ({TRIALS}; budget: no limit)")
    group.add_argument("--defaults-only", action="store_true", help="no search: each model's default configuration")
    add_flag(group, "time_budget", help="for the whole command, e.g. 8h")
    add_flag(group, "max_epochs")
    add_flag(group, "eval_seeds", "--seeds", default=3, help="trainings of the best configuration (3)")
    group.add_argument("--splits", type=positive_int, default=1, metavar="N", help="the whole again on N splits (1)")
    add_flag(group, "seed", help="seed of the first split (0)")
    training_flags(group)
    place_flags(parser)
    return parser


def run_reproduce(args: argparse.Namespace) -> int:
    """The job; returns the exit code: 0, or 1 when a dataset cannot be had or a study ended without a result.

    Raises:
        UserError: Bad input; nothing was written.
    """
    from bishop_ray.paper import printed

    deadline = time.time() + args.time_budget if args.time_budget else 0.0
    quiet()
    table, models = printed.table(int(args.paper_table)), chosen_models(args.models)
    if args.defaults_only and args.trials:
        raise UserError(f"--trials goes with a search; found --defaults-only --trials {args.trials}")
    _check_defaults(args, models)
    check_output(args.output)
    storage = storage_folder(args.storage)
    check_storage(storage)
    from bishop_ray.search.cluster import check_shared
    from bishop_ray.tracking import check_tracking, tracking_uri

    # A wrong address is told before tables are fetched.
    options = read(SearchOptions, args, tracking_uri=tracking_uri(args.tracking_uri), trials=_trials(args))
    refs, missing = obtained(chosen_datasets(table, args.dataset), lambda name: _ref(table, name, args))
    check_tracking(options.tracking_uri)
    cluster = connect_cluster(options.ray_address)
    check_shared(storage)
    configs = _configs(options, args.splits, table, refs, cluster)
    return _run(args, table, configs, missing, storage, deadline)


def chosen_datasets(table: PaperTable, given: Sequence[str] | None) -> list[str]:
    """The datasets of ``--dataset`` as the table knows them: names, of Datasets II also task numbers; all for None.

    Raises:
        UnknownName: The table has no such dataset.
        UserError: A name of two tasks (electricity is one of CC and of NC), the message has their numbers; or none.
    """
    if not given:
        return list(table.datasets)
    chosen = []
    for text in (part for word in given for part in word.split(",") if part):
        found = [d for d in table.datasets if text in (d, table.name(d))]
        if not found:
            raise UnknownName("dataset of the paper's table", text, [*table.datasets, *map(table.name, table.datasets)])
        if len(found) > 1:
            raise UserError(
                f"--dataset: {text} is the name of tasks {' and '.join(found)}; expected one of the numbers"
            )
        chosen += found
    if not chosen:
        raise UserError(f"--dataset: expected at least one of {', '.join(table.datasets)}; found {' '.join(given)!r}")
    return list(dict.fromkeys(chosen))


def _check_defaults(args: argparse.Namespace, models: Sequence[str]) -> None:
    from bishop_ray.search.space import load_space

    for model in models if args.defaults_only else ():
        space = load_space(model, model)
        if space.searched and not space.queue():
            raise UserError(f"--defaults-only: search_spaces/{model}.yaml names no default configuration under 'first'")


def _ref(table: PaperTable, name: str, args: argparse.Namespace) -> DatasetRef:
    """The dataset, in the MLflow experiment of its paper table; its rows were loaded once, so they can be had.

    Raises:
        UserError: They cannot, or are another table's.
    """
    from bishop_ray.data.load import load_dataset, task_dataset

    group = f"paper-table-{args.paper_table}" + ("-defaults" if args.defaults_only else "")
    if not table.suite(name):
        named = named_ref(name, read(DataOptions, args))
        load_dataset(named)
        return replace(named, group=group)
    found = task_dataset(name, args.openml_server)
    return replace(found, group=group, name=f"{table.suite(name)}-{found.name}")


def _trials(args: argparse.Namespace) -> int | None:
    """Of each search; None where only the time budget ends it."""
    return 1 if args.defaults_only else args.trials or (None if args.time_budget else TRIALS)


def _configs(
    options: SearchOptions, splits: int, table: PaperTable, refs: dict[str, DatasetRef], cluster: Cluster
) -> dict[str, list[StudyConfig]]:
    """By dataset, one study per split and model."""
    return {
        name: [
            config
            for split in range(splits)
            for config in plan_studies(
                replace(options, seed=options.seed + split, metric=table.metric(name)), [ref], cluster
            )
        ]
        for name, ref in refs.items()
    }


def _run(
    args: argparse.Namespace,
    table: PaperTable,
    configs: dict[str, list[StudyConfig]],
    missing: list[Failure],
    storage: Path,
    deadline: float,
) -> int:
    from bishop_ray.cli.console import make_screen
    from bishop_ray.search.suite import run_studies
    from bishop_ray.tracking.logger import log_leaderboard

    every = [config for group in configs.values() for config in group]
    _announce(args, table, configs, missing)
    with make_screen(len(configs), deadline, several_models=True, several_splits=args.splits > 1) as screen:
        results, failed, skipped = run_studies([[config] for config in every], {}, screen, deadline)
    failures = missing + failed
    of_key = {group[0].ref.key: name for name, group in configs.items()}
    by_dataset: dict[str, list[StudyResult]] = {}
    for result in results:
        by_dataset.setdefault(of_key[result.dataset], []).append(result)
    rows = comparison.compare(table, by_dataset)
    lost = [(of_key.get(failure.dataset, failure.dataset), failure.model) for failure in failures]
    print("\n" + comparison.render(rows, [(name, table.name(name), model) for name, model in lost]))
    for line in comparison.conclusions(rows):
        print(line)
    text = comparison.to_csv(rows)
    path = storage / "leaderboards" / f"{every[0].ref.experiment}.csv"
    for target in (path, *([Path(args.output)] if args.output else [])):
        write_whole(target, text)
    print(f"table: {args.output or path}")
    for model in skipped:
        print(f"skipped: {model.dataset} ({model.model}): {model.reason}")
    for failure in failures:
        print(f"failed: {failure.dataset} ({failure.model}): {failure.reason}")
    if results:
        log_leaderboard(every[0].tracking_uri, list(dict.fromkeys(r.parent_run for r in results)), text)
    return cli.EXIT_FAILED if failures else 0


def _announce(
    args: argparse.Namespace, table: PaperTable, configs: dict[str, list[StudyConfig]], missing: list[Failure]
) -> None:
    first = next(iter(configs.values()))
    models = {config.model: config for config in first}
    print(f"table {args.paper_table} of the paper: {table.title}")
    trials = "default configurations, no search" if args.defaults_only else "trials until the time is over"
    if not args.defaults_only and (count := _trials(args)):
        trials = f"{count} trials each"
    print(
        f"{len(configs)} of its {len(table.datasets)} datasets, {len(models)} model(s), {args.splits} split(s), "
        f"{trials}, the best one trained with {args.eval_seeds} seed(s)"
    )
    for failure in missing:
        print(f"cannot be had: {failure.dataset}: {failure.reason}")
    for model, config in models.items():
        small = " (no GPU: the small space, not the paper's)" if config.space.endswith("_small") else ""
        print(f"{model}: search space {config.space}{small}, up to {config.max_epochs} epochs or reports", flush=True)
