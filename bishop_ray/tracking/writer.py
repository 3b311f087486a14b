"""One writer thread between a study and MLflow: callers only enqueue, nothing is lost when the server is away."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bishop_ray.errors import UserError
from bishop_ray.tracking.address import public_uri, tracking_uri
from bishop_ray.tracking.names import flatten
from bishop_ray.tracking.sink import PARENT, Event, RunSink
from bishop_ray.tracking.spool import SPOOL, Spool
from bishop_ray.tracking.store import reason

FINISHED, KILLED, FAILED = "FINISHED", "KILLED", "FAILED"
"""Ends of a run: completed; stopped early or interrupted; failed."""

FLUSH_SECONDS = 0.5
RETRY_SECONDS = 5.0
_SENDING = threading.Lock()
"""One study at a time: all of a process share MLflow's pool of 15 connections to a database, and a search over many
models would wait for them until they time out."""
_log = logging.getLogger(__name__)


class StudyTracker:
    """A parent run for a study, a child run per trial.

    All methods except `flush`, `close` and `parent_run_id` return within microseconds and never raise: they put an
    event into a queue. One thread owns the MLflow client and sends what has gathered every half second. While MLflow
    does not answer, events go to `spool_path` and are sent, in order, when it answers again.

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
        self._sink = RunSink(tracking_uri(uri))
        self._spool = Spool(self.spool_path)
        self._queue: queue.SimpleQueue[Event | _Signal] = queue.SimpleQueue()
        self._opened = threading.Event()
        self._closed = False
        self._failing = False
        self._retry_at = 0.0
        self._unsaved: list[Event] = []
        self._header = _event(
            "study",
            experiment=experiment,
            study=study_name,
            study_id=study_id or study_name,
            params=_texts(params or {}),
            tags=dict(tags or {}),
            texts=dict(texts or {}),
        )
        self._queue.put(self._header)
        self._thread = threading.Thread(target=self._run, name="bishop-tracking", daemon=True)
        self._thread.start()

    def trial_started(self, number: int, params: Mapping[str, Any], tags: Mapping[str, str] | None = None) -> None:
        """A trial begins, or goes on after an interruption, with its parameters."""
        self._queue.put(_event("start", trial=number, params=_texts(params), tags=dict(tags or {})))

    def trial_reported(self, number: int, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one epoch; values that are not finite are counted instead of recorded."""
        self._queue.put(_event("metrics", trial=number, step=step, metrics=dict(metrics)))

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
        self._queue.put(_event("finish", trial=number, status=status, reason=reason, **fields))

    def study_reported(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of the parent run, e.g. the best score after `step` finished trials."""
        self._queue.put(_event("metrics", trial=PARENT, step=step, metrics=dict(metrics)))

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
        self._queue.put(_event("final", trial=PARENT, step=0, metrics=dict(metrics), **extra))

    def parent_run_id(self, timeout: float = 30.0) -> str:
        """Run id of the parent, or "" when MLflow did not answer in time."""
        self._opened.wait(timeout)
        return self._sink.parent_id

    def run_id(self, number: int) -> str:
        """Run id of a trial, or "" while it is not written yet."""
        return self._sink.run_ids.get(number, "")

    @property
    def dropped(self) -> int:
        """Writes that MLflow refused for good."""
        return self._sink.dropped

    @property
    def _all_sent(self) -> bool:
        return not self._spool and not self._unsaved

    def flush(self, timeout: float = 30.0) -> bool:
        """Waits until all events so far are in MLflow; False when they are in the spool or still on the way."""
        signal = _Signal()
        self._queue.put(signal)
        return signal.done.wait(timeout) and self._all_sent

    def close(self, status: str = FINISHED, reason: str = "", timeout: float = 60.0) -> bool:
        """Sends everything and ends the parent and every trial still running; safe to call twice.

        Returns:
            True when MLflow has it all; False when a part waits in `spool_path` (`replay_spool` sends it).
        """
        if not self._closed:
            self._closed = True
            child_reason = f"interrupted: {reason or 'the study ended'}"
            self._queue.put(_event("close", status=status, reason=reason, child_reason=child_reason))
            self._queue.put(_Signal(stop=True))
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._sink.give_up = True  # the next call fails, and what is left goes to the spool
            self._thread.join(15.0)
        complete = not self._thread.is_alive() and self._all_sent
        if not complete:
            _log.warning("MLflow did not take all of the study; the rest waits in %s", self.spool_path)
        return complete

    def _run(self) -> None:
        stop = False
        while not stop:
            events, signals = self._take()
            stop = any(signal.stop for signal in signals)
            self._deliver(events, now=bool(signals))
            for signal in signals:
                signal.done.set()

    def _deliver(self, events: list[Event], now: bool) -> None:
        """Sends `events`, after those that wait; what cannot be sent waits."""
        events = [*self._unsaved, *events]
        self._unsaved = []
        if not self._spool:
            if not events or self._send(events):
                return
            self._keep([self._header, *events])
        elif events:
            self._keep(events)
        if now or time.monotonic() >= self._retry_at:
            try:
                waiting = self._spool.read()
            except OSError as error:
                _log.warning("tracking spool %s cannot be read: %s", self.spool_path, error.strerror)
                return
            if self._send(waiting):
                self._spool.clear()
                _log.info("MLflow answers again: %d waiting events sent", len(waiting))

    def _keep(self, events: list[Event]) -> None:
        try:
            self._spool.append(events)
        except OSError as error:  # a full disk: memory is the last place left
            self._unsaved = events
            _log.warning("tracking spool %s: %s; kept in memory", self.spool_path, error.strerror)

    def _take(self) -> tuple[list[Event], list[_Signal]]:
        """What gathers within half a second of the first event; a signal ends the wait."""
        events: list[Event] = []
        signals: list[_Signal] = []
        deadline = None
        while not signals:
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                item = self._queue.get(timeout=RETRY_SECONDS if left is None and self._spool else left)
            except queue.Empty:
                break
            if isinstance(item, _Signal):
                signals.append(item)
            else:
                events.append(item)
                deadline = deadline or time.monotonic() + FLUSH_SECONDS
        return events, signals

    def _send(self, events: list[Event]) -> bool:
        """True when MLflow has the events. Whatever fails is kept: tracking must not end a study."""
        try:
            with _SENDING:
                self._sink.apply(events)
        except Exception as error:  # a broken server, network, disk or database
            text = str(error) if isinstance(error, UserError) else reason(error)
            log = _log.debug if self._failing else _log.warning
            log("MLflow at %s takes no data (%s); kept in %s", public_uri(self._sink.uri), text, self.spool_path)
            self._failing = True
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return False
        self._failing = False
        self._opened.set()
        return True


class _Signal:
    """Asks the writer to send everything now, and tells when it has tried."""

    def __init__(self, stop: bool = False) -> None:
        self.stop = stop
        self.done = threading.Event()


def _texts(params: Mapping[str, Any]) -> dict[str, str]:
    # As text at once: a replay from JSON must give the same text (a tuple would come back as a list).
    return {name: str(value) for name, value in flatten(params).items()}


def _event(kind: str, **fields: Any) -> Event:
    return {"kind": kind, "time": time.time_ns() // 1_000_000, **fields}
