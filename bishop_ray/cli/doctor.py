"""The job ``jobs/doctor.py``: its flags, what it does with them, and what it prints.

Nothing heavy is imported before it is needed: ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bishop_ray import cli
from bishop_ray.cli import check_output, quiet
from bishop_ray.cli.flags import add_flag, add_group, read
from bishop_ray.data.refs import EMBEDDED, NO_ROLES, DatasetRef, file_ref
from bishop_ray.errors import BadTable, UserError
from bishop_ray.paths import write_whole
from bishop_ray.search import plan
from bishop_ray.search.options import ROWS, DataOptions, SearchOptions

if TYPE_CHECKING:
    import pandas as pd

    from bishop_ray.config import StudyConfig
    from bishop_ray.data.doctor.findings import TableReport
    from bishop_ray.data.table import RawDataset
    from bishop_ray.search.dry_run import DryRun


_WIDEST = 100
"""Characters of a finding's text; JSON has all of it."""


def doctor_parser() -> argparse.ArgumentParser:
    """The parser of ``jobs/doctor.py``."""
    parser = cli.Parser(
        prog="doctor.py",
        allow_abbrev=False,
        description="Says what is in a table, what a search will do with it and what would make its scores mislead; "
        "then trains the chosen models for a moment on 100 rows. Exit code 0: nothing to look at; 1: a leak, repeated "
        "rows or a model that fails; 2: a search would refuse the table, with this line.",
    )
    parser.add_argument("table", nargs="?", metavar="TABLE", help="a .csv, .tsv or .parquet file")
    add_flag(parser, "target", help="target column of TABLE")
    add_flag(parser, "task_type")
    add_flag(parser, "dataset", nargs=None, help="instead of TABLE: a name of tune.py --list-datasets")
    add_flag(parser, "data_dir")
    add_flag(parser, "openml_server")
    add_flag(parser, "models", help="to be tried, or all (bishop)")
    parser.add_argument("--no-dry-run", action="store_true", help="only look at the table; train nothing")
    add_flag(parser, "seed", help="seed of the split (0)")
    add_group(parser, ROWS)
    parser.add_argument("--json", default="", metavar="FILE", help="write all of it as JSON; - for standard output")
    return parser


def run_doctor(args: argparse.Namespace) -> int:
    """The job; returns the exit code: 0, or 1 when there is something that a person must look at.

    Raises:
        UserError: A search would refuse the table, with the very line; what was found until then is printed.
    """
    quiet()
    logging.getLogger("bishop_ray").setLevel(logging.ERROR)  # what is logged while reading is among the findings
    models = plan.chosen_models(args.models)
    if args.json != "-":
        check_output(args.json, "--json")
    ref = replace(_ref(args), roles=plan.roles_of(read(DataOptions, args)))
    report, raw = _examined(args, ref)
    tried: list[DryRun] = []
    if raw is not None:
        report = _checked(report, _config(args, ref, models[0]), raw)
    if raw is not None and not report.refused and not args.no_dry_run:
        from bishop_ray.search.dry_run import try_model

        tried = [try_model(_config(args, ref, model), raw) for model in models]
    bad = bool(report.warnings) or any(tryout.outcome == "failed" for tryout in tried)
    code = cli.EXIT_USER if report.refused else int(bad)
    text = json.dumps({**report.to_dict(), "models": [asdict(t) for t in tried], "exit_code": code}, indent=1)
    if args.json == "-":
        print(text)
    else:
        print("\n".join(_lines(report, tried)))
        if args.json:
            write_whole(Path(args.json), text)
            print(f"report: {args.json}")
    if report.refused:
        raise BadTable(report.refused)
    return code


def _ref(args: argparse.Namespace) -> DatasetRef:
    if (args.table is None) == (args.dataset is None):
        found = "both" if args.table else "none"
        raise UserError(f"expected one of TABLE, --dataset; found {found}")
    if args.table is not None:
        if args.data_dir:
            raise UserError(f"--data-dir goes with --dataset; found {args.table}")
        return file_ref(args.table, args.target or "", args.task_type or "")
    for flag, value in (("--target", args.target), ("--task-type", args.task_type)):
        if value:
            raise UserError(f"{flag} goes with TABLE; found --dataset")
    from bishop_ray.data.paper_datasets import PAPER_SETS

    data = read(DataOptions, args)
    return plan.named_ref(plan.known("dataset", data.dataset or (), (*EMBEDDED, *PAPER_SETS))[0], data)


def _examined(args: argparse.Namespace, ref: DatasetRef) -> tuple[TableReport, RawDataset | None]:
    """The report, and the table as a search reads it, or None when it is refused."""
    from bishop_ray.data.doctor import examine
    from bishop_ray.data.doctor.findings import REFUSED, Finding, TableReport
    from bishop_ray.data.schema import make_raw, with_roles
    from bishop_ray.data.split import protocol

    task, where, categorical = ref.task_type, ref.locator if ref.kind == "file" else "", None
    if ref.kind == "file":
        from bishop_ray.data.files import read_frame

        try:
            frame, target = read_frame(ref.locator), ref.target
        except BadTable as error:
            refusal = Finding("refused", "", str(error), REFUSED)
            return TableReport(ref.name, ref.target, findings=(refusal,), refused=str(error)), None
    else:
        frame, target, task, categorical = _named(ref)
    report = examine(
        frame, target, task_type=task, categorical=categorical, name=ref.name, where=where,
        seed=args.seed, split=protocol(ref), roles=ref.roles,
    )  # fmt: skip
    if report.refused:
        return report, None
    return report, with_roles(make_raw(ref.name, frame, target, task, categorical, where), ref.roles, where)


def _named(ref: DatasetRef) -> tuple[pd.DataFrame, str, str, tuple[str, ...]]:
    """Columns, target, task type and categories of a table by name."""
    from bishop_ray.data.load import load_dataset

    raw = load_dataset(replace(ref, roles=NO_ROLES))
    name = str(raw.target.name)
    return raw.frame.assign(**{name: raw.target}), name, raw.task.value, raw.categorical


def _config(args: argparse.Namespace, ref: DatasetRef, model: str) -> StudyConfig:
    options = SearchOptions(models=(model,), trials=1, seed=args.seed)
    return plan.plan_studies(options, [ref], None)[0]


def _checked(report: TableReport, config: StudyConfig, raw: RawDataset) -> TableReport:
    """The report, refused where a search would refuse the parts of the split."""
    from bishop_ray.data.doctor.findings import REFUSED, Finding
    from bishop_ray.search.dataset import divide

    try:
        divide(config, raw)
    except UserError as error:
        refusal = Finding("refused", "", str(error), REFUSED)
        return replace(report, findings=(refusal, *report.findings), refused=str(error))
    return report


def _lines(report: TableReport, tried: Sequence[DryRun]) -> list[str]:
    from bishop_ray.data.doctor.findings import shortened
    from bishop_ray.search.leaderboard import columns

    lines = [_summary(report)]
    found = shortened(report.findings)
    if found:
        rows = [("finding", "column", "what", "will be"), *((f.kind, f.column, f.detail, f.action) for f in found)]
        lines.append(columns([tuple(_cut(cell) for cell in row) for row in rows]))
    else:
        lines.append("no findings")
    if tried:
        lines.append("dry run on 100 rows: " + "; ".join(map(_words, tried)))
    return lines


def _summary(report: TableReport) -> str:
    """Rows, columns by kind, target."""
    if not report.task:
        return f"{report.name}: not read to its end"
    kinds = Counter(column.read_as or "column" for column in report.columns)
    shown = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
    classes = ", ".join(f"{label} {count:,}" for label, count in report.classes[:5])
    more = f" and {len(report.classes) - 5} more classes" if len(report.classes) > 5 else ""
    target = f"{report.task} ({classes}{more})" if classes else report.task
    return f"{report.name}: {report.rows:,} rows; columns: {shown or 'none'}; target {report.target}: {target}"


def _words(tryout: DryRun) -> str:
    time = f" ({tryout.seconds:.1f} s)" if tryout.outcome == "ok" else ""
    return f"{tryout.model} {tryout.outcome}{time}{': ' + tryout.reason if tryout.reason else ''}"


def _cut(text: Any) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= _WIDEST else f"{line[: _WIDEST - 3]}..."
