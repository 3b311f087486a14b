"""From a study's events to MLflow without making anyone wait: a queue, a spool on disk, two threads."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from contextlib import AbstractContextManager

from bishop_ray.errors import UserError
from bishop_ray.tracking.client import SERVERS, public_uri, reason
from bishop_ray.tracking.sink import Event, RunSink
from bishop_ray.tracking.spool import CHUNK, Spool

GATHER_SECONDS = 0.02
"""What a study tells is on disk after this time, and then survives the death of the process."""
FLUSH_SECONDS = 0.5
RETRY_SECONDS = 5.0
DISK_SECONDS = 5.0
"""Longest wait at the end for a disk."""
_SENDING = threading.Lock()
"""One study at a time: all of a process share MLflow's pool of 15 connections to a database, and a search over many
models would wait for them until they time out."""
_log = logging.getLogger(__name__)


class Signal:
    """Asks for everything to be sent now, and tells when that has been tried."""

    def __init__(self, stop: bool = False) -> None:
        self.stop = stop
        self.done = threading.Event()
        self.sent = False
        """Whether MLflow has all that came before."""


class Delivery:
    """Takes events within microseconds and brings them to MLflow, in order, whatever MLflow does meanwhile.

    One thread writes them to the spool and never talks to MLflow; the other sends what is in the spool every half
    second, and tries again every five while MLflow does not answer. So neither a hanging server nor the death of this
    process costs an event that is older than `GATHER_SECONDS`.

    Args:
        sink: Writes to MLflow.
        spool: Keeps what is on its way.
        first: The study's header.
    """

    def __init__(self, sink: RunSink, spool: Spool, first: Event) -> None:
        self._sink, self._spool = sink, spool
        self.opened = threading.Event()
        """Set when the study has its run."""
        self._queue: queue.SimpleQueue[Event | Signal] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[Signal | None] = queue.SimpleQueue()
        self._failing = False
        self._retry_at = 0.0
        self._ended = False
        self._last = Signal(stop=True)
        self.put(first)
        self._collector = threading.Thread(target=self._collect, name="bishop-tracking-spool", daemon=True)
        self._collector.start()
        threading.Thread(target=self._deliver, name="bishop-tracking-mlflow", daemon=True).start()

    def put(self, event: Event) -> None:
        """Takes an event; never waits, never raises."""
        self._queue.put(event)

    def flush(self, timeout: float) -> bool:
        """Waits until all events so far are in MLflow; False when they are in the spool or still on the way."""
        signal = Signal()
        self._queue.put(signal)
        return signal.done.wait(timeout) and signal.sent

    def end(self, timeout: float) -> bool:
        """Sends what there is and stops; what is not sent in time stays in the spool. May be called twice."""
        if not self._ended:
            self._ended = True
            self._queue.put(self._last)
        if not self._last.done.wait(timeout):
            self._sink.give_up = True  # the next call fails; the one that hangs ends by itself
            self._collector.join(DISK_SECONDS)
        return self._last.done.is_set() and self._last.sent

    def _collect(self) -> None:
        stop = False
        while not stop:
            items = [self._queue.get()]
            if not isinstance(items[0], Signal):
                time.sleep(GATHER_SECONDS)
            with contextlib.suppress(queue.Empty):
                while True:
                    items.append(self._queue.get_nowait())
            if events := [item for item in items if not isinstance(item, Signal)]:
                self._spool.append(events)
                self._work.put(None)
            for signal in (item for item in items if isinstance(item, Signal)):
                self._work.put(signal)
                stop = stop or signal.stop

    def _deliver(self) -> None:
        stop = False
        while not stop:
            signals = self._await_work()
            stop = any(signal.stop for signal in signals)
            sent = self._send_all() if signals or time.monotonic() >= self._retry_at else False
            for signal in signals:
                signal.sent = sent
                signal.done.set()

    def _await_work(self) -> list[Signal]:
        """Returns half a second after something came, or at once with a signal, or when it is time to try again."""
        deadline = None
        while True:
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                item = self._work.get(timeout=RETRY_SECONDS if left is None and self._spool else left)
            except queue.Empty:
                return []
            if item is not None:
                return [item]
            deadline = deadline or time.monotonic() + FLUSH_SECONDS

    def _send_all(self) -> bool:
        """Sends what is in the spool now; False when MLflow does not take it.

        What comes meanwhile waits for the next time: sent at once, it would go in calls of a few values each.
        """
        while True:
            try:
                batch = self._spool.read()
            except OSError as error:
                _log.warning("tracking spool %s cannot be read: %s", self._spool.path, error.strerror)
                return False
            if not self._send(batch.events) or self._sink.give_up:
                return False  # given up: a later study may be at this very file
            self._spool.drop(batch)
            if len(batch.events) < CHUNK:
                return True

    def _send(self, events: list[Event]) -> bool:
        """True when MLflow has the events. Whatever fails is kept: tracking must not end a study."""
        try:
            with self._turn():
                self._sink.apply(events)
        except Exception as error:  # a broken server, network, disk or database
            text = str(error) if isinstance(error, UserError) else reason(error)
            log = _log.debug if self._failing else _log.warning
            log("MLflow at %s takes no data (%s); kept in %s", public_uri(self._sink.uri), text, self._spool.path)
            self._failing = self._spool.durable = True
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return False
        if self._failing:
            _log.info("MLflow answers again: %s", public_uri(self._sink.uri))
        self._failing = self._spool.durable = False
        self.opened.set()
        return True

    def _turn(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._sink.uri.startswith(SERVERS) else _SENDING
