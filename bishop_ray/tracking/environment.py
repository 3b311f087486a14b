"""What a result was computed with: versions, commit, processor."""

from __future__ import annotations

import platform
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import bishop_ray

LIBRARIES = (
    "ray", "torch", "optuna", "mlflow", "numpy", "pandas", "scikit-learn", "xgboost", "lightgbm", "catboost", "tabpfn",
    "tabicl", "pytabkit",
)  # fmt: skip
"""Whose version may change a result."""


def environment() -> dict[str, str]:
    """Versions of Python and of the libraries that decide a result, the platform, and the git commit if there is one.

    ``git_dirty`` says that the sources were not that commit's.
    """
    found = {"version.python": sys.version.split()[0]}
    for name in LIBRARIES:
        try:
            found[f"version.{name}"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["version.bishop_ray"] = bishop_ray.__version__
    found["processor"] = processor()
    found["platform"] = platform.platform()
    return found | _source()


def processor() -> str:
    """The processor's own name, where Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


@cache
def _source() -> dict[str, str]:
    """Commit of a checkout and whether its files were changed since; the state at the first call."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():  # an installed copy: the repository around it would be somebody else's
        return {}
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"git_commit": commit} | ({"git_dirty": "true"} if changed else {})


def _git(folder: Path, *words: str) -> str:
    try:
        command = ["git", "-C", str(folder), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
