"""The connection to MLflow: quiet client, checked server, experiments, pages of runs."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from bishop_ray.errors import SourceUnavailable, UserError
from bishop_ray.home import home
from bishop_ray.tracking.address import SERVERS, public_uri, sqlite_path, tracking_uri
from bishop_ray.tracking.names import safe_file_name

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

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
