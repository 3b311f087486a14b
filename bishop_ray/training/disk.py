"""No space left: told apart from other failures, since it is no fault of a trial and passes."""

from __future__ import annotations

import errno

FULL = (errno.ENOSPC, errno.EDQUOT)
_WORDS = ("No space left on device", "no space left to write", "Disk quota exceeded", "os error 28", "os error 122")


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, says that a disk or a quota is full.

    Libraries of other languages and processes hand over the text only (safetensors, Tune).
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        if any(words in str(error) for words in _WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False
