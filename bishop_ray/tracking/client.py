"""MLflow client: checked address, time-outs, error kinds, experiments, pages of runs."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit

from bishop_ray.errors import SourceUnavailable, UserError
from bishop_ray.paths import changed_environment, home
from bishop_ray.redact import public_address
from bishop_ray.tracking.naming import MAX_KEY, safe_file_name

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient


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
    with changed_environment(wanted):
        yield


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


T = TypeVar("T")
CHECK_SECONDS = 20.0
"""Longest wait for a tracking server at the start of a job."""
CALL_SECONDS = 30.0
"""Longest single call of a study's logging. A server has two tries of 5 s, a locked SQLite file waits 20 s."""
CREATE_SECONDS = 180.0
"""Longest wait for a SQLite file: a new one goes through all of MLflow's migrations, 2-11 s on a busy machine."""
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # by default one call to a dead server blocks for 247 s
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",  # a busy server (429, 503) may ask for hours
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_RECORD_ENV_VARS_IN_MODEL_LOGGING": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""Defaults set before mlflow is imported; what the user has set wins."""


def open_client(uri: str, seconds: float = 0.0) -> MlflowClient:
    """A client of `uri` for tracking and registry; mlflow is imported here, quiet and without telemetry.

    Args:
        uri: MLflow address.
        seconds: Each call ends after this time with a TimeoutError, if not before; 0 for MLflow's own limits, which
            are none for a database, and for a server hold from byte to byte.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    logging.getLogger("alembic").setLevel(logging.WARNING)
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    return cast("MlflowClient", _Bounded(client, seconds)) if seconds else client


class _Bounded:
    """A client whose every call ends in time, whatever the other side does."""

    def __init__(self, client: MlflowClient, seconds: float) -> None:
        self._client, self._seconds = client, seconds

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        @functools.wraps(method)
        def call(*args: Any, **named: Any) -> Any:
            return _bounded(self._seconds, lambda: method(*args, **named))

        return call


def check_tracking(uri: str = "") -> str:
    """The checked address: it answers, its schema is there (created when new). A server has 20 s for it.

    Two processes that meet on a new SQLite file take turns under a file lock.

    Raises:
        SourceUnavailable: No answer in time.
        UserError: A wrong address, a file that is no database, refused credentials.
    """
    uri = tracking_uri(uri)
    if uri.startswith("sqlite:"):
        _check_sqlite(sqlite_path(uri), uri)
    else:
        # Within the limit too: a client of a database connects when it is made, and tries for minutes.
        _within(CHECK_SECONDS, uri, lambda: open_client(uri).search_experiments(max_results=1))
    return uri


def _check_sqlite(path: Path, uri: str) -> None:
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        head = path.read_bytes()[:16] if path.stat().st_size < 100 else path.open("rb").read(16)
    except FileNotFoundError:
        head = b""
    except OSError as error:
        raise UserError(f"tracking database {path}: {error.strerror}") from error
    if head not in (b"", b"SQLite format 3\0"):
        raise UserError(f"tracking database {path}: expected a SQLite file; found something else")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"tracking database {path}: not writable")
    try:
        with FileLock(f"{path}.lock", timeout=CREATE_SECONDS):
            _within(CREATE_SECONDS, uri, lambda: open_client(uri).search_experiments(max_results=1))
    except Timeout as error:
        raise SourceUnavailable(f"tracking database {path}: locked by another process, see {path}.lock") from error


def _within(seconds: float, uri: str, call: Callable[[], T]) -> T:
    """The answer of `call`, or one clear line after `seconds` at most."""
    try:
        return _bounded(seconds, call)
    except TimeoutError as error:
        raise SourceUnavailable(f"tracking server {public_uri(uri)} {error}") from error
    except Exception as error:
        raise as_user_error(error, uri) from error


def _bounded(seconds: float, call: Callable[[], T]) -> T:
    """The answer of `call`; a stuck one is left to its thread.

    Raises:
        TimeoutError: None after `seconds`.
        Exception: What `call` raises.
    """
    answer: list[T] = []
    failure: list[Exception] = []

    def work() -> None:
        try:
            answer.append(call())
        except Exception as error:  # carried to the caller below
            failure.append(error)

    thread = threading.Thread(target=work, name="bishop-mlflow-call", daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if answer:
        return answer[0]
    raise TimeoutError(f"did not answer within {seconds:.0f} s")


def as_user_error(error: Exception, uri: str) -> UserError:
    """One line for a failed call: the public address and the reason, never a credential."""
    if isinstance(error, UserError):
        return error
    text = str(error)
    where = public_uri(uri)
    if isinstance(error, ModuleNotFoundError):
        hint = ": pip install 'bishop-ray[server]'" if error.name == "psycopg" else ""
        return UserError(
            f"tracking server {where}: the Python package {error.name!r} of this database is missing{hint}"
        )
    if "out-of-date database schema" in text:
        return UserError(f"tracking database {where} was made by an older MLflow; run: mlflow db upgrade URI")
    for code, meaning in (("401", "no or wrong credentials"), ("403", "access denied")):
        if f"error code {code}" in text or f"status code {code}" in text:
            return UserError(f"tracking server {where} refused the request ({code}: {meaning})")
    return SourceUnavailable(f"tracking server {where} is not available: {reason(error)}")


def reason(error: BaseException) -> str:
    """A few words for a failed call; unlike the error's own text they hold no address and no credential."""
    text = str(error)
    known = (
        "Connection refused", "timed out", "Name or service not known", "Temporary failure in name resolution",
        "No route to host", "Network is unreachable", "Connection reset", "Connection aborted", "database is locked",
        "no such table", "unable to open database file", "disk is full", "Max retries exceeded",
        "did not answer",
    )  # fmt: skip
    for words in known:
        if words.lower() in text.lower():
            return words.lower()
    return str(getattr(error, "error_code", "") or getattr(error, "strerror", "") or type(error).__name__)


def experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    """The id of experiment `name`, created when new; artifacts lie beside the database, or where the server decides.

    Raises:
        UserError: The experiment was deleted by someone and not yet purged.
    """
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, artifact_location=_artifact_location(uri, name)))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)  # another process was faster
    if found is None or found.lifecycle_stage != "active":
        raise UserError(f"MLflow experiment {name!r} is deleted; restore it (mlflow experiments restore) or purge it")
    return str(found.experiment_id)


def _artifact_location(uri: str, name: str) -> str | None:
    if uri.startswith(SERVERS):
        return None
    base = sqlite_path(uri).parent if uri.startswith("sqlite:") else home()
    return (base / "mlartifacts" / safe_file_name(name)).as_uri()


def search_all(client: MlflowClient, experiments: list[str], filter_string: str, deleted: bool = False) -> list[Run]:
    """All active runs that match, over all pages, oldest first; with `deleted` also those that someone deleted."""
    from mlflow.entities import ViewType

    runs: list[Run] = []
    token: str | None = None
    view = ViewType.ALL if deleted else ViewType.ACTIVE_ONLY
    order = ["attributes.start_time ASC"]
    while True:
        page = client.search_runs(experiments, filter_string, view, 1000, order, token)
        runs.extend(page)
        token = page.token
        if not token:
            return runs


def quoted(text: str) -> str:
    """`text` as a literal of MLflow's search language.

    Raises:
        UserError: It holds both kinds of quotes, which the language cannot express.
    """
    if "'" not in text:
        return f"'{text}'"
    if '"' in text:
        raise UserError(f"name {text!r}: expected at most one kind of quotation mark")
    return f'"{text}"'
