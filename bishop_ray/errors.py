"""The user's mistakes, apart from everything else.

A :class:`UserError` becomes one line on standard error and exit code 2 (``cli``). Every other exception keeps
its traceback, because it is a fault of ours or of the machine.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what the user gave: one line that names it, what was expected and what was found."""


class UnknownName(UserError):
    """A name that is in no registry; the message carries the nearest known one.

    Args:
        kind: What was named: "model", "dataset", "suite", ...
        name: The name given.
        known: All valid names.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(set(known))
        lower = {candidate.lower(): candidate for candidate in names}
        near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.4)
        hint = f"; did you mean {lower[near[0]]!r}?" if near else ""
        super().__init__(f"unknown {kind} {name!r}{hint} (known: {', '.join(names) or 'none'})")


class BadTable(UserError):
    """A table that cannot be trained on: unreadable, without target, too small, ..."""


class BadSearchSpace(UserError):
    """A search-space file that does not fit the model's signature or is no valid range."""


class SourceUnavailable(UserError):
    """A server (OpenML, MLflow) that did not answer in time."""


class StorageFull(UserError):
    """No space is left where a study is kept. Everything recorded so far stands, and the same command goes on.

    Args:
        path: What could not be written.
    """

    def __init__(self, path: str) -> None:
        super().__init__(f"no space left to write {path}; free some, then the same command goes on where this one was")


class TrainingFailed(Exception):
    """A trial that cannot go on: its reason is recorded and the trial is *failed*, never scored.

    Not a :class:`UserError`: one configuration failed, the study goes on.
    """
