"""The leaderboard of a suite, beside each of its studies."""

from __future__ import annotations

from collections.abc import Sequence

from bishop_ray.tracking.store import CALL_SECONDS, as_user_error, open_client

SUITE_FILE = "suite_leaderboard.csv"


def log_leaderboard(uri: str, run_ids: Sequence[str], text: str) -> None:
    """Writes the suite's leaderboard (CSV) to the parent runs of its studies.

    Raises:
        UserError: MLflow does not answer.
    """
    from mlflow.exceptions import MlflowException

    client = open_client(uri, CALL_SECONDS)
    try:
        for run_id in run_ids:
            client.log_text(run_id, text, SUITE_FILE)
    except MlflowException as error:
        raise as_user_error(error, uri) from error
