"""The look at a table before its first trial: what a person should know is said, and kept as a tag."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from optuna.trial import TrialState

from bishop_ray.config import StudyConfig
from bishop_ray.data.doctor import warnings_of
from bishop_ray.data.findings import Finding, shortened
from bishop_ray.tuning.prepare import Loaded
from bishop_ray.tuning.store import OpenStudy

FINDINGS = "bishop.findings"
"""The tag of a study's parent run: a JSON list of findings, each with ``kind``, ``column``, ``detail``, ``action``."""
LONGEST = 4000
"""Characters of the tag; MLflow takes 8,000."""
_SHOWN = 3

logger = logging.getLogger(__name__)


def first_look(config: StudyConfig, studies: Iterable[OpenStudy], loaded: Loaded) -> dict[str, str]:
    """Tags with what training and validation rows tell of the table, and a line on the screen for each finding.

    It only reports: whatever it finds, or fails at, the search goes on.

    Args:
        config: The study, or one of a search over several models.
        studies: All studies of the search. Where one has begun nothing is done: it was told then.
        loaded: Training and validation rows.
    """
    if not config.doctor or any(_begun(study) for study in studies):
        return {}
    try:
        found = warnings_of(loaded.train, loaded.validation)
    except Exception as error:  # a search is worth more than a look at its table
        logger.warning("%s: the table was not looked at: %s: %s", config.ref.key, type(error).__name__, error)
        return {}
    for finding in shortened(found, _SHOWN):
        logger.warning("%s: %s", config.ref.key, finding.line())
    return {FINDINGS: as_tag(found)}


def as_tag(findings: Sequence[Finding]) -> str:
    """As JSON of at most `LONGEST` characters; what does not fit is counted in a last entry."""
    rows = [asdict(finding) for finding in findings]
    for kept in range(len(rows), -1, -1):
        more = [{"more": len(rows) - kept}] if kept < len(rows) else []
        text = json.dumps(rows[:kept] + more)
        if len(text) <= LONGEST:
            break
    return text


def _begun(study: OpenStudy) -> bool:
    return any(trial.state != TrialState.WAITING for trial in study.study.get_trials(deepcopy=False))
