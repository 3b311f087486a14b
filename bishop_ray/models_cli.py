"""The job ``jobs/models.py``: its flags, what it does with them, and what it prints.

Nothing heavy is imported before it is needed: ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bishop_ray import cli, commands, explain_cli
from bishop_ray.errors import UserError
from bishop_ray.home import storage_folder
from bishop_ray.registry_cli import add_registry_actions, run_registry
from bishop_ray.replay_cli import add_replay, run_replay

if TYPE_CHECKING:
    Actions = argparse._SubParsersAction[cli.Parser]
    from bishop_ray.tuning.rebuild import Rebuilt


def models_parser() -> argparse.ArgumentParser:
    """The parser of ``jobs/models.py``."""
    parser = cli.Parser(
        prog="models.py", allow_abbrev=False, description="Works with what searches have left: models, records of runs."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add_registry_actions(actions)
    _add_ensemble(actions)
    _add_sync(actions)
    explain_cli.add_explain(actions)
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
        return explain_cli.run_explain(args)
    commands.quiet()
    if args.action == "replay":
        return run_replay(args)
    if args.action in ("list", "promote", "rollback"):
        return run_registry(args)
    storage = storage_folder(args.storage)
    return _sync(args, storage) if args.action == "sync" else _ensemble(args, storage)


def _sync(args: argparse.Namespace, storage: Path) -> int:
    from bishop_ray.tuning.sync import sync_studies

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
    from bishop_ray.tracking import tracking_uri
    from bishop_ray.tuning.rebuild import NoEnsemble, rebuild_ensemble

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
    from bishop_ray.listing import columns
    from bishop_ray.metrics import display
    from bishop_ray.reports import refused, standing
    from bishop_ray.screen import show_loading

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
