"""``jobs/models.py list``, ``promote`` and ``rollback``: flags, and what they print."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bishop_ray import cli
from bishop_ray.errors import UserError
from bishop_ray.serve_cli import check_rows_file

if TYPE_CHECKING:
    Actions = argparse._SubParsersAction[cli.Parser]
    from bishop_ray.tracking.promotion import Moved
    from bishop_ray.tracking.versions import VersionRow

_ADDRESS = "the MLflow address (MLFLOW_TRACKING_URI)"


def add_registry_actions(actions: Actions) -> None:
    """Adds the three actions to the parser of ``jobs/models.py``."""
    text = "Lists registered models: versions, aliases, scores, and whether the gate let them pass."
    found = actions.add_parser("list", allow_abbrev=False, help="list registered models", description=text)
    found.add_argument("name", nargs="?", default="", metavar="NAME", help="one registered model (default: all)")
    found.add_argument("--json", action="store_true", help="print JSON, with reasons")
    found.add_argument("--tracking-uri", default="", metavar="URI", help=_ADDRESS)
    _add_promote(actions)
    text = (
        "Points an alias to the version it had before, once that has passed the gate; again, to the one before that. "
        "Exit code 1 where there is none, or the gate stays shut."
    )
    back = actions.add_parser("rollback", allow_abbrev=False, help="take an alias's last move back", description=text)
    back.add_argument("name", metavar="NAME", help="the registered model")
    back.add_argument("--alias", default="champion", metavar="ALIAS", help="the alias (champion)")
    back.add_argument("--force", action="store_true", help="move it although the gate stays shut")
    back.add_argument("--tracking-uri", default="", metavar="URI", help=_ADDRESS)


def _add_promote(actions: Actions) -> None:
    text = (
        "Points an alias to a version: its files must pass the gate, and a paired bootstrap must find it better than "
        "the version that has the alias now (lower end of the 90 % interval above 0), on the rows of a file, or on "
        "the validation rows where both were selected on the same. Exit code 1 where the alias stays."
    )
    promote = actions.add_parser("promote", allow_abbrev=False, help="point an alias to a version", description=text)
    promote.add_argument("name", metavar="NAME", help="the registered model")
    promote.add_argument("--version", type=cli.positive_int, required=True, metavar="N", help="the version")
    promote.add_argument("--alias", default="champion", metavar="ALIAS", help="the alias (champion)")
    promote.add_argument(
        "--holdout", default="", metavar="FILE", help="table with the target, of rows that neither version has seen"
    )
    promote.add_argument("--force", action="store_true", help="move it whatever gate and comparison say")
    promote.add_argument("--tracking-uri", default="", metavar="URI", help=_ADDRESS)


def run_registry(args: argparse.Namespace) -> int:
    """Does ``list``, ``promote`` or ``rollback``; returns the exit code, 1 where an alias stays.

    Raises:
        UserError: Bad input; nothing was changed.
    """
    from bishop_ray.tracking import check_tracking, tracking_uri

    uri = tracking_uri(args.tracking_uri)
    holdout = None
    if args.action == "promote" and args.holdout:
        holdout = Path(args.holdout).expanduser()
        try:
            check_rows_file(holdout)
        except UserError as error:
            raise UserError(f"--holdout: {error}") from None
    _check_there(uri)
    check_tracking(uri)
    if args.action == "list":
        from bishop_ray.tracking.versions import list_versions

        rows = list_versions(args.name, uri)
        print(json.dumps([asdict(row) for row in rows], indent=1) if args.json else _table(rows))
        return 0
    from bishop_ray.tracking.promotion import promote, rollback

    if args.action == "rollback":
        return _told(rollback(args.name, alias=args.alias, force=args.force, uri=uri))
    return _told(promote(args.name, args.version, alias=args.alias, holdout=holdout, force=args.force, uri=uri))


def _check_there(uri: str) -> None:
    """A question makes no store."""
    from bishop_ray.tracking.address import sqlite_path

    if uri.startswith("sqlite:") and not sqlite_path(uri).is_file():
        raise UserError(f"--tracking-uri: expected a store with registered models; found no file {sqlite_path(uri)}")


def _told(moved: Moved) -> int:
    print("\n".join(moved.lines))
    return 0 if moved.done else cli.EXIT_FAILED


def _table(rows: list[VersionRow]) -> str:
    from bishop_ray.listing import columns

    if not rows:
        return "no registered models"
    head = ("name", "version", "aliases", "model", "metric", "validation", "test", "gate", "created", "size")
    return columns([head, *(_cells(row) for row in rows)])


def _cells(row: VersionRow) -> tuple[str, ...]:
    def number(score: float | None) -> str:
        from bishop_ray.metrics import METRICS, display

        if score is None:
            return "-"
        return f"{display(row.metric, score) if row.metric in METRICS else score:.4f}"

    size = f"{row.size_bytes / 1e6:.2f} MB" if row.size_bytes else "-"
    gate = row.gate.partition(":")[0] or "-"
    return (
        row.name, str(row.version), ", ".join(row.aliases) or "-", row.model or "-", row.metric or "-",
        number(row.val_score), number(row.test_score), gate, row.created[:16].replace("T", " "), size,
    )  # fmt: skip
