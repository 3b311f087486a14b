"""What the tests of the cluster's files share."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CLONE, STORAGE = "/home/ray/bishop_ray", "/mnt/bishop"
Config = dict[str, Any]


def locked_ray() -> str:
    """The Ray of the lock file."""
    found = re.search(r"^ray==(\S+)$", (ROOT / "requirements.lock").read_text("utf-8"), re.MULTILINE)
    assert found
    return found[1]


def environment(run_options: list[str]) -> dict[str, str]:
    """What ``docker run`` is told to set."""
    words = shlex.split(" ".join(run_options))
    pairs = [value.partition("=") for flag, value in pairwise(words) if flag in ("-e", "--env")]
    return {name: value for name, _, value in pairs}


def change_at(*path: str | int, value: Any) -> Callable[[Config], None]:
    """A slip: `value` where `path` leads."""

    def change(config: Config) -> None:
        place: Any = config
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return change
