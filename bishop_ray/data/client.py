"""The openml client, and the only user of it: what it lacks is given to it here.

It is imported when something must be fetched, never for a warm cache. It gets time-outs, retries on server errors, and
a private folder per fetch (``cache.py`` says why).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from bishop_ray.addresses import scrubbed
from bishop_ray.data.cache import ServerCache
from bishop_ray.data.servers import api_key, passing_failures, timed_minio_class, timed_session_class, variant
from bishop_ray.errors import SourceUnavailable, UserError

T = TypeVar("T")

_ATTEMPTS = 3
_PATIENCE_SECONDS = 20.0
"""After so much time without success no further attempt starts."""

_DATABASE_OVERLOADED = 107
"""The one error code of the server that says "try again" (the client's `_api_calls.py`)."""

_client_lock = threading.RLock()  # the client's settings are module globals


class Incomplete(Exception):
    """The server answered with something that is not the whole document."""


def ask(cache: ServerCache, what: str, fetch: Callable[[Any, bool], T]) -> T:
    """`fetch(openml, first attempt)` in a private client folder, repeated on passing failures.

    Raises:
        SourceUnavailable: No attempt succeeded.
        UserError: The server says there is no such thing.
    """
    openml = _client()
    started = time.monotonic()
    with _client_lock, _quiet():
        openml.config.server, openml.config.apikey = cache.server, api_key(cache.server)
        openml.config.set_retry_policy("human", 1)  # the session retries, with time-outs
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with cache.staging() as folder:
                    openml.config.set_root_cache_directory(folder)
                    return fetch(openml, attempt == 1)
            except openml.exceptions.OpenMLServerException as error:
                if error.code != _DATABASE_OVERLOADED:
                    raise UserError(
                        f"OpenML {what}: {cache.server} answers {error.message.removesuffix(' - None')!r}"
                    ) from None
                failure: Exception = error
            except passing(openml) as error:
                failure = error
            except ValueError as error:
                if "entity type" not in str(error):
                    raise
                raise UserError(f"OpenML {what}: expected a suite of tasks; {error}") from None
            if attempt == _ATTEMPTS or time.monotonic() - started > _PATIENCE_SECONDS:
                break
            time.sleep(attempt)
    reason = scrubbed(" ".join(str(failure).split()))[:300] or type(failure).__name__  # holds addresses, keys in them
    raise SourceUnavailable(f"OpenML {what}: no usable answer from {cache.server}: {reason}")


def passing(openml: Any) -> tuple[type[Exception], ...]:
    """Failures after which another attempt may succeed."""
    return (
        Incomplete,
        *passing_failures(),
        openml.exceptions.OpenMLServerError,
        openml.exceptions.OpenMLHashException,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.cache
def _client() -> Any:
    """The openml module; inside it, and nowhere else, requests, minio and logging are ours."""
    with _quiet():
        import openml
    logging.getLogger("openml").setLevel(logging.CRITICAL)
    calls: Any = openml._api_calls
    calls.requests = variant(calls.requests, Session=timed_session_class())
    calls.minio = variant(calls.minio, Minio=timed_minio_class())
    calls.logging = logging.getLogger("openml.calls")  # not the root logger, where it would install a handler
    return openml
