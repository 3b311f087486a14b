"""A registered model as a `Predictor` again, without running anything that lies in the registry.

Files are read only from where ``roots.py`` allows it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from bishop_ray.errors import UnknownName, UserError
from bishop_ray.tracking.address import tracking_uri
from bishop_ray.tracking.aliases import all_models, all_versions
from bishop_ray.tracking.guards import from_mlflow, patient
from bishop_ray.tracking.roots import check_links, check_source, local_path
from bishop_ray.tracking.store import as_user_error, open_client, reason

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from bishop_ray.predictor import Predictor


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
