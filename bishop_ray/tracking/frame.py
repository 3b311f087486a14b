"""Runs of MLflow as a DataFrame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bishop_ray.errors import UnknownName
from bishop_ray.tracking.address import tracking_uri
from bishop_ray.tracking.store import CALL_SECONDS, open_client, quoted, search_all

if TYPE_CHECKING:
    import pandas as pd
    from mlflow.entities import Run


def runs_frame(uri: str = "", experiment: str = "", study: str = "") -> pd.DataFrame:
    """Runs as a DataFrame: run_id, name, kind, trial, status, start, end, ``params.*``, ``metrics.*``, ``tags.*``.

    Args:
        uri: MLflow address, see `tracking_uri`.
        experiment: Only this experiment; empty for all.
        study: Only the runs of this study (parent and trials); empty for all.

    Raises:
        UnknownName: No such experiment.
    """
    import pandas as pd

    client = open_client(tracking_uri(uri), CALL_SECONDS)
    known = {str(found.name): str(found.experiment_id) for found in client.search_experiments()}
    if experiment and experiment not in known:
        raise UnknownName("experiment", experiment, known)
    ids = [known[experiment]] if experiment else list(known.values())
    runs = search_all(client, ids, f"tags.`bishop.study` = {quoted(study)}" if study else "") if ids else []
    return pd.DataFrame([_row(run) for run in runs])


def _row(run: Run) -> dict[str, Any]:
    tags = run.data.tags
    row: dict[str, Any] = {
        "run_id": run.info.run_id,
        "name": run.info.run_name,
        "kind": tags.get("bishop.kind", ""),
        "trial": int(tags["bishop.trial"]) if tags.get("bishop.trial", "").isdigit() else -1,
        "status": run.info.status,
        "start": run.info.start_time,
        "end": run.info.end_time,
    }
    row |= {f"params.{key}": value for key, value in run.data.params.items()}
    row |= {f"metrics.{key}": value for key, value in run.data.metrics.items()}
    row |= {f"tags.{key}": value for key, value in tags.items() if not key.startswith("mlflow.")}
    return row
