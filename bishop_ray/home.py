"""The one folder of this user's runs, and how a file is written there. Imports nothing heavy."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """``$BISHOP_RAY_HOME``, else ``~/bishop_ray``; absolute, not created."""
    given = os.environ.get("BISHOP_RAY_HOME", "").strip()
    return (Path(given) if given else Path("~/bishop_ray")).expanduser().absolute()


def write_whole(path: Path, text: str) -> None:
    """Writes a UTF-8 file, its folder too; a reader sees the old one or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, "utf-8")
    part.replace(path)
