"""Optuna's journal file, made to survive a kill, a full disk and a power cut at any byte.

https://optuna.readthedocs.io/en/stable/reference/generated/optuna.storages.journal.JournalFileBackend.html
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from bishop_ray._compat.optuna import DETAILS
from bishop_ray.errors import StorageFull
from bishop_ray.signals import DeferredSignals
from bishop_ray.training.system import is_full

JOURNAL = "optuna.journal"
LOCK = f"{JOURNAL}.lock"
"""Optuna's own lock around each write. Who dies holding it would make the next process wait for half a minute."""


class Journal(JournalFileBackend):
    """A journal file that never keeps half a line.

    Optuna takes a file whose last line is cut for damaged as soon as anything follows that line.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._writing = path, JournalFileSymlinkLock(str(path))
        super().__init__(str(path), self._writing)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Writes all of `logs` or nothing.

        What begins or ends a trial, or belongs to the study, is on the disk when this returns, with all before it. The
        rest is the system's to write: it outlives the process, and waiting for the disk took most of the time.

        Ctrl-C waits until the file is whole and its lock is free.

        Raises:
            StorageFull: No space left; the file is as it was.
        """
        text = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with DeferredSignals(), self._locked(), self._path.open("ab", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            try:
                rest = memoryview(text.encode())
                while rest:
                    rest = rest[file.write(rest) :]
                if any(log.get("op_code") not in DETAILS for log in logs):
                    os.fsync(file.fileno())
            except OSError as error:
                file.truncate(before)
                if is_full(error):
                    raise StorageFull(str(self._path)) from error
                raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._writing.acquire()
        try:
            yield
        finally:
            self._writing.release()


def mend(path: Path) -> None:
    """Takes away what a process left that died while it wrote: half a line, and Optuna's lock.

    To be called by the one process that has the study.
    """
    for lock in path.parent.glob(f"{LOCK}*"):  # also one that was being released: Optuna renames it first
        lock.unlink(missing_ok=True)
    if not path.is_file():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        tail = b""
        while end and b"\n" not in tail:
            start = max(0, end - 4096)
            file.seek(start)
            tail = file.read(end - start) + tail
            if tail.endswith(b"\n"):
                return
            end = start
        file.truncate(end + tail.rfind(b"\n") + 1)


def open_journal(path: Path) -> JournalStorage:
    """The storage in `path`, made when missing."""
    return JournalStorage(Journal(path))
