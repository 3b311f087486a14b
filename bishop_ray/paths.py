"""The folder of this user's runs, the atomic writing of files, a changed environment. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping
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
    with replacing_file(path) as part:
        part.write_text(text, "utf-8")


@contextlib.contextmanager
def replacing_file(path: Path, *, flushed: bool = False) -> Iterator[Path]:
    """A file to write beside `path`, which takes its place if nothing fails; no reader ever sees half of it.

    Args:
        path: The file, in an existing folder.
        flushed: Its contents are on the disk before it takes its place, so that a power cut leaves no empty file.
    """
    # Of a name of its own: two processes may write the same file.
    part = path.with_name(f".{path.name[:50]}.{uuid.uuid4().hex[:8]}.part")
    try:
        yield part
        if flushed:
            flush(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """What was written to a file, or the entries of a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def changed_environment(values: Mapping[str, str]) -> Iterator[None]:
    """This process's environment with `values`; afterwards these variables are what they were."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
