"""What a search over several models ended with, kept in its folder: the same command need not run again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from bishop_ray.config import Skipped, StudyConfig, StudyResult
from bishop_ray.home import write_whole
from bishop_ray.tracking import SPOOL, settle
from bishop_ray.tuning.facts import IDENTITY
from bishop_ray.tuning.store import OpenStudy
from bishop_ray.tuning.trials import count_states

RESULT = "result.json"


def keep_outcome(
    folder: Path,
    whole: StudyConfig,
    opened: Mapping[str, OpenStudy],
    results: Sequence[StudyResult],
    without: Sequence[Skipped],
) -> None:
    """Writes the outcome.

    Args:
        folder: Of the search.
        whole: The search as a study of its own.
        opened: Its studies by model.
        results: As `StudyResult`s, best first.
        without: Models without a trained trial.
    """
    done = _done(opened)
    row = {
        "models": list(opened),
        "refit": whole.refit,
        # Without a time budget a search ends when all trials are there, or when nothing is left to try.
        "trials": done if whole.time_budget else max(done, whole.trials),
        "done": done,
        "results": [asdict(result) for result in results],
        "without": [asdict(skipped) for skipped in without],
    }
    write_whole(folder / RESULT, json.dumps(row))


def kept_outcome(
    folder: Path, whole: StudyConfig, opened: Mapping[str, OpenStudy]
) -> tuple[list[StudyResult], list[Skipped]] | None:
    """The stored outcome, if this very command ended before; arguments as in `keep_outcome`."""
    if not (folder / RESULT).is_file():
        return None
    stored = json.loads((folder / RESULT).read_text("utf-8"))
    if stored["models"] != list(opened) or stored["refit"] != whole.refit:
        return None
    if max(stored["trials"], _done(opened)) < whole.trials or _done(opened) < stored["done"]:
        return None
    # A process that was killed at the very end left its runs open.
    end_runs(whole, folder, (folder / IDENTITY).read_text("utf-8"), "FINISHED", "finished")
    for study in opened.values():
        end_runs(whole, study.folder, study.identity, "FINISHED", "finished")
    return [StudyResult(**row | {"reused": True}) for row in stored["results"]], [
        Skipped(**row) for row in stored["without"]
    ]


def end_runs(whole: StudyConfig, folder: Path, identity: str, status: str, reason: str) -> None:
    """Ends what the study in `folder` left open in MLflow."""
    settle(whole.tracking_uri, whole.ref.experiment, identity, folder / SPOOL, status, reason)


def _done(opened: Mapping[str, OpenStudy]) -> int:
    return sum(count_states(o.study).total() for o in opened.values())
