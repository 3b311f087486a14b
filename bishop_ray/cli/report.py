"""The job ``jobs/report.py``: its flags, and what it prints. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
from pathlib import Path

from bishop_ray import cli
from bishop_ray.cli import quiet
from bishop_ray.errors import UserError
from bishop_ray.paths import storage_folder


def report_parser() -> argparse.ArgumentParser:
    """The parser of ``jobs/report.py``."""
    parser = cli.Parser(
        prog="report.py",
        allow_abbrev=False,
        description="Writes a report of studies from MLflow: one HTML page that needs no network, Markdown and CSV.",
    )
    parser.add_argument("studies", nargs="*", metavar="STUDY", help="names of studies, e.g. iris-bishop-s0")
    parser.add_argument("--experiment", default="", metavar="NAME", help="all studies of an MLflow experiment")
    parser.add_argument(
        "--paper-table",
        type=int,
        choices=(1, 2),
        default=0,
        metavar="N",
        help="all studies of datasets of the paper's table 1 or 2 (experiment paper-table-N, or --experiment)",
    )
    parser.add_argument(
        "--ablations",
        nargs="+",
        default=[],
        metavar="FILE.csv",
        help="runs of jobs/ablate.py that MLflow lacks (its FILE-runs.csv)",
    )
    parser.add_argument("--storage", default="", metavar="DIR", help="where the searches ran (BISHOP_RAY_HOME)")
    parser.add_argument("--study-db", default="", metavar="URL", help="the searches' own --study-db, if they had one")
    parser.add_argument("--tracking-uri", default="", metavar="URI", help="MLflow address (MLFLOW_TRACKING_URI)")
    parser.add_argument("--output", default="", metavar="DIR", help="folder of the report (STORAGE/reports/NAME)")
    return parser


def run_report(args: argparse.Namespace) -> int:
    """The job; returns the exit code.

    Raises:
        UserError: Bad input; nothing was written.
    """
    if bool(args.studies) == bool(args.experiment or args.paper_table):
        found = "both" if args.studies else "none of them"
        raise UserError(f"expected names of studies, or --experiment or --paper-table; found {found}")
    quiet()
    storage = storage_folder(args.storage)
    output = Path(args.output).expanduser().absolute() if args.output else None
    if output is not None and output.exists() and not output.is_dir():
        raise UserError(f"--output: expected a folder; found the file {output}")
    from bishop_ray.report.build import make_report
    from bishop_ray.report.collect import Selection

    selection = Selection(tuple(dict.fromkeys(args.studies)), args.experiment, args.paper_table)
    written = make_report(
        selection,
        storage=storage,
        uri=args.tracking_uri,
        output=output,
        ablations=[Path(file).expanduser() for file in args.ablations],
        study_db=args.study_db,
    )
    print(f"{len(written.tables)} tables, {written.figures} figures")
    print(f"report: {written.folder / 'report.html'} (also report.md, and a CSV file per table)")
    print(f"in MLflow: run {written.run_id}, artifacts report/")
    return 0
