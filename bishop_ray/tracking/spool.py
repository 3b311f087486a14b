"""Events on disk that MLflow has not taken yet: one JSON object per line, in order."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bishop_ray.paths import write_whole
from bishop_ray.tracking.client import as_user_error
from bishop_ray.tracking.sink import Event, RunSink

_log = logging.getLogger(__name__)
SPOOL = "mlflow_spool.jsonl"
"""Its name in the folder of a study."""
CHUNK = 1000
"""Events read at a time: a day without MLflow must not be one list in memory."""
COMPACT_BYTES = 4 << 20
"""The part of the file that MLflow has is cut off when it is as large as this."""
KEPT_IN_MEMORY = 20_000
"""Events that wait in memory where the disk takes none; beyond, epochs' metrics are given up."""
SYNC_SECONDS = 1.0
"""Between two waits for the disk, and between two tries of one that is full."""


@dataclass(frozen=True)
class SpooledEvents:
    """Events in their order, and how much of the spool they are.

    Attributes:
        events: The events.
        end: Offset in the file after the last of them.
        memory: The list that the last of them are from, where a full disk left them in memory.
        kept: Their number.
    """

    events: list[Event]
    end: int
    memory: list[Event]
    kept: int


class Spool:
    """A JSONL file of events, safe between one thread that appends and one that sends; true while something waits.

    Events are in the file as soon as `append` returns: the death of the process costs none. The file always begins
    with the study's header, so that any later process can make sense of it, and goes when MLflow has everything.

    Args:
        path: The file.
        header: The event that says whose study it is; None for a spool that is only read.
    """

    def __init__(self, path: Path, header: Event | None = None) -> None:
        self.path = path
        self.durable = False
        """Whether events shall survive the machine's death too: as long as this is the only place that has them."""
        self._header = _line(header) if header else b""
        self._lock = threading.Lock()
        self._size = path.stat().st_size if path.exists() else 0
        self._sent = 0
        self._memory: list[Event] = []
        self._synced = self._disk_at = 0.0

    def __bool__(self) -> bool:
        return self._size > self._sent or bool(self._memory)

    def append(self, events: Iterable[Event]) -> None:
        """Adds events at the end; what a full disk does not take waits in memory and is tried again."""
        with self._lock:
            new = list(events)
            if self._memory and time.monotonic() < self._disk_at:
                self._keep(new)
                return
            try:
                self._write(b"".join(_line(event) for event in [*self._memory, *new]))
                self._memory = []
            except OSError as error:
                if not self._memory:
                    _log.warning("tracking spool %s: %s; kept in memory", self.path, error.strerror)
                self._disk_at = time.monotonic() + SYNC_SECONDS
                self._keep(new)

    def _keep(self, events: list[Event]) -> None:
        full = len(self._memory) >= KEPT_IN_MEMORY
        self._memory.extend(event for event in events if not full or event["kind"] != "metrics")

    def _write(self, data: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            head = b"" if before or data.startswith(self._header) else self._header
            if before and not self._ends_with_newline():  # an earlier process died while writing its last line
                data = b"\n" + data
            data = head + data
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                os.ftruncate(file.fileno(), before)  # whole lines or nothing
                raise
            if self.durable and time.monotonic() - self._synced > SYNC_SECONDS:
                os.fsync(file.fileno())
                self._synced = time.monotonic()
        self._sent = self._sent if before else len(head)
        self._size = before + len(data)

    def _ends_with_newline(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def read(self) -> SpooledEvents:
        """The oldest events that MLflow does not have, `CHUNK` at most.

        A line cut off by the death of a process is left out with a warning.
        """
        with self._lock:
            events, end = [], self._sent
            if self._size > self._sent and self.path.exists():
                with self.path.open("rb") as file:
                    file.seek(self._sent)
                    for line in file:
                        if not line.endswith(b"\n"):
                            _log.warning("spool %s: one incomplete line skipped", self.path)
                        elif line.strip():
                            events.extend(self._parsed(line))
                        end += len(line)
                        if len(events) >= CHUNK:
                            return SpooledEvents(events, end, [], 0)
            end = max(end, self._size)  # also where someone removed the file
            return SpooledEvents([*events, *self._memory], end, self._memory, len(self._memory))

    def _parsed(self, line: bytes) -> list[Event]:
        try:
            return [json.loads(line)]
        except ValueError:
            _log.warning("spool %s: one incomplete line skipped", self.path)
            return []

    def skip(self, batch: SpooledEvents) -> None:
        """Reads on after what `read` gave; the file keeps it."""
        with self._lock:
            if batch.memory is self._memory:  # else the disk has taken them meanwhile: sent twice is sent once
                del self._memory[: batch.kept]
            self._sent = max(self._sent, batch.end)

    def drop(self, batch: SpooledEvents) -> None:
        """Forgets what `read` gave: MLflow has it."""
        self.skip(batch)
        with self._lock:
            try:
                if self._sent >= self._size:
                    self.path.unlink(missing_ok=True)
                    self._sent = self._size = 0
                elif self._sent > COMPACT_BYTES:
                    self._compact()
            except OSError as error:  # it is sent again some day, which changes nothing
                _log.warning("tracking spool %s: %s", self.path, error.strerror)

    def _compact(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self._sent)
            tail = file.read()
        write_whole(self.path, (self._header + tail).decode("utf-8"))
        self._sent, self._size = len(self._header), len(self._header) + len(tail)

    def clear(self) -> None:
        """Removes the file: everything has been sent."""
        self.path.unlink(missing_ok=True)
        self._sent = self._size = 0


def _line(event: Event) -> bytes:
    return json.dumps(event, default=_plain, skipkeys=True).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Scalars of numpy and torch as Python numbers, anything else as text."""
    try:
        return value.item()
    except (AttributeError, RuntimeError, ValueError):  # no scalar
        return str(value)


def replay_spool(
    path: Path, uri: str, status: str = "KILLED", reason: str = "interrupted: the study was killed"
) -> int:
    """Sends what a study that no longer runs left behind to MLflow, ends its runs, and removes the file.

    Args:
        path: The spool.
        uri: MLflow address.
        status: For the parent run, where the spool does not say how the study ended.
        reason: With it.

    Returns:
        The number of events sent; 0 when there is no spool.

    Raises:
        SourceUnavailable: MLflow does not answer; the spool is kept.
    """
    spool = Spool(path)
    sink = RunSink(uri)
    count, last = 0, {"kind": "close", "time": 0}
    try:
        while (batch := spool.read()).events:
            sink.apply(batch.events)
            spool.skip(batch)
            count, last = count + len(batch.events), batch.events[-1]
        if count and last["kind"] != "close":  # the study was killed
            sink.apply(
                [{"kind": "close", "status": status, "reason": reason, "child_reason": reason, "time": last["time"]}]
            )
    except Exception as error:
        raise as_user_error(error, uri) from error
    spool.clear()
    return count
