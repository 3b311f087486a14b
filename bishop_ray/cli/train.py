"""The job ``jobs/train.py``: its flags, what it does with them, and what it prints.

Nothing heavy is imported before it is needed: ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bishop_ray import cli
from bishop_ray.cli import check_output, connect_cluster, quiet
from bishop_ray.cli.flags import add_flag, data_flags, place_flags, read, training_flags
from bishop_ray.errors import TrainingFailed, UserError
from bishop_ray.paths import check_storage, storage_folder, write_whole
from bishop_ray.search.options import DataOptions, SearchOptions
from bishop_ray.search.plan import check_metric_fits, chosen_models, datasets

if TYPE_CHECKING:
    from bishop_ray.search.dataset import Loaded
    from bishop_ray.search.fixed import FixedConfig, FixedResult, SeedScore
    from bishop_ray.search.suite import Failure


COLUMNS = ("dataset", "model", "metric", "seed", "validation", "test", "epochs", "seconds", "note")
"""Of ``--output``: one row per dataset and seed."""


def train_parser() -> argparse.ArgumentParser:
    """The parser of ``jobs/train.py``."""
    parser = cli.Parser(
        prog="train.py",
        allow_abbrev=False,
        description="Trains one model with fixed settings and several seeds on one split: no search. The test split is "
        "opened once, after all trainings. The same command again continues, or says that it is finished.",
    )
    data_flags(parser)
    add_settings(parser)
    group = parser.add_argument_group("training")
    group.add_argument("--model", default="bishop", metavar="NAME", help="model to train (bishop)")
    add_flag(group, "eval_seeds", "--seeds", default=3, help="trainings, a seed each (3)")
    add_flag(group, "max_epochs", "--max-epochs", "--epochs", default=200, help="at most (200)")
    add_flag(group, "metric", help="of all scores, and of the best epoch (as of a search)")
    add_flag(group, "seed", help="seed of the split (0)")
    training_flags(group)
    place_flags(parser)
    return parser


def add_settings(parser: argparse.ArgumentParser) -> None:
    """The flags that fix a model's settings; `search.parameters.fixed_params` reads them."""
    group = parser.add_argument_group("settings")
    group.add_argument(
        "--set", dest="settings", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="e.g. d_model=64 train.lr=1e-3; others stay at their defaults",
    )  # fmt: skip
    group.add_argument("--params", default="", metavar="FILE", help="settings from a .yaml or .json file; --set wins")


def run_train(args: argparse.Namespace) -> int:
    """The job; returns the exit code: 0, or 1 when a seed or a dataset failed.

    Raises:
        UserError: Bad input; nothing was written.
    """
    quiet()
    models = chosen_models([args.model])
    if len(models) != 1:
        raise UserError(f"--model: expected one model; found {args.model!r}")
    check_output(args.output)
    options = read(SearchOptions, args, models=models)
    storage = storage_folder(options.storage)
    check_storage(storage)
    from bishop_ray.search.parameters import fixed_params

    params = fixed_params(models[0], args.settings, args.params)
    refs, failures = datasets(read(DataOptions, args))
    check_metric_fits(options.metric, refs)
    from bishop_ray.search.cluster import check_shared
    from bishop_ray.search.dataset import load
    from bishop_ray.search.fixed import plan_fixed
    from bishop_ray.tracking import check_tracking, tracking_uri

    options = replace(options, tracking_uri=tracking_uri(options.tracking_uri))
    # A single bad table is answered before anything is started.
    loaded = load(plan_fixed(options, refs, params, None)[0]) if len(refs) == 1 else None
    check_tracking(options.tracking_uri)
    cluster = connect_cluster(options.ray_address)
    check_shared(storage)
    results, failed = _train_all(plan_fixed(options, refs, params, cluster), loaded)
    _conclude(results, [*failures, *failed], args.output)
    return cli.EXIT_FAILED if failures or failed or any(result.failed for result in results) else 0


def _train_all(configs: Sequence[FixedConfig], loaded: Loaded | None) -> tuple[list[FixedResult], list[Failure]]:
    """One dataset after the other; one that fails does not stop the rest.

    Raises:
        UserError: There is one dataset only and its input is bad.
    """
    from bishop_ray.search.fixed import run_fixed
    from bishop_ray.search.suite import Failure

    results, failures = [], []
    for config in configs:
        print(
            f"{config.ref.key}: {config.model}, {config.eval_seeds} seed(s), {config.max_concurrent} at a time",
            flush=True,
        )
        try:
            result = run_fixed(config, loaded)
        except TrainingFailed as error:
            failures.append(Failure(config.ref.key, config.model, str(error)))
            continue
        except UserError as error:
            if len(configs) == 1:
                raise
            failures.append(Failure(config.ref.key, config.model, str(error)))
            continue
        results.append(result)
        _show(result)
    return results, failures


def _show(result: FixedResult) -> None:
    """Prints the scores of one dataset, seed by seed."""
    from bishop_ray.metrics import display
    from bishop_ray.search.leaderboard import columns

    def shown(score: float | None) -> str:
        return "" if score is None else f"{display(result.metric, score):.4f}"

    lines: list[tuple[str, ...]] = [
        ("seed", f"validation {result.metric}", f"test {result.metric}", "epochs", "seconds", "ended by")
    ]
    for score in result.seeds:
        numbers = (shown(score.validation), shown(score.test), str(score.epochs), f"{score.seconds:.1f}")
        lines.append((str(score.seed), *numbers, score.note))
    parts = [result.summary("validation"), result.summary("test")]
    lines.append(("mean", *(shown(mean) for mean, _ in parts), "", "", ""))
    lines.append(("std", *(f"{std:.4f}" for _, std in parts), "", "", ""))
    print(columns(lines))
    print(f"on the same test rows: linear model {shown(result.linear)}, constant prediction {shown(result.constant)}")
    print(f"rows of train, validation, test: {', '.join(map(str, result.rows))}")
    print(f"trained models: {Path(result.folder) / 'final'} (not registered)")
    if result.reused:
        print("finished before, nothing was trained (--fresh starts over)")


def _conclude(results: Sequence[FixedResult], failures: Sequence[Failure], output: str) -> None:
    """Prints failures; writes the CSV file."""
    for failure in failures:
        print(f"failed: {failure.dataset} ({failure.model}): {failure.reason}")
    if output:
        from bishop_ray.search.leaderboard import rows_csv

        rows = [dict(zip(COLUMNS, _row(result, score), strict=True)) for result in results for score in result.seeds]
        write_whole(Path(output), rows_csv(rows, COLUMNS))
        print(f"scores: {output}")


def _row(result: FixedResult, score: SeedScore) -> tuple[Any, ...]:
    from bishop_ray.metrics import display

    values = ["" if value is None else display(result.metric, value) for value in (score.validation, score.test)]
    return (result.dataset, result.model, result.metric, score.seed, *values, score.epochs, score.seconds, score.note)
