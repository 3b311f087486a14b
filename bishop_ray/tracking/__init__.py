"""The only MLflow code: runs of a study, the registry of models, runs as a DataFrame.

Importing this package does not import mlflow; the functions do, when called.
"""

from __future__ import annotations

from bishop_ray.tracking.address import public_uri, tracking_uri
from bishop_ray.tracking.closing import complete, settle
from bishop_ray.tracking.environment import environment
from bishop_ray.tracking.evidence import Evidence, Validation
from bishop_ray.tracking.finding import study_run
from bishop_ray.tracking.frame import runs_frame
from bishop_ray.tracking.loading import find_version, load_best
from bishop_ray.tracking.registry import RegisteredModel, register_best
from bishop_ray.tracking.spool import SPOOL, replay_spool
from bishop_ray.tracking.store import check_tracking
from bishop_ray.tracking.writer import KnownTrial, StudyTracker

__all__ = [
    "SPOOL",
    "Evidence",
    "KnownTrial",
    "RegisteredModel",
    "StudyTracker",
    "Validation",
    "check_tracking",
    "complete",
    "environment",
    "find_version",
    "load_best",
    "public_uri",
    "register_best",
    "replay_spool",
    "runs_frame",
    "settle",
    "study_run",
    "tracking_uri",
]
