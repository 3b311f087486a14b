"""Addresses, and any text that holds one, with the secrets taken out. Imports nothing heavy."""

from __future__ import annotations

import os
import re
import sys
import traceback
from types import TracebackType

HIDDEN = "***"
_SECRET_NAME = re.compile(r"TOKEN|PASSWORD|PASSWD|SECRET|API_?KEY|ACCESS_?KEY|CREDENTIAL", re.IGNORECASE)
_SECRET_ARGUMENT = re.compile(
    r"(\b[\w-]*(?:token|passw(?:or)?d|secret|api_?key|access_?key)[\w-]*=)[^&\s'\"),;]+", re.IGNORECASE
)
_USER_PART = re.compile(r"([a-z][a-z0-9+.-]*://)(?!/)[^\s'\"]*@", re.IGNORECASE)
_SHORTEST = 6
"""Characters of a value that is taken for a secret: shorter ones are words that stand in any text."""


def public_address(address: str) -> str:
    """The address without user, password, token and query: fit for messages and logs.

    A password may hold signs that end the host of an address ("/", "?", "#"): whatever stands before the last "@" goes,
    and where that leaves a doubt, everything does.
    """
    scheme, separator, rest = address.partition("://")
    if not separator:
        # HOST:PORT without a scheme; a path is left as it is.
        return address if address.startswith((".", "/", "~")) else address.rpartition("@")[2]
    if scheme.lower().startswith("sqlite") or rest.startswith("/"):  # a path, where "@" is a letter like any other
        return scheme + separator + rest.partition("?")[0]
    head, _, tail = re.sub(r"[?#]", "\0", rest, count=1).partition("\0")
    if "@" in tail:
        return scheme + separator + HIDDEN
    return scheme + separator + head.rpartition("@")[2]


def scrubbed(text: str) -> str:
    """`text` with ``***`` for what is secret.

    That is: users and passwords in addresses, arguments such as ``api_key=...``, and the value of every environment
    variable whose name says that it is secret (``RAY_AUTH_TOKEN``, ``MLFLOW_TRACKING_PASSWORD``, ...).
    """
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and _SECRET_NAME.search(name) and not os.path.exists(value):  # ..._TOKEN_PATH
            text = text.replace(value, HIDDEN)
    text = _USER_PART.sub(rf"\1{HIDDEN}@", text)
    return _SECRET_ARGUMENT.sub(rf"\1{HIDDEN}", text)


def redacted(error: Exception) -> str:
    """What an error says, scrubbed; of one that a Ray worker raised its own words, for Ray's text is a traceback."""
    return scrubbed(str(getattr(error, "cause", error)))


def show_fault(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints a traceback, scrubbed: in the place of `sys.excepthook`."""
    sys.stderr.write(scrubbed("".join(traceback.format_exception(kind, error, trace))))
