"""The folder of this user's runs, and the atomic writing of files there. Imports nothing heavy."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from bishop_ray.errors import UserError


def home() -> Path:
    """``$BISHOP_RAY_HOME``, else ``~/bishop_ray``; absolute, not created."""
    given = os.environ.get("BISHOP_RAY_HOME", "").strip()
    return (Path(given) if given else Path("~/bishop_ray")).expanduser().absolute()


def storage_folder(given: str) -> Path:
    """The folder of ``--storage``, else `home`; absolute, not created."""
    return Path(given).expanduser().resolve() if given else home()


def check_storage(folder: Path) -> None:
    """Nothing, if `folder` can be written, or made where it is not there; it is not made yet.

    Raises:
        UserError: It cannot; the message says why.
    """
    try:
        there = next(place for place in (folder, *folder.parents) if place.exists())
        # Tried, not asked for: os.access knows neither full disks nor file systems with rules of their own.
        with tempfile.TemporaryDirectory(dir=there, prefix=".bishop-"):
            pass
    except OSError as error:
        raise UserError(f"--storage or BISHOP_RAY_HOME: cannot write {folder}: {error.strerror or error}") from None


def write_whole(path: Path, text: str) -> None:
    """Writes a UTF-8 file, its folder too; a reader sees the old one or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, "utf-8")
    part.replace(path)
