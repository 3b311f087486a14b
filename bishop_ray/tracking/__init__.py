"""MLflow tracking: runs of studies and trials, and queries over them. Importing it does not import mlflow.

Importing this package does not import mlflow; the functions do, when called.
"""

from __future__ import annotations

from bishop_ray.tracking.client import check_tracking, public_uri, tracking_uri
from bishop_ray.tracking.closing import complete, settle
from bishop_ray.tracking.environment import environment
from bishop_ray.tracking.logger import KnownTrial, StudyTracker
from bishop_ray.tracking.query import runs_frame, study_run
from bishop_ray.tracking.sink import STOPPED_TAG
from bishop_ray.tracking.spool import SPOOL, replay_spool

__all__ = [
    "SPOOL",
    "STOPPED_TAG",
    "KnownTrial",
    "StudyTracker",
    "check_tracking",
    "complete",
    "environment",
    "public_uri",
    "replay_spool",
    "runs_frame",
    "settle",
    "study_run",
    "tracking_uri",
]
