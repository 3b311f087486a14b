"""Command ``jobs/models.py``: list, promote, rollback, ensemble, sync, replay.

Nothing heavy is imported before it is needed: ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bishop_ray import cli
from bishop_ray.cli import explain, quiet
from bishop_ray.cli.serve import check_rows_file
from bishop_ray.errors import UserError
from bishop_ray.paths import storage_folder

if TYPE_CHECKING:
    from bishop_ray.search.rebuild import Rebuilt

    Actions = argparse._SubParsersAction[cli.Parser]
    from bishop_ray.registry.loading import VersionRow
    from bishop_ray.registry.promote import Moved
    from bishop_ray.search.replay import Replayed


def models_parser() -> argparse.ArgumentParser:
    """The parser of ``jobs/models.py``."""
    parser = cli.Parser(
        prog="models.py", allow_abbrev=False, description="Works with what searches have left: models, records of runs."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add_registry_actions(actions)
    _add_ensemble(actions)
    _add_sync(actions)
    explain.add_explain(actions)
    add_replay(actions)
    return parser


def _add_ensemble(actions: Actions) -> None:
    text = (
        "Builds the ensemble of a search over several models again, from the trained models and their predictions of "
        "the validation rows that the search left on disk, and registers it. Nothing is trained, no data are read and "
        "the test split stays closed, so there is no test score."
    )
    ensemble = actions.add_parser("ensemble", allow_abbrev=False, help="rebuild a search's ensemble", description=text)
    ensemble.add_argument(
        "study", metavar="STUDY", help="its folder in STORAGE/studies, e.g. iris-automl-s0, or the dataset, e.g. iris"
    )
    ensemble.add_argument(
        "--top-k",
        type=cli.positive_int,
        default=5,
        metavar="N",
        help="trials of each model that take part (5: all kept)",
    )
    ensemble.add_argument(
        "--steps", type=cli.positive_int, default=50, metavar="N", help="members drawn by greedy selection (50)"
    )
    ensemble.add_argument("--storage", default="", metavar="DIR", help="where the search ran (BISHOP_RAY_HOME)")
    ensemble.add_argument(
        "--tracking-uri", default="", metavar="URI", help="the search's MLflow address (MLFLOW_TRACKING_URI)"
    )
    ensemble.add_argument("--output", default="", metavar="FOLDER", help="also save the ensemble here, without MLflow")


def _add_sync(actions: Actions) -> None:
    text = (
        "Sends to MLflow what searches could not send while it was away, completes their runs from the studies on "
        "disk, and ends the runs of searches that were killed and do not run any more. Called again, it changes "
        "nothing."
    )
    sync = actions.add_parser(
        "sync", allow_abbrev=False, help="bring MLflow to where the studies are", description=text
    )
    sync.add_argument(
        "study", nargs="?", default="", metavar="STUDY", help="its folder in STORAGE/studies (default: all of them)"
    )
    sync.add_argument("--storage", default="", metavar="DIR", help="where the searches ran (BISHOP_RAY_HOME)")
    sync.add_argument("--tracking-uri", default="", metavar="URI", help="the MLflow address (MLFLOW_TRACKING_URI)")
    sync.add_argument("--study-db", default="", metavar="URL", help="the searches' own --study-db, if they had one")


def run_models(args: argparse.Namespace) -> int:
    """The job; returns the exit code.

    It is 1 when one model alone scores best, so that there is no ensemble, when a study could not be synced, and when
    an alias stays where it is.

    Raises:
        UserError: Bad input; nothing was written.
    """
    if args.action == "explain":
        return explain.run_explain(args)
    quiet()
    if args.action == "replay":
        return run_replay(args)
    if args.action in ("list", "promote", "rollback"):
        return run_registry(args)
    storage = storage_folder(args.storage)
    return _sync(args, storage) if args.action == "sync" else _ensemble(args, storage)


def _sync(args: argparse.Namespace, storage: Path) -> int:
    from bishop_ray.search.sync import sync_studies

    code, changed = 0, 0
    for done in sync_studies(storage, args.study, args.tracking_uri, args.study_db):
        if done.problem:
            print(f"{done.study}: left alone: {done.problem}")
            code = cli.EXIT_FAILED
        elif done.events or done.runs:
            print(f"{done.study}: {done.events} events sent, {done.runs} runs completed")
            changed += 1
    if not changed and not code:
        print(f"nothing to do: MLflow has all of the studies in {storage / 'studies'}")
    return code


def _ensemble(args: argparse.Namespace, storage: Path) -> int:
    output = Path(args.output).expanduser() if args.output else None
    if output is not None:
        _check_folder(output)
    from bishop_ray.search.rebuild import NoEnsemble, rebuild_ensemble
    from bishop_ray.tracking import tracking_uri

    uri = tracking_uri(args.tracking_uri)
    try:
        rebuilt = rebuild_ensemble(storage, args.study, top_k=args.top_k, steps=args.steps, uri=uri)
    except NoEnsemble as reason:
        _show_left_out(reason.left_out)
        print(reason)
        return cli.EXIT_FAILED
    _show(rebuilt, uri)
    if output is not None:
        rebuilt.predictor.save(output)
        print(f"saved: {output}")
    return 0


def _check_folder(output: Path) -> None:
    """A folder is replaced as a whole: only what an earlier call wrote, or an empty one, may be.

    Raises:
        UserError: Anything else is there, or nothing can be.
    """
    wanted = f"--output: expected a new folder in an existing one; found {str(output)!r}"
    if not output.absolute().parent.is_dir() or (output.exists() and not output.is_dir()):
        raise UserError(wanted)
    if output.is_dir() and (others := {path.name for path in output.iterdir()} - {"predictor.json", "members"}):
        raise UserError(f"{wanted}, which holds {min(others)}")


def _show_left_out(reasons: Sequence[str]) -> None:
    for reason in reasons:
        print(f"left out: {reason}")


def _show(rebuilt: Rebuilt, uri: str) -> None:
    """Prints members, scores and how to use what was registered."""
    from bishop_ray.cli.console import show_loading
    from bishop_ray.metrics import display
    from bishop_ray.search.leaderboard import columns, refused, standing

    def number(score: float) -> str:
        return f"{display(rebuilt.metric, score):.4f}"

    _show_left_out(rebuilt.left_out)
    members = rebuilt.ensemble.members
    print(f"{rebuilt.search}: {len(members)} members of {len(rebuilt.candidates)} trained models\n")
    rows = [("weight", "model", "trial", f"validation {rebuilt.metric}")]
    rows += [(f"{weight:.2f}", c.model, str(c.number), number(c.score)) for c, weight in members]
    print(columns(rows))
    best, model = rebuilt.candidates[0], rebuilt.registered
    how = "cross-fitted: weights chosen on four fifths of the validation rows, scored on the fifth"
    scores = [
        ("ensemble", number(rebuilt.ensemble.score), how),
        ("", number(rebuilt.fitted_score), "on the rows that chose its weights, better than it is"),
        ("best single model", number(best.score), f"{best.model} (trial {best.number})"),
    ]
    print(f"\n{columns(scores)}\nno test score: the test split stays closed\n")
    state = "registered model" if model.created else "registered before, no new version"
    alias = "no alias" if refused(model.verdict) else "alias ensemble"
    title = standing(model.champion, model.verdict)
    print(f"{state}: {model.name} (version {model.version}, {alias}, trained on train; {title})")
    show_loading(model.name, "" if model.champion else str(model.version), uri)


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
        from bishop_ray.registry.loading import list_versions

        rows = list_versions(args.name, uri)
        print(json.dumps([asdict(row) for row in rows], indent=1) if args.json else _table(rows))
        return 0
    from bishop_ray.registry.promote import promote, rollback

    if args.action == "rollback":
        return _told(rollback(args.name, alias=args.alias, force=args.force, uri=uri))
    return _told(promote(args.name, args.version, alias=args.alias, holdout=holdout, force=args.force, uri=uri))


def _check_there(uri: str) -> None:
    """A question makes no store."""
    from bishop_ray.tracking.client import sqlite_path

    if uri.startswith("sqlite:") and not sqlite_path(uri).is_file():
        raise UserError(f"--tracking-uri: expected a store with registered models; found no file {sqlite_path(uri)}")


def _told(moved: Moved) -> int:
    print("\n".join(moved.lines))
    return 0 if moved.done else cli.EXIT_FAILED


def _table(rows: list[VersionRow]) -> str:
    from bishop_ray.search.leaderboard import columns

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


def add_replay(actions: argparse._SubParsersAction[cli.Parser]) -> None:
    """The action and its flags."""
    text = (
        "Trains a recorded trial again, with the same rows, parameters, seed and number of epochs, on one CPU thread, "
        "and compares its validation score with the recorded one. Exit code 0: they differ by at most 1e-6; 1: by "
        "more, and it says what else is different; 2: the run cannot be repeated. The test split stays closed, and "
        "nothing is written."
    )
    replay = actions.add_parser("replay", allow_abbrev=False, help="train a run again, compare", description=text)
    replay.add_argument("run", metavar="RUN_ID", help="MLflow's id of a trial, or of a study: its best trial")
    replay.add_argument("--table", default="", metavar="FILE", help="where the study's table lies, if it has moved")
    replay.add_argument("--tracking-uri", default="", metavar="URI", help="the MLflow address (MLFLOW_TRACKING_URI)")


def run_replay(args: argparse.Namespace) -> int:
    """The action; returns the exit code.

    Raises:
        UserError: The run cannot be repeated.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported: the comparison is one of CPU trainings
    from bishop_ray.search.replay import replay_run

    replayed = replay_run(args.run, args.tracking_uri, args.table)
    print("\n".join(lines(replayed)))
    return 0 if replayed.same else cli.EXIT_FAILED


def lines(replayed: Replayed) -> list[str]:
    """What is printed: one line where the score came out again."""
    from bishop_ray.metrics import display
    from bishop_ray.search.replay import TOLERANCE

    def shown(score: float) -> str:
        return f"{display(replayed.metric, score):.9g}"

    what = f"{replayed.study} trial {replayed.trial}"
    after = f"validation {replayed.metric} {shown(replayed.recorded)} after {replayed.epochs} epochs"
    if replayed.found is None:
        said = [f"{what}: recorded {after}; not so again: {replayed.problem}"]
    elif replayed.same:
        return [f"{what}: {after}, and {shown(replayed.found)} again: difference {replayed.difference:.1e}"]
    else:
        words = f"difference {replayed.difference:.1e}, more than {TOLERANCE:g}"
        said = [f"{what}: recorded {after}; {shown(replayed.found)} now: {words}"]
    if replayed.untold:
        said.append(f"the limit of {TOLERANCE:g} holds for one CPU thread both times: {replayed.untold}")
    said.append(f"what differs: {'; '.join(replayed.differs) or 'nothing that was recorded'}")
    return said
