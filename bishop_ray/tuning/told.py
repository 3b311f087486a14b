"""What a study's recorder needs of the MLflow side."""

from __future__ import annotations

from typing import Any, Protocol


class TrialTracker(Protocol):
    """Takes what happens to trials."""

    def trial_started(self, number: int, params: dict[str, Any]) -> None:
        """A trial begins or goes on."""

    def trial_reported(self, number: int, step: int, metrics: dict[str, float]) -> None:
        """One epoch's numbers."""

    def study_reported(self, step: int, metrics: dict[str, float]) -> None:
        """The study's own curve over finished trials."""

    def trial_finished(self, number: int, status: str, reason: str, summary: dict[str, float]) -> None:
        """A trial ended: FINISHED, KILLED or FAILED."""
