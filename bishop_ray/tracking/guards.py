"""What surrounds work with MLflow: time-outs, no unpickling, one at a time, names, kinds of failure."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from bishop_ray.errors import UserError
from bishop_ray.tracking.address import sqlite_path
from bishop_ray.tracking.names import MAX_KEY

LONGEST_WAIT = 3 * 3600.0
"""Seconds for the others' turns in the registry; the gate of a slow model is minutes, and so is a large hold-out."""
_REFUSED = {
    "INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "INVALID_STATE",
    "FEATURE_DISABLED",
}  # fmt: skip


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """Longer time-outs than a study's logging has, since files are moved; and no unpickling, whatever happens."""
    wanted = {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    }
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextlib.contextmanager
def one_at_a_time(uri: str) -> Iterator[None]:
    """Two studies that end together must not both read the old champion; possible to ensure on one machine.

    Raises:
        UserError: Another process is at it for longer than `LONGEST_WAIT`.
    """
    if not uri.startswith("sqlite:"):
        yield
        return
    from filelock import FileLock, Timeout

    path = sqlite_path(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{path}.registry.lock", timeout=LONGEST_WAIT)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"{lock.lock_file}: another process has been registering for {LONGEST_WAIT / 3600:g} hours; end it, or try "
            "again later"
        ) from None
    try:
        yield
    finally:
        lock.release()


def check_names(name: str, alias: str) -> None:
    """Refuses names that MLflow would refuse, or read as something else.

    Raises:
        UserError: With what was expected.
    """
    strange = not name.isprintable() or len(name) > MAX_KEY or any(sign in name for sign in "/:\\")
    if not name or name.strip() != name or strange or name in (".", ".."):
        wanted = f"a name of at most {MAX_KEY} letters without '/', ':' and spaces around it"
        raise UserError(f"registered name {name[:MAX_KEY]!r}: expected {wanted}")
    reserved = alias.lower() in ("latest", "champion", "challenger") or re.fullmatch(r"[vV]?\d+", alias)
    if not re.fullmatch(r"[\w-]{1,255}", alias) or reserved:
        raise UserError(
            f"alias {alias!r}: expected letters, digits, '_', '-'; latest, champion, challenger, v1 are taken"
        )


def from_mlflow(error: Exception) -> bool:
    """Whether MLflow raised it, and not our own code."""
    return type(error).__module__.startswith("mlflow")


def is_final(error: Exception) -> bool:
    """Whether the same call would fail again, however long one waits."""
    from mlflow.exceptions import MlflowException
    from requests import HTTPError, RequestException

    if isinstance(error, MlflowException):
        return error.error_code in _REFUSED
    if isinstance(error, HTTPError) and error.response is not None:  # of the artifact service
        return 400 <= error.response.status_code < 500 and error.response.status_code not in (401, 408, 429)
    return not isinstance(error, RequestException | ConnectionError | TimeoutError)
