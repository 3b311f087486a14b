"""The job ``jobs/ablate.py``: its flags, what it does with them, and what it prints.

Nothing heavy is imported before it is needed: ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bishop_ray import cli
from bishop_ray.cli import check_output, connect_cluster, quiet
from bishop_ray.cli.flags import add_flag, data_flags, positive_int, read, training_flags
from bishop_ray.errors import UserError
from bishop_ray.models import MODELS
from bishop_ray.paper.ablations.settings import ABLATIONS, chosen, find
from bishop_ray.paths import check_storage, storage_folder, write_whole
from bishop_ray.search.leaderboard import rows_csv, rows_text
from bishop_ray.search.options import DataOptions, SearchOptions
from bishop_ray.search.plan import check_metric_fits, chosen_models, datasets, plan_studies

if TYPE_CHECKING:
    from bishop_ray.data.refs import DatasetRef
    from bishop_ray.paper.ablations.records import AblationRun
    from bishop_ray.paper.ablations.run import AblationConfig, AblationResult
    from bishop_ray.search.cluster import Cluster
    from bishop_ray.search.suite import Failure


SHOWN = (
    "dataset", "setting", "model", "metric", "runs", "failed", "validation", "test", "test_std", "difference",
    "difference_std", "paper", "paper_difference", "seconds", "note",
)  # fmt: skip


def ablate_parser() -> argparse.ArgumentParser:
    """The parser of ``jobs/ablate.py``."""
    parser = cli.Parser(
        prog="ablate.py",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Trains fixed configurations, several runs each, and compares their test scores. Nothing is\n"
        "searched or selected; the test split is opened once per run, after its training. The same\ncommand again "
        "trains only what is missing or has failed.\n\n"
        + "\n".join(f"  {name:12}{ablation.about} ({ablation.runs} runs)" for name, ablation in ABLATIONS.items()),
    )
    parser.add_argument("name", metavar="NAME", help=", ".join(ABLATIONS))
    data_flags(parser)
    _run_flags(parser)
    _place_flags(parser)
    return parser


def _run_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is run")
    group.add_argument("--runs", type=positive_int, metavar="N", help="trainings per setting (the paper's number)")
    group.add_argument("--settings", nargs="+", default=[], metavar="NAME", help="only these, and the base")
    group.add_argument("--models", nargs="+", default=[], metavar="NAME", help="sparsity: bishop, xgboost, lightgbm")
    add_flag(group, "space", help="its first point is the base configuration; default: as in tune.py")
    group.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="changes the base configuration, e.g. d_model=64 train.lr=1e-3 xgboost.max_depth=4",
    )  # fmt: skip
    add_flag(group, "max_epochs", help="epochs per run (200; small space: 30)")
    add_flag(group, "metric", help="auc for single tables, accuracy for suites, r2 for regression")
    add_flag(group, "seed", help="of split and runs (0)")
    training_flags(group)


def _place_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where runs are trained and kept")
    add_flag(group, "ray_address")
    add_flag(group, "max_concurrent", help="runs at a time (as many as fit)")
    add_flag(group, "cpus_per_trial", help="CPUs of each run (1)")
    add_flag(group, "gpus_per_trial", help="GPUs of each run")
    add_flag(group, "storage", help="records of runs (BISHOP_RAY_HOME)")
    add_flag(group, "tracking_uri")
    add_flag(group, "fresh", help="start the ablation over")
    group.add_argument(
        "--output", default="", metavar="FILE.csv", help="the table; every run and the curves go beside it"
    )


def run_ablate(args: argparse.Namespace) -> int:
    """The job; returns the exit code: 0, or 1 when a run or a dataset failed.

    Raises:
        UserError: Bad input; nothing was written.
    """
    quiet()
    options = _options(args)
    check_output(args.output)
    check_storage(storage_folder(options.storage))
    refs, failures = datasets(read(DataOptions, args))
    check_metric_fits(options.metric, refs)
    configs = _configs(args, options, refs, None)
    from bishop_ray.search.dataset import load
    from bishop_ray.tracking import check_tracking

    if len(configs) == 1:  # a single bad table is answered before anything is started
        load(configs[0].study)
    check_tracking(configs[0].study.tracking_uri)
    cluster = connect_cluster(options.ray_address)
    return _run(args, _configs(args, options, refs, cluster), failures)


def _options(args: argparse.Namespace) -> SearchOptions:
    """A study per model that takes part; names of models and settings are checked."""
    ablation = find(args.name)
    known = dict.fromkeys(part for name in args.models for part in name.split(",") if part)
    chosen(args.name, list(known), args.settings)
    models = chosen_models(list(known or ablation.models))
    if args.space is not None and len(models) > 1:
        raise UserError(f"--space goes with one model (every model has its own space); found {' '.join(models)}")
    runs = args.runs or ablation.runs
    return read(SearchOptions, args, models=models, eval_seeds=runs, trials=1, scheduler="none", trainer="inprocess")


def _configs(
    args: argparse.Namespace, options: SearchOptions, refs: Sequence[DatasetRef], cluster: Cluster | None
) -> list[AblationConfig]:
    """An ablation per dataset."""
    from bishop_ray.paper.ablations.run import AblationConfig
    from bishop_ray.paper.ablations.settings import base_params, given_values, settings_of
    from bishop_ray.tracking import tracking_uri

    options = replace(options, tracking_uri=tracking_uri(options.tracking_uri))
    given = given_values(args.set, list(options.models))
    found = []
    for ref in refs:
        studies = {study.model: study for study in plan_studies(options, [ref], cluster)}
        base = {m: base_params(args.name, m, s.space, given[m], s.max_epochs) for m, s in studies.items()}
        settings, bases = settings_of(args.name, base, args.settings)
        found.append(AblationConfig(args.name, settings, base, studies, bases))
    return found


def _run(args: argparse.Namespace, configs: Sequence[AblationConfig], failures: list[Failure]) -> int:
    from bishop_ray.paper.ablations.run import run_ablation
    from bishop_ray.search.suite import Failure

    _announce(configs)
    results: list[AblationResult] = []
    for config in configs:
        try:
            results.append(run_ablation(config, partial(_say, config)))
        except UserError as error:
            if len(configs) == 1:
                raise
            failures.append(Failure(config.study.ref.key, config.name, str(error)))
        else:
            _write(config.folder, "table.csv", results[-1:])
    failed = _conclude(args.output, results, failures)
    return cli.EXIT_FAILED if failed else 0


def _announce(configs: Sequence[AblationConfig]) -> None:
    first = configs[0]
    study, lines = first.study, [f"{first.name}: {ABLATIONS[first.name].about}"]
    for model, base in first.base.items():
        own = first.studies[model]
        values = [f"{key}={value}" for section in ("model", "train") for key, value in base[section].items()]
        steps = "epochs" if MODELS[model].kind == "network" else "reports"
        lines.append(f"{model}: up to {own.max_epochs} {steps}, first point of {own.space}: {' '.join(values)}")
    counts = f"{len(configs)} dataset(s), {len(first.settings)} setting(s), {study.eval_seeds} run(s) each"
    lines.append(f"{counts}, {study.max_concurrent} at a time")
    print("\n".join(lines), flush=True)


def _say(config: AblationConfig, record: AblationRun, done: int, total: int) -> None:
    """A line for a run that ended."""
    where = f"[{done}/{total}] {config.study.ref.key} {record.model} {record.setting} s{record.seed}"
    if record.test is None or record.validation is None:
        print(f"{where}: failed: {record.reason}", flush=True)
    else:
        scores = f"validation {record.validation:.4f}, test {record.test:.4f}"
        print(f"{where}: {scores} ({record.seconds:.0f}s, {record.reason})", flush=True)


def _conclude(output: str, results: Sequence[AblationResult], failures: Sequence[Failure]) -> int:
    """Prints the table and what went wrong, writes the CSV files; the number of failures."""
    from bishop_ray.paper.ablations.records import FAILED
    from bishop_ray.paper.ablations.summary import table

    if results:
        rows = table(results)
        print(f"\n{results[0].config.name}:\n{rows_text([{n: r[n] for n in SHOWN} for r in rows])}\n")
        for result in results:
            print(f"table, runs and curves: {result.config.folder}")
        if output:
            _write(Path(output).absolute().parent, Path(output).name, results)
            print(f"table: {output}")
        if not any(result.trained for result in results):
            print("finished before, nothing was trained (--fresh starts over)")
    failed = [(result, r) for result in results for r in result.records if r.status == FAILED]
    for result, record in failed:
        print(f"failed: {result.config.study.ref.key} {record.model} {record.setting} s{record.seed}: {record.reason}")
    for failure in failures:
        print(f"failed: {failure.dataset}: {failure.reason}")
    for result in results:
        if result.unsent:
            print(f"note: MLflow lacks runs, the same command sends them: {result.unsent}")
    return len(failed) + len(failures)


def _write(folder: Path, name: str, results: Sequence[AblationResult]) -> None:
    """The table, and beside it every run and the curves."""
    from bishop_ray.paper.ablations.summary import curve_rows, run_rows, table

    path = folder / name
    write_whole(path, rows_csv(table(results)))
    write_whole(path.with_name(f"{path.stem}-runs{path.suffix}"), rows_csv(run_rows(results)))
    write_whole(path.with_name(f"{path.stem}-curves{path.suffix}"), rows_csv(curve_rows(results)))
