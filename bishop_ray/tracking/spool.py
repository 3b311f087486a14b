"""Events on disk that MLflow has not taken yet: one JSON object per line, in order."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bishop_ray.tracking.sink import RunSink
from bishop_ray.tracking.store import as_user_error

_log = logging.getLogger(__name__)
SPOOL = "mlflow_spool.jsonl"
"""Its name in the folder of a study."""


class Spool:
    """A JSONL file of events, written through to the disk; true while something waits in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = path.exists() and path.stat().st_size > 0

    def __bool__(self) -> bool:
        return self._waiting

    def append(self, events: Iterable[dict[str, Any]]) -> None:
        """Adds events at the end; they survive the death of the process and of the machine."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(event, default=_plain) + "\n" for event in events)
        with self.path.open("a+", encoding="utf-8") as file:
            if file.tell() and not self._ends_with_newline():
                file.write("\n")  # an earlier process died while writing its last line
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self._waiting = True

    def read(self) -> list[dict[str, Any]]:
        """All waiting events; a line cut off by the death of a process is skipped with a warning."""
        if not self.path.exists():
            return []
        events = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").split("\n"):
            if not line.strip():
                continue
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                _log.warning("spool %s: one incomplete line skipped", self.path)
        return events

    def clear(self) -> None:
        """Removes the file: everything has been sent."""
        self.path.unlink(missing_ok=True)
        self._waiting = False

    def _ends_with_newline(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"


def _plain(value: Any) -> Any:
    """Scalars of numpy and torch as Python numbers, anything else as text."""
    return value.item() if hasattr(value, "item") else str(value)


def replay_spool(path: Path, uri: str) -> int:
    """Sends what a study that no longer runs left behind to MLflow, ends its runs, and removes the file.

    Returns:
        The number of events sent; 0 when there is no spool.

    Raises:
        SourceUnavailable: MLflow does not answer; the spool is kept.
    """
    spool = Spool(path)
    events = spool.read()
    if not events:
        return 0
    if events[-1]["kind"] != "close":  # the study was killed
        words = "interrupted: the study was killed"
        end = {"kind": "close", "status": "KILLED", "reason": words, "child_reason": words, "time": events[-1]["time"]}
        events.append(end)
    try:
        RunSink(uri).apply(events)
    except Exception as error:
        raise as_user_error(error, uri) from error
    spool.clear()
    return len(events)
