"""Runs that a study left open or incomplete: its process was killed, or MLflow was away when it ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bishop_ray.tracking.client import CALL_SECONDS, as_user_error, open_client, quoted, search_all
from bishop_ray.tracking.sink import OPEN, PARENT, Event, RunSink, end_of, number_of
from bishop_ray.tracking.spool import replay_spool

if TYPE_CHECKING:
    from mlflow.entities import Run

    from bishop_ray.tracking.logger import KnownTrial


def settle(uri: str, experiment: str, study_id: str, spool: Path, status: str, reason: str) -> int:
    """Sends what waits in the spool, then ends every run of the study that is still open.

    Args:
        uri: MLflow address.
        experiment: The study's experiment.
        study_id: The study's identity.
        spool: Its spool file, which need not exist.
        status: For the parent run; trials still open are KILLED. FINISHED also counts where it was KILLED before.
        reason: Kept as the tag ``bishop.reason``.

    Returns:
        The number of runs that were ended.

    Raises:
        SourceUnavailable: MLflow does not answer; nothing is lost.
    """
    replay_spool(spool, uri, status, reason)
    client = open_client(uri, CALL_SECONDS)
    ended = 0
    try:
        found = client.get_experiment_by_name(experiment)
        if found is None:
            return 0
        for run in search_all(client, [found.experiment_id], f"tags.`bishop.study_id` = {quoted(study_id)}"):
            is_parent = run.data.tags.get("bishop.kind") == "study"
            if run.info.status in OPEN or (is_parent and (run.info.status, status) == ("KILLED", "FINISHED")):
                client.set_tag(run.info.run_id, "bishop.reason", reason)
                client.set_terminated(run.info.run_id, status if is_parent else "KILLED")
                ended += 1
    except Exception as error:
        raise as_user_error(error, uri) from error
    return ended


def complete(uri: str, study_id: str, trials: Sequence[KnownTrial], status: str, reason: str) -> int:
    """Brings the runs of a study that does not run to where the study on disk is, and ends them.

    Args:
        uri: MLflow address.
        study_id: The study's identity.
        trials: What the study has; empty where it has none of its own.
        status: For the parent run, unless it has FINISHED.
        reason: Kept as the tag ``bishop.reason`` of what was still open.

    Returns:
        The number of runs that were not as they should be; 0 when MLflow has no run of the study.

    Raises:
        SourceUnavailable: MLflow does not answer; nothing is lost.
    """
    client = open_client(uri, CALL_SECONDS)
    try:
        places = {str(found.experiment_id): str(found.name) for found in client.search_experiments()}
        runs = search_all(client, list(places), f"tags.`bishop.study_id` = {quoted(study_id)}", deleted=True)
        parents = [run for run in runs if number_of(run) == PARENT and run.info.lifecycle_stage == "active"]
        if not parents or not (wrong := _wrong(runs, trials, status)):
            return 0
        parent = parents[0]
        if parent.info.status == "FINISHED":
            status = "FINISHED"
        now = time.time_ns() // 1_000_000
        end = {"kind": "close", "time": now, "status": status, "reason": reason, "child_reason": reason}
        header = _header(parent, places[str(parent.info.experiment_id)])
        RunSink(uri).apply([header, *(trial.event() for trial in trials), end])
    except Exception as error:
        raise as_user_error(error, uri) from error
    return wrong


def _wrong(runs: Sequence[Run], trials: Sequence[KnownTrial], status: str) -> int:
    """How many runs are open, ended otherwise than in the study, doubled or missing."""
    wanted = {trial.number: (trial.status, dict(trial.tags)) for trial in trials if trial.status}
    found: dict[int, str] = {}
    wrong = 0
    for run in runs:
        number = number_of(run)
        if run.info.lifecycle_stage == "deleted":
            wanted.pop(number, None)  # someone does not want it
        elif number in found or run.info.status in OPEN:
            wrong += 1
        elif number == PARENT:
            wrong += (run.info.status, status) == ("KILLED", "FINISHED")
        else:
            wrong += wanted.get(number, end_of(run)) != end_of(run)
        found.setdefault(number, run.info.status)
    return wrong + len(wanted.keys() - found.keys())


def _header(parent: Run, experiment: str) -> Event:
    """The study's header event again, from its run."""
    tags: dict[str, Any] = {k: v for k, v in parent.data.tags.items() if not k.startswith(("mlflow.", "bishop."))}
    return {
        "kind": "study",
        "time": parent.info.start_time,
        "experiment": experiment,
        "study": parent.data.tags["bishop.study"],
        "study_id": parent.data.tags["bishop.study_id"],
        "params": {},
        "tags": tags,
        "texts": {},
    }
