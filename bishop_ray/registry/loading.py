"""Loading of registered models without running anything that lies in the registry; their versions.

A registry says where the files of a version lie, and whoever can write to it can say anything: a folder of this
machine, a bucket, another host, which would be sent the password of the tracking server. So files are read only from

- the artifact service of the tracking server itself: ``mlflow-artifacts:/...``, without a host or with the server's;
- beside a SQLite store, the folders ``mlartifacts`` (where this package puts them) and ``mlruns`` (where MLflow does);
  for other databases ``mlartifacts`` in this user's folder (`home`);
- what the user names in ``BISHOP_RAY_ARTIFACT_ROOTS``: folders or addresses such as ``s3://bucket/mlflow``, separated
  by commas, for a tracking server that leaves its artifacts to a store that clients reach by themselves.

No step of the path may be "..", and no symbolic link may lead out of the model's folder.

Files are read only from where ``roots.py`` allows it.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from bishop_ray.errors import UnknownName, UserError
from bishop_ray.paths import home
from bishop_ray.redact import public_address
from bishop_ray.registry.aliases import all_models, all_versions
from bishop_ray.tracking.client import (
    SERVERS,
    as_user_error,
    from_mlflow,
    open_client,
    patient,
    reason,
    sqlite_path,
    tracking_uri,
)

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel
    from mlflow.tracking import MlflowClient

    from bishop_ray.predictor import Predictor


VARIABLE = "BISHOP_RAY_ARTIFACT_ROOTS"


def check_source(source: str, uri: str) -> None:
    """Nothing, if a version's files may be read from `source`.

    Args:
        source: What the registry says.
        uri: The MLflow address.

    Raises:
        UserError: They may not: says where they are said to lie and what is allowed.
    """
    if _allowed(source, uri):
        return
    expected = "the tracking server's own artifacts" if _is_server(uri) else ", ".join(map(str, _local_roots(uri)))
    raise UserError(
        f"the registry says the model's files lie in {public_address(source)!r}; expected {expected}, "
        f"or a root that you name in {VARIABLE}"
    )


def check_links(folder: Path) -> None:
    """Nothing, if everything in a local folder is a file, a folder, or a link to one in it.

    Raises:
        UserError: Something else; names it.
    """
    top = folder.resolve()
    for place, folders, files in os.walk(top):
        for name in (*folders, *files):
            path = Path(place) / name
            if not path.resolve().is_relative_to(top):
                raise UserError(f"{path}: a link that leaves the model's folder; nothing was read")
            if not (path.is_file() or path.is_dir()):
                raise UserError(f"{path}: expected a file or folder; nothing was read")


def local_path(source: str) -> Path | None:
    """The folder behind a ``file:`` address or a plain path, links followed; None for anything else."""
    parts = urlsplit(source)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path)).resolve()
    if not parts.scheme and not parts.netloc:
        return Path(source).resolve()
    return None


def _allowed(source: str, uri: str) -> bool:
    try:
        parts = urlsplit(source)
    except ValueError:
        return False
    if _climbs(source):
        return False
    if (path := local_path(source)) is not None:
        roots = [*_local_roots(uri), *(found for root in _named() if (found := local_path(root)) is not None)]
        return any(path.is_relative_to(root.resolve()) for root in roots)
    if parts.scheme == "mlflow-artifacts":
        return _is_server(uri) and parts.netloc in ("", urlsplit(uri).netloc.rpartition("@")[2])
    return any(source == root or source.startswith(f"{root}/") for root in _named() if "://" in root)


def _climbs(source: str) -> bool:
    """Whether some step of the path is "..", however it is written, or holds a control character."""
    for _ in range(3):
        source = unquote(source)
    steps = source.replace("\\", "/").split("/")
    return ".." in steps or any(ord(sign) < 32 for sign in source)


def _is_server(uri: str) -> bool:
    return urlsplit(uri).scheme in SERVERS


def _local_roots(uri: str) -> list[Path]:
    if _is_server(uri):
        return []
    if uri.startswith("sqlite:"):
        folder = sqlite_path(uri).parent
        return [folder / "mlartifacts", folder / "mlruns"]
    return [home() / "mlartifacts"]


def _named() -> list[str]:
    return [root.strip().rstrip("/") for root in os.environ.get(VARIABLE, "").split(",") if root.strip().rstrip("/")]


@dataclass(frozen=True)
class VersionRow:
    """A version.

    Attributes:
        name: Registered name.
        version: Its number.
        aliases: Those that point to it.
        model: What predicts.
        metric: Selection metric.
        val_score: Validation score, larger is better; None where none was noted.
        test_score: The same of the test rows.
        trained_on: Its rows.
        gate: "passed: ...", "failed: ...", or "" where it was registered before there was a gate.
        champion: Why it became champion, or not.
        created: UTC, ISO 8601.
        size_bytes: Of the predictor's files, 0 where that was not noted.
    """

    name: str
    version: int
    aliases: tuple[str, ...]
    model: str
    metric: str
    val_score: float | None
    test_score: float | None
    trained_on: str
    gate: str
    champion: str
    created: str
    size_bytes: int


def list_versions(name: str = "", uri: str = "") -> list[VersionRow]:
    """The versions of all registered models, or of one; by name, the newest first.

    Raises:
        UnknownName: No such registered model.
        SourceUnavailable: The server does not answer.
    """
    uri = tracking_uri(uri)
    with patient():
        try:
            client = open_client(uri)
            models = {str(model.name): model for model in all_models(client)}
            if name and name not in models:
                raise UnknownName("registered model", name, models)
            return [row for key in ([name] if name else sorted(models)) for row in _rows(client, models[key])]
        except Exception as error:
            if not from_mlflow(error):
                raise
            raise as_user_error(error, uri) from error


def _rows(client: MlflowClient, model: RegisteredModel) -> list[VersionRow]:
    aliases: dict[str, list[str]] = {}
    for alias, number in sorted(model.aliases.items()):
        aliases.setdefault(str(number), []).append(alias)
    rows = [
        _row(version, tuple(aliases.get(str(version.version), ()))) for version in all_versions(client, str(model.name))
    ]
    return sorted(rows, key=lambda row: -row.version)


def _row(version: ModelVersion, aliases: tuple[str, ...]) -> VersionRow:
    tags = version.tags
    created = datetime.fromtimestamp(version.creation_timestamp / 1000, UTC).isoformat(timespec="seconds")
    size = tags.get("bishop.size_bytes", "")
    return VersionRow(
        str(version.name), int(version.version), aliases, tags.get("bishop.model", ""), tags.get("bishop.metric", ""),
        _number(tags.get("val_score")), _number(tags.get("test_score")), tags.get("trained_on", ""),
        tags.get("bishop.gate", ""), tags.get("bishop.champion", ""), created, int(size) if size.isdigit() else 0,
    )  # fmt: skip


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def load_best(name: str, alias: str = "champion", uri: str = "") -> Predictor:
    """The registered model `name` as a `Predictor`, on the CPU; nothing among its artifacts is executed.

    Args:
        name: Registered name, e.g. ``CR-abalone``.
        alias: ``champion``, a model's name, or a version number.
        uri: MLflow address, see `tracking_uri`.

    Raises:
        UnknownName: No such model, alias or version.
        UserError: The version holds no predictor, a damaged one, or one outside the allowed places (``roots.py``).
        SourceUnavailable: The server does not answer.
    """
    from bishop_ray.predictor import Predictor

    uri = tracking_uri(uri)
    with patient(), tempfile.TemporaryDirectory(prefix="bishop-load-") as scratch:
        return Predictor.load(fetch(uri, name, alias, Path(scratch)))


def fetch(uri: str, name: str, alias: str, scratch: Path, part: str = "predictor") -> Path:
    """A copy in `scratch` of a part of a registered model's artifacts; "" for all of them.

    Raises:
        UnknownName: No such model, alias or version.
        UserError: The version has no such part, or lies outside the allowed places (``roots.py``).
        SourceUnavailable: The server does not answer.
    """
    what = part or "predictor"
    try:
        client = open_client(uri)
        source = client.get_model_version_download_uri(name, resolve(client, name, alias))
        return _download(uri, str(source), scratch, part)
    except (UserError, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"registered model {name!r} ({alias}) holds no {what}: {reason(error)}") from error
    except Exception as error:
        if not from_mlflow(error):
            raise
        if getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":
            raise UserError(f"registered model {name!r} ({alias}) holds no {what}") from error
        raise as_user_error(error, uri) from error


def find_version(name: str, alias: str = "champion", uri: str = "") -> int:
    """The number of the version behind an alias at this moment.

    Args:
        name: Registered name.
        alias: As `load_best` takes it.
        uri: MLflow address, see `tracking_uri`.

    Raises:
        UnknownName: No such model, alias or version.
        SourceUnavailable: The server does not answer.
    """
    uri = tracking_uri(uri)
    with patient():
        try:
            return int(resolve(open_client(uri), name, alias))
        except Exception as error:
            if not from_mlflow(error):
                raise
            raise as_user_error(error, uri) from error


def resolve(client: MlflowClient, name: str, alias: str) -> str:
    """The version number behind an alias.

    Raises:
        UnknownName: No such model, alias or version.
    """
    models = {str(m.name): m for m in all_models(client)}
    if name not in models:
        raise UnknownName("registered model", name, models)
    aliases = {str(key): str(value) for key, value in models[name].aliases.items()}
    versions = {str(v.version) for v in all_versions(client, name)}
    if alias.isdigit():
        if alias not in versions:
            raise UnknownName(f"version of {name}", alias, versions)
        return alias
    if alias not in aliases:
        raise UnknownName(f"alias of {name}", alias, aliases)
    return aliases[alias]


def _download(uri: str, source: str, scratch: Path, part: str) -> Path:
    from mlflow.artifacts import download_artifacts

    check_source(source, uri)
    if (place := local_path(source)) is not None:
        check_links(place)  # a copy would follow them
    path = f"{source.rstrip('/')}/artifacts/{part}".rstrip("/")
    return Path(download_artifacts(artifact_uri=path, dst_path=str(scratch), tracking_uri=uri, registry_uri=uri))
