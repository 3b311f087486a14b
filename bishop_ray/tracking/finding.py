"""A study's own run, found again by the study's identity."""

from __future__ import annotations

from bishop_ray.errors import UserError
from bishop_ray.tracking.address import public_uri, sqlite_path, tracking_uri
from bishop_ray.tracking.store import CALL_SECONDS, as_user_error, check_tracking, open_client, quoted, search_all


def study_run(uri: str, experiment: str, study: str, study_id: str) -> str:
    """The id of a study's parent run, the earliest of several.

    Args:
        uri: MLflow address, see `tracking_uri`.
        experiment: The study's experiment.
        study: Name of the study, for messages.
        study_id: The study's identity.

    Raises:
        UserError: No such run here: another store than the study's, or the run was deleted.
        SourceUnavailable: MLflow does not answer.
    """
    uri = tracking_uri(uri)
    if uri.startswith("sqlite:") and not sqlite_path(uri).is_file():  # checking would create it
        raise UserError(f"--tracking-uri: expected the MLflow store that {study} wrote to; no file {sqlite_path(uri)}")
    check_tracking(uri)
    client = open_client(uri, CALL_SECONDS)
    try:
        found = client.get_experiment_by_name(experiment)
        wanted = f"tags.`bishop.study_id` = {quoted(study_id)} AND tags.`bishop.kind` = 'study'"
        runs = search_all(client, [found.experiment_id], wanted) if found is not None else []
    except Exception as error:
        raise as_user_error(error, uri) from error
    if not runs:
        raise UserError(
            f"--tracking-uri: expected the MLflow store that {study} wrote to; no run of it in {public_uri(uri)}"
        )
    return str(runs[0].info.run_id)
