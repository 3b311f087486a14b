"""Optuna's journal file, made to survive a kill, a full disk and a power cut at any byte.

https://optuna.readthedocs.io/en/stable/reference/generated/optuna.storages.journal.JournalFileBackend.html
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from bishop_ray.errors import StorageFull

JOURNAL = "optuna.journal"
LOCK = f"{JOURNAL}.lock"
"""Optuna's own lock around each write. Who dies holding it would make the next process wait for half a minute."""
FULL = (errno.ENOSPC, errno.EDQUOT)


class Journal(JournalFileBackend):
    """A journal file that never keeps half a line.

    Optuna takes a file whose last line is cut for damaged as soon as anything follows that line.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Writes all of `logs` or nothing.

        Raises:
            StorageFull: No space left; the file is as it was.
        """
        before = self._path.stat().st_size
        try:
            super().append_logs(logs)
        except OSError as error:
            if self._path.stat().st_size > before:
                os.truncate(self._path, before)
            if error.errno in FULL:
                raise StorageFull(str(self._path)) from error
            raise


def mend(path: Path) -> None:
    """Takes away what a process left that died while it wrote: half a line, and Optuna's lock.

    To be called by the one process that has the study.
    """
    path.with_name(LOCK).unlink(missing_ok=True)
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
