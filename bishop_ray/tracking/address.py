"""Where runs go: from a flag or the environment to one checked MLflow address. Imports no mlflow."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from bishop_ray.errors import UserError
from bishop_ray.home import home

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
        if scheme in SERVERS and not urlsplit(uri).hostname:
            raise UserError(f"tracking URI {public_uri(uri)!r} names no host; expected e.g. http://host:5000")
        return uri.rstrip("/")
    if uri.startswith("file:") or _looks_like_path(uri):
        raise UserError(
            f"tracking URI {uri!r} is a file store, which MLflow 3 refuses; use sqlite:///mlflow.db or a server, "
            f"and bring old runs over with: mlflow migrate-filestore --source {uri.removeprefix('file:') or './mlruns'}"
            " --target sqlite:///mlflow.db"
        )
    hint = f"; did you mean http://{uri}?" if not scheme and ":" in uri else ""
    raise UserError(
        f"tracking URI {public_uri(uri)!r}: expected http(s)://HOST:PORT, sqlite:///FILE, "
        f"postgresql://..., mysql://... or mssql://...{hint}"
    )


def sqlite_path(uri: str) -> Path:
    """The absolute database file behind a ``sqlite:///`` address.

    Raises:
        UserError: An in-memory database: every process would see its own.
    """
    path = uri.partition("://")[2].partition("?")[0]
    if path in ("", "/", "/:memory:"):
        raise UserError(f"tracking URI {uri!r} is an in-memory database; name a file: sqlite:///mlflow.db")
    return Path(path[1:] if path.startswith("/") else path).expanduser().absolute()


def public_uri(uri: str) -> str:
    """The address without user, password, token and query: fit for messages and logs."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return uri
    # Not urlunsplit: it would drop two of the four slashes of ``sqlite:////absolute/path``.
    place, slash, path = rest.partition("/")
    return scheme + separator + place.rpartition("@")[2] + slash + path.partition("?")[0]


def _looks_like_path(uri: str) -> bool:
    if "://" in uri:
        return False
    return uri.startswith((".", "/", "~")) or "/" in uri or uri == "mlruns" or Path(uri).is_dir()
