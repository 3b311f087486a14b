"""Where runs go: from a flag or the environment to one checked MLflow address. Imports no mlflow."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from bishop_ray.addresses import public_address
from bishop_ray.errors import UserError
from bishop_ray.home import home

public_uri = public_address
DATABASES = ("postgresql", "mysql", "mssql")
SERVERS = ("http", "https")


def tracking_uri(explicit: str = "") -> str:
    """The MLflow address: `explicit`, else ``MLFLOW_TRACKING_URI``, else the SQLite file of this user.

    SQLite paths come back absolute, so that every process of a study means the same file.

    Raises:
        UserError: A file store, an in-memory database, or a scheme that MLflow's tracking does not speak.
    """
    uri = (explicit or os.environ.get("MLFLOW_TRACKING_URI", "")).strip()
    if not uri:
        return f"sqlite:///{home() / 'mlflow.db'}"
    scheme = uri.partition("://")[0].lower() if "://" in uri else ""
    dialect = scheme.partition("+")[0]
    if dialect == "sqlite":
        return f"sqlite:///{sqlite_path(uri)}"
    if dialect in DATABASES or scheme in SERVERS:
        if scheme in SERVERS:
            _check_host(uri)
        return uri.rstrip("/")
    shown = public_uri(uri)
    if uri.startswith("file:") or _looks_like_path(uri):
        folder = shown.removeprefix("file:") or "./mlruns"
        raise UserError(
            f"tracking URI {shown!r} is a file store, which MLflow 3 refuses; use sqlite:///mlflow.db or a server, "
            f"and bring old runs over with: mlflow migrate-filestore --source {folder}"
            " --target sqlite:///mlflow.db"
        )
    hint = f"; did you mean http://{shown}?" if not scheme and ":" in uri else ""
    raise UserError(
        f"tracking URI {shown!r}: expected http(s)://HOST:PORT, sqlite:///FILE, "
        f"postgresql://..., mysql://... or mssql://...{hint}"
    )


def sqlite_path(uri: str) -> Path:
    """The absolute database file behind a ``sqlite:///`` address.

    Raises:
        UserError: An in-memory database: every process would see its own.
    """
    path = uri.partition("://")[2].partition("?")[0]
    if path in ("", "/", "/:memory:"):
        raise UserError(f"tracking URI {public_uri(uri)!r} is an in-memory database; name a file: sqlite:///mlflow.db")
    return Path(path[1:] if path.startswith("/") else path).expanduser().absolute()


def _check_host(uri: str) -> None:
    """UserError for an address whose host or port cannot be read."""
    try:
        parts = urlsplit(uri)
        readable = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        readable = False
    if not readable:
        raise UserError(
            f"tracking URI {public_uri(uri)!r} names no host; expected e.g. http://host:5000 "
            "(signs such as '/', '?' and '#' in a password are written %2F, %3F, %23)"
        )


def _looks_like_path(uri: str) -> bool:
    if "://" in uri:
        return False
    return uri.startswith((".", "/", "~")) or "/" in uri or uri == "mlruns" or Path(uri).is_dir()
