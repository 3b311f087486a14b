"""OpenML client: server address, time-outs, retries, error kinds. The only user of openml.

It is imported when something must be fetched, never for a warm cache. It gets time-outs, retries on server errors, and
a private folder per fetch (``cache.py`` says why).
"""

from __future__ import annotations

import configparser
import contextlib
import functools
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlparse

from bishop_ray._compat.openml import request_through
from bishop_ray.data.openml_cache import ServerCache
from bishop_ray.errors import SourceUnavailable, UserError
from bishop_ray.redact import public_address, scrubbed

DEFAULT_SERVER = "https://www.openml.org/api/v1/xml"
API_PATH = "/api/v1/xml"
CONNECT_SECONDS = 5.0
READ_SECONDS = 12.0
"""Silence that ends a request. Two silent tries and the client's fallback to ARFF stay below a minute in all."""


def server_url(server: str = "") -> str:
    """The address to use: the one given, else ``BISHOP_OPENML_SERVER``, the client's own settings, openml.org.

    Args:
        server: ``http://host:port``, with or without the path of the XML interface; or "".

    Raises:
        UserError: Not an http(s) address, or one with a user or password, which would end up in folder names; OpenML
            knows none (requests reads those of a proxy in front of it from ``~/.netrc``).
    """
    given = server or os.environ.get("BISHOP_OPENML_SERVER", "") or _configured()
    parts = urlparse(given)
    try:
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is no number
        valid = False
    if not valid:
        raise UserError(f"the OpenML server must be an address like http://host:port; found {public_address(given)!r}")
    if "@" in given:
        shown = public_address(given)
        raise UserError(f"the OpenML server's address must hold no user or password; found some before {shown!r}")
    base = given.rstrip("/")
    return base if "/api/" in parts.path else base + API_PATH


def api_key(server: str) -> str:
    """The key of the client's settings for the server that they name, "" for any other: it is none of their business.

    The client sends its key along with every request, to wherever a description says that data lie too.
    """
    own, asked = urlparse(_configured()), urlparse(server)
    return _configured("apikey", "") if (own.scheme, own.netloc) == (asked.scheme, asked.netloc) else ""


def _configured(name: str = "server", default: str = DEFAULT_SERVER) -> str:
    """An entry of the client's configuration file (its ``config.py``), read here because importing it is slow."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "openml"
    parser = configparser.RawConfigParser()
    try:
        parser.read_string("[client]\n" + (folder / "config").read_text("utf-8"))
    except (OSError, UnicodeError, configparser.Error):
        return default
    return parser.get("client", name, fallback=default)


def retries() -> Any:
    """urllib3's retry rule: back-off on 429 and 5xx, a second try after silence, a third after a refused connection."""
    from urllib3.util import Retry

    return Retry(
        total=6,
        connect=2,
        read=1,
        status=6,
        backoff_factor=0.5,
        status_forcelist=(429, 500, 502, 503, 504),
        raise_on_status=False,
        respect_retry_after_header=False,
    )


def timed_session_class() -> Any:
    """A `requests.Session` with our time-outs and retries: the client passes none to its requests."""
    import requests
    from requests.adapters import HTTPAdapter

    class TimedSession(requests.Session):
        def __init__(self) -> None:
            super().__init__()
            for scheme in ("http://", "https://"):
                self.mount(scheme, HTTPAdapter(max_retries=retries()))

        def request(self, *args: Any, **kwargs: Any) -> Any:
            kwargs.setdefault("timeout", (CONNECT_SECONDS, READ_SECONDS))
            return super().request(*args, **kwargs)

    return TimedSession


def timed_minio_class() -> Any:
    """A `minio.Minio`, which fetches Parquet files, with our time-outs instead of its five minutes."""
    import minio
    import urllib3

    class TimedMinio(minio.Minio):
        def __init__(self, endpoint: str, secure: bool = True, http_client: Any = None) -> None:
            timeout = urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS)
            if http_client is None:
                http_client = urllib3.PoolManager(timeout=timeout, retries=retries())
            else:  # a proxy
                http_client.connection_pool_kw.update(timeout=timeout, retries=retries())
            super().__init__(endpoint, secure=secure, http_client=http_client)

    return TimedMinio


def passing_failures() -> tuple[type[Exception], ...]:
    """What a dead, overloaded or confused server looks like through the client and its libraries."""
    from xml.parsers.expat import ExpatError

    import minio.error
    import pyarrow
    import requests.exceptions
    import urllib3.exceptions

    return (
        requests.exceptions.RequestException,
        urllib3.exceptions.HTTPError,
        minio.error.MinioException,
        ExpatError,
        pyarrow.ArrowException,
        ConnectionError,
        KeyError,  # XML that is no answer of the interface, such as a proxy's error page
    )


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
    request_through(openml, timed_session_class(), timed_minio_class())
    return openml
