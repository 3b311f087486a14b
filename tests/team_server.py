"""MLflow on PostgreSQL, started and stopped by the documented command."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "deploy" / "mlflow-server.sh"
USER = "nobody"


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def as_user() -> list[str]:
    """What makes a command run as somebody who is not root.

    Who may read all files, for a checkout in root's home; the id is what PostgreSQL asks for.
    """
    if os.getuid():
        return []
    may = ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    return ["setpriv", f"--reuid={USER}", "--regid=nogroup", "--clear-groups", *may]


def postgres_bin() -> Path:
    """Where PostgreSQL's programs are, or the test is skipped."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4]))
    if found:
        return found[-1].parent
    if on_path := shutil.which("initdb"):
        return Path(on_path).parent
    pytest.skip("PostgreSQL's server is not installed: apt-get install postgresql")


class TeamServer:
    """One folder with its server."""

    def __init__(self, folder: Path) -> None:
        self.bin = postgres_bin()
        self.folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"

    def command(self, action: str, *flags: str, user: bool = True) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "HOME": str(self.folder.parent), "PYTHON": sys.executable}
        line = [*(as_user() if user else []), str(SCRIPT), action, str(self.folder), *flags]
        return subprocess.run(line, env=env, capture_output=True, text=True, timeout=240, check=False)

    def start(self) -> None:
        done = self.command("start", "--port", str(self.port))
        assert done.returncode == 0, done.stdout + done.stderr
        assert self.uri in done.stdout

    def signal(self, number: signal.Signals) -> None:
        """To MLflow and its workers; PostgreSQL goes on."""
        os.killpg(int((self.folder / "mlflow.pid").read_text()), number)

    def sql(self, query: str) -> list[str]:
        line = [*as_user(), str(self.bin / "psql"), "-h", str(self.folder / "socket"), "-d", "mlflow", "-XAtc", query]
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout.splitlines()
