"""Which OpenML server is asked, and how patiently."""

from __future__ import annotations

import configparser
import os
import types
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from bishop_ray.addresses import public_address
from bishop_ray.errors import UserError

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


def variant(module: types.ModuleType, **changes: Any) -> types.ModuleType:
    """A copy of a module's names with some of them replaced."""
    copy = types.ModuleType(module.__name__)
    copy.__dict__.update({**vars(module), **changes})
    return copy
