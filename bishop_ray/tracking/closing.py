"""Runs that a study left open: its process was killed, or MLflow was away when it ended."""

from __future__ import annotations

from pathlib import Path

from bishop_ray.tracking.spool import replay_spool
from bishop_ray.tracking.store import as_user_error, open_client, quoted, search_all


def settle(uri: str, experiment: str, study_id: str, spool: Path, status: str, reason: str) -> int:
    """Sends what waits in the spool, then ends every run of the study that is still open.

    Args:
        uri: MLflow address.
        experiment: The study's experiment.
        study_id: The study's identity.
        spool: Its spool file, which need not exist.
        status: For the parent run; trials still open are KILLED.
        reason: Kept as the tag ``bishop.reason``.

    Returns:
        The number of runs that were ended.

    Raises:
        SourceUnavailable: MLflow does not answer; nothing is lost.
    """
    replay_spool(spool, uri)
    client = open_client(uri)
    try:
        found = client.get_experiment_by_name(experiment)
        if found is None:
            return 0
        runs = search_all(client, [found.experiment_id], f"tags.`bishop.study_id` = {quoted(study_id)}")
        left = [run for run in runs if run.info.status in ("RUNNING", "SCHEDULED")]
        for run in left:
            is_parent = run.data.tags.get("bishop.kind") == "study"
            client.set_tag(run.info.run_id, "bishop.reason", reason)
            client.set_terminated(run.info.run_id, status if is_parent else "KILLED")
    except Exception as error:
        raise as_user_error(error, uri) from error
    return len(left)
