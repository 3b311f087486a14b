"""The gate before an alias: the files as they lie in the registry must load elsewhere and answer as they did here.

The check is made by ``gate_server.py`` in a process without a GPU and in an empty folder.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import site
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bishop_ray.errors import SourceUnavailable, UnknownName, UserError
from bishop_ray.registry.gate_cases import FOLDER
from bishop_ray.registry.loading import fetch

SECONDS = 300.0
"""Longest check of one model, the start of the process included, unless its training side took long as well."""
SLOWER = 5.0
"""Times as long as the training side a check may take: of foundation models, on a CPU, every prediction is minutes."""
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class GateResult:
    """The end of a check.

    Attributes:
        failure: Why no alias may point to the version, or "".
        cases: Cases that were reproduced.
        worst: Largest difference from the stored predictions.
        seconds: What it took.
    """

    failure: str
    cases: int = 0
    worst: float = 0.0
    seconds: float = 0.0

    @property
    def tag(self) -> str:
        """As it stands at the version."""
        if self.failure:
            return f"failed: {self.failure}"
        return f"passed: {self.cases} cases, largest difference {self.worst:.1e}"


class _Server:
    """A process of ``gate_server.py``."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        # Its own group: Ctrl-C is for the command, and a check that never ends is ended with all it started.
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", *_flags(), "-m", "bishop_ray.registry.gate_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment(),
            cwd=tempfile.gettempdir(),
            start_new_session=True,
        )
        self._rest = b""

    def alive(self) -> bool:
        """Whether it may be asked."""
        return self.owner == os.getpid() and self._process.poll() is None

    def ask(self, folder: Path, seconds: float, until: float) -> dict[str, Any] | None:
        """The answer; None where it ended by itself without one.

        Args:
            folder: See `check_files`.
            seconds: Longest check.
            until: By `time.monotonic`, when it is given up.

        Raises:
            TimeoutError: None came in time; the process is ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([str(folder), seconds]).encode() + b"\n")
            self._process.stdin.flush()
            return self._answer(until)
        except BrokenPipeError:
            return None
        except BaseException:  # also Ctrl-C: its answer must not be taken for that to the next question
            self.kill()
            raise

    def _answer(self, until: float) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        source = self._process.stdout.fileno()
        waiting = select.poll()  # not select(), which fails where a process has many files open
        waiting.register(source, select.POLLIN)
        while b"\n" not in self._rest:
            if not waiting.poll(max(0.0, until - time.monotonic()) * 1000):
                raise TimeoutError
            part = os.read(source, 65536)
            if not part:
                return None
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def last_words(self) -> str:
        """The last line it wrote to standard error."""
        self._errors.seek(0)
        lines = self._errors.read()[-4000:].decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""

    def leave(self) -> None:
        """Lets it end by itself, which it does at once when its input ends; waits for nothing."""
        if self.owner == os.getpid() and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def kill(self) -> None:
        """Ends it and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._process.communicate()


_lock = threading.Lock()
_server: list[_Server] = []


def get_ready() -> None:
    """Starts the process, which takes seconds, beside what is done before the check; returns at once."""
    with _lock:
        _running()


def check_files(folder: Path, seconds: float | None = None) -> GateResult:
    """Loads the files of a version in a fresh process and compares their answers with the stored ones.

    Args:
        folder: A copy of the version's artifacts: ``predictor`` and ``gate``.
        seconds: Longest wait; by default as `SECONDS` and `SLOWER` say.
    """
    from bishop_ray.registry.gate_cases import seconds_of

    begun = time.monotonic()
    if seconds is None:
        seconds = SECONDS + SLOWER * seconds_of(folder / FOLDER)
    with _lock:
        for _ in range(2):  # one that was idle for long ends by itself, perhaps just now
            server = _running()
            try:
                answer = server.ask(folder, seconds, begun + seconds)
            except TimeoutError:
                return GateResult(f"no answer within {seconds:.0f} s", seconds=time.monotonic() - begun)
            if answer is not None:
                found = time.monotonic() - begun
                return GateResult(str(answer["failure"]), int(answer["cases"]), float(answer["worst"]), found)
            words = server.last_words()
            server.kill()  # it is ending: now it is known to have ended
    return GateResult(f"the process that checks it ended: {words[:300]}", seconds=time.monotonic() - begun)


def check_version(uri: str, name: str, version: str, scratch: Path) -> GateResult:
    """`check_files` of a version as it lies in the registry.

    Args:
        uri: MLflow address.
        name: Registered name.
        version: Its number.
        scratch: Folder for the copy.

    Raises:
        UnknownName: No such model or version.
        SourceUnavailable: The server does not answer.
    """
    copy = scratch / f"copy-{version}"
    copy.mkdir()
    try:
        folder = fetch(uri, name, version, copy, "")
    except (SourceUnavailable, UnknownName):
        raise
    except UserError as error:
        return GateResult(str(error))
    return check_files(folder)


def _running() -> _Server:
    if not _server or not _server[0].alive():
        _end()
        _server.append(_Server())
    return _server[0]


def _end() -> None:
    for server in _server:
        server.leave()
    _server.clear()


atexit.register(_end)


def _flags() -> list[str]:
    """The same libraries as here: those of the user's own folder only where they are used here too."""
    return [] if site.ENABLE_USER_SITE else ["-s"]


def _environment() -> dict[str, str]:
    """Without GPUs, without the tracking server's password, and with this package found where it is found here."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "RAY_"))}
    given = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    paths = [str(_ROOT), *map(os.path.abspath, given)]
    return kept | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
