"""From where the files of a registered model may be read.

A registry says where the files of a version lie, and whoever can write to it can say anything: a folder of this
machine, a bucket, another host, which would be sent the password of the tracking server. So files are read only from

- the artifact service of the tracking server itself: ``mlflow-artifacts:/...``, without a host or with the server's;
- beside a SQLite store, the folders ``mlartifacts`` (where this package puts them) and ``mlruns`` (where MLflow does);
  for other databases ``mlartifacts`` in this user's folder (`home`);
- what the user names in ``BISHOP_RAY_ARTIFACT_ROOTS``: folders or addresses such as ``s3://bucket/mlflow``, separated
  by commas, for a tracking server that leaves its artifacts to a store that clients reach by themselves.

No step of the path may be "..", and no symbolic link may lead out of the model's folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bishop_ray.addresses import public_address
from bishop_ray.errors import UserError
from bishop_ray.home import home
from bishop_ray.tracking.address import SERVERS, sqlite_path

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
