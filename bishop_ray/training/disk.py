"""No space left: told apart from other failures, since it is no fault of a trial and passes."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from bishop_ray.errors import StorageFull

FULL = (errno.ENOSPC, errno.EDQUOT)
_WORDS = (
    "No space left on device", "no space left to write", "Disk quota exceeded", "disk is full", "os error 28",
    "os error 122",
)  # fmt: skip


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, says that a disk or a quota is full.

    Libraries of other languages and processes hand over the text only (safetensors, SQLite, Ray).
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        if any(words in str(error) for words in _WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def full_is_told(place: str) -> Iterator[None]:
    """Whatever fails within for want of space is a `StorageFull` that names `place`.

    Raises:
        StorageFull: No space is left.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, StorageFull) or not is_full(error):
            raise
        raise StorageFull(place) from error
