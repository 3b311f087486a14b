"""Where a service is: its address, and the note by which another process of this user finds its Ray."""

from __future__ import annotations

import importlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from bishop_ray.errors import SourceUnavailable, UserError

START_SECONDS = 180.0
"""How long another process may take to start the service that this one is to update."""

_ACCESS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Variables by which Ray knows its own token, which is another one than that of the service."""


def free_port(host: str, port: int) -> int:
    """`port`, or a free one for 0.

    Raises:
        UserError: It cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
            return int(trial.getsockname()[1])
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: cannot be listened on: {error.strerror or error}") from None


def url_of(host: str, port: int) -> str:
    """The address that clients use."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def ray_access() -> dict[str, str]:
    """How the Ray of this process is reached, for `enter`."""
    return {name: os.environ[name] for name in _ACCESS if name in os.environ}


def enter(access: dict[str, str]) -> None:
    """Has this process join a Ray with the token of `access`, whatever its own environment says."""
    raylet: Any = importlib.import_module("ray._raylet")
    for name in _ACCESS:
        os.environ.pop(name, None)
    os.environ.update(access)
    # Ray read the variables when it was imported.
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def write_note(note: Path, values: dict[str, Any]) -> None:
    """Writes a note that this user alone can read."""
    part = note.with_suffix(".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(values, file)
    part.replace(note)


def read_note(note: Path) -> dict[str, Any]:
    """What the process that serves has noted; waits while it is starting.

    Raises:
        SourceUnavailable: It does not get ready.
    """
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        try:
            found = json.loads(note.read_text("utf-8"))
            access = {name: str(found["access"][name]) for name in _ACCESS if name in found["access"]}
            place = {"address": str(found["address"]), "host": str(found["host"]), "port": int(found["port"])}
            return place | {"access": access}
        except FileNotFoundError:
            time.sleep(0.5)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(f"{note}: expected where the running service is; found a damaged file") from error
    raise SourceUnavailable(f"another process has been starting this service for {START_SECONDS:g} seconds; see there")
