"""What a result was computed with: versions, commit, processor."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import bishop_ray

LIBRARIES = (
    "ray", "torch", "optuna", "mlflow", "numpy", "pandas", "scikit-learn", "xgboost", "lightgbm", "catboost", "tabpfn",
    "tabicl", "pytabkit",
)  # fmt: skip
"""Whose version may change a result."""


def environment() -> dict[str, str]:
    """Versions of Python and of the libraries that decide a result, and the git commit if there is one."""
    found = {"version.python": sys.version.split()[0]}
    for name in LIBRARIES:
        try:
            found[f"version.{name}"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["version.bishop_ray"] = bishop_ray.__version__
    found["processor"] = processor()
    commit = _git_commit()
    return found | ({"git_commit": commit} if commit else {})


def processor() -> str:
    """The processor's own name, where Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _git_commit() -> str:
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():  # an installed copy: the repository around it would be somebody else's
        return ""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
