"""Logger of a study's runs: callers only enqueue, nothing is lost when the server is away."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bishop_ray.tracking.client import CALL_SECONDS, as_user_error, open_client, public_uri, tracking_uri
from bishop_ray.tracking.delivery import Delivery
from bishop_ray.tracking.naming import flatten
from bishop_ray.tracking.sink import PARENT, Event, RunSink
from bishop_ray.tracking.spool import SPOOL, Spool

FINISHED, KILLED, FAILED = "FINISHED", "KILLED", "FAILED"
"""Ends of a run: completed; stopped early or interrupted; failed."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KnownTrial:
    """A trial as the study on disk has it: the truth, where MLflow was not told everything.

    Attributes:
        number: Its number.
        params: Its parameters.
        status: `FINISHED`, `KILLED` or `FAILED`; "" for one that goes on.
        reason: Why it ended.
        started: When it began, in milliseconds since 1970.
        ended: When it ended, or now.
        epochs: Step -> metrics, named as in `StudyTracker.trial_reported`.
        summary: Metrics of an ended trial.
        tags: Of a trial that the scheduler stopped: at which rung.
    """

    number: int
    params: Mapping[str, Any]
    status: str
    reason: str
    started: int
    ended: int
    epochs: Mapping[int, Mapping[str, float]]
    summary: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)

    def event(self) -> Event:
        """As an event."""
        return {
            "kind": "known",
            "time": self.ended,
            "trial": self.number,
            "params": _texts(self.params),
            "status": self.status,
            "reason": self.reason,
            "started": self.started,
            "epochs": [[step, dict(metrics)] for step, metrics in sorted(self.epochs.items())],
            "metrics": dict(self.summary),
            "tags": dict(self.tags),
        }


class StudyTracker:
    """A parent run for a study, a child run per trial.

    All methods except `flush`, `close` and `parent_run_id` return within microseconds and never raise: they put an
    event into a queue, from where it goes to `spool_path` and to MLflow, see `Delivery`.

    Args:
        uri: MLflow address, see `tracking_uri`; checked before (`check_tracking`), since nothing is raised here later.
        experiment: MLflow experiment.
        study_name: Name of the study and of its parent run.
        folder: The study's folder; the spool lies in it.
        study_id: Tells two studies of one name apart (a fresh start, another machine); default: the name.
        params: Parameters of the parent run; nested sections become dotted names.
        tags: Tags of the parent and, but for versions, of every trial: dataset, suite, model, task, metric, ...
        texts: Text artifacts of the parent by path, e.g. ``{"search_space.yaml": "..."}``.
    """

    def __init__(
        self,
        uri: str,
        experiment: str,
        study_name: str,
        *,
        folder: Path,
        study_id: str = "",
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        self.spool_path = folder / SPOOL
        uri = tracking_uri(uri)
        header = _event(
            "study",
            uri=public_uri(uri),
            experiment=experiment,
            study=study_name,
            study_id=study_id or study_name,
            params=_texts(params or {}),
            tags=dict(tags or {}),
            texts=dict(texts or {}),
        )
        self._sink = RunSink(uri)
        self._delivery = Delivery(self._sink, Spool(self.spool_path, header), header)
        self._closed = False

    def trials_known(self, trials: Iterable[KnownTrial]) -> None:
        """What the study already has, told once when it goes on: MLflow is completed where it was not told.

        A trial that ended while MLflow was not told of it is ended; epochs that never arrived are added. Nothing
        happens to a trial whose run ended with the same status and says where the scheduler stopped it.
        """
        for trial in trials:
            self._delivery.put(trial.event())

    def trial_started(self, number: int, params: Mapping[str, Any], tags: Mapping[str, str] | None = None) -> None:
        """A trial begins, or goes on after an interruption, with its parameters."""
        self._delivery.put(_event("start", trial=number, params=_texts(params), tags=dict(tags or {})))

    def trial_reported(self, number: int, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one epoch; values that are not finite are counted instead of recorded."""
        self._delivery.put(_event("metrics", trial=number, step=step, metrics=dict(metrics)))

    def trial_finished(
        self,
        number: int,
        status: str,
        reason: str = "",
        summary: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        step: int = 0,
    ) -> None:
        """A trial ended: `FINISHED`, `KILLED` (early-stopped) or `FAILED`, with the reason and summary metrics."""
        fields = {"metrics": dict(summary or {}), "tags": dict(tags or {}), "step": step}
        self._delivery.put(_event("finish", trial=number, status=status, reason=reason, **fields))

    def study_reported(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of the parent run, e.g. the best score after `step` finished trials."""
        self._delivery.put(_event("metrics", trial=PARENT, step=step, metrics=dict(metrics)))

    def tag_study(self, tags: Mapping[str, str]) -> None:
        """Tags of the parent run alone, which its trials do not get."""
        if tags:
            self._delivery.put(_event("final", trial=PARENT, step=0, metrics={}, tags=dict(tags), texts={}, tables={}))

    def log_final(
        self,
        metrics: Mapping[str, float],
        tags: Mapping[str, str] | None = None,
        texts: Mapping[str, str] | None = None,
        tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    ) -> None:
        """The study's result on the parent run: metrics, tags, text artifacts and tables (rows) by path.

        A table's path ends with ``.json``; ``mlflow.load_table`` and the UI read it.
        """
        rows = {path: [dict(row) for row in table] for path, table in (tables or {}).items()}
        extra = {"tags": dict(tags or {}), "texts": dict(texts or {}), "tables": rows}
        self._delivery.put(_event("final", trial=PARENT, step=0, metrics=dict(metrics), **extra))

    def parent_run_id(self, timeout: float = 30.0) -> str:
        """Run id of the parent, or "" when MLflow did not answer in time."""
        self._delivery.opened.wait(timeout)
        return self._sink.parent_id

    def run_id(self, number: int) -> str:
        """Run id of a trial, or "" while it is not written yet."""
        return self._sink.run_ids.get(number, "")

    @property
    def dropped(self) -> int:
        """Writes that MLflow refused for good."""
        return self._sink.dropped

    def flush(self, timeout: float = 30.0) -> bool:
        """Waits until all events so far are in MLflow; False when they are in the spool or still on the way."""
        return self._delivery.flush(timeout)

    def close(self, status: str = FINISHED, reason: str = "", timeout: float = 60.0) -> bool:
        """Sends everything and ends the parent and every trial still running; safe to call twice.

        Args:
            status: Of the parent.
            reason: With it.
            timeout: Seconds after which what has not been sent is left in the spool.

        Returns:
            True when MLflow has it all; False when a part waits in `spool_path` (`replay_spool` sends it).
        """
        if not self._closed:
            self._closed = True
            child_reason = f"interrupted: {reason or 'the study ended'}"
            self._delivery.put(_event("close", status=status, reason=reason, child_reason=child_reason))
        complete = self._delivery.end(timeout)
        if not complete:
            _log.warning(
                "MLflow did not take all of the study; the rest waits in %s: jobs/models.py sync", self.spool_path
            )
        return complete


def _texts(params: Mapping[str, Any]) -> dict[str, str]:
    # As text at once: a replay from JSON must give the same text (a tuple would come back as a list).
    return {name: str(value) for name, value in flatten(params).items()}


def _event(kind: str, **fields: Any) -> Event:
    return {"kind": kind, "time": time.time_ns() // 1_000_000, **fields}


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
