"""The one folder of this user's runs, when no place is given. Imports nothing heavy."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """``$BISHOP_RAY_HOME``, else ``~/bishop_ray``; absolute, not created."""
    given = os.environ.get("BISHOP_RAY_HOME", "").strip()
    return (Path(given) if given else Path("~/bishop_ray")).expanduser().absolute()
