"""``jobs/models.py replay``: its flags and what it prints. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from bishop_ray import cli

if TYPE_CHECKING:
    from bishop_ray.tuning.replay import Replayed


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
    from bishop_ray.tuning.replay import replay_run

    replayed = replay_run(args.run, args.tracking_uri, args.table)
    print("\n".join(lines(replayed)))
    return 0 if replayed.same else cli.EXIT_FAILED


def lines(replayed: Replayed) -> list[str]:
    """What is printed: one line where the score came out again."""
    from bishop_ray.metrics import display
    from bishop_ray.tuning.replay import TOLERANCE

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
