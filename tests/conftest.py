"""What every test gets: fixed seeds, no foreign settings; and, where asked for, the loopback OpenML mirror."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SHARED = Path(os.environ.get("BISHOP_SHARED") or Path(__file__).resolve().parents[2] / "shared")
"""Data and the mirror, beside the clone; not part of the repository."""


LONGEST = (
    "test_faults", "test_jobs", "test_search", "test_automl", "test_ray_train", "test_sklearn_bishop",
    "test_cluster_jobs", "test_odd_tables", "test_serving_ray", "test_ablate_job", "test_fault_trials",
    "test_warm_start", "test_security_study",
)  # fmt: skip
"""Files of tests that take minutes. They begin first: two processes share the files, and end at about the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Brings the longest files to the front; the order is otherwise as collected."""
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """Ctrl-C works in tests, also under nohup or in the background of a script, where it starts out ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _own_notes() -> Iterator[None]:
    """What a job does with the package's notes ends with its test: the next one may look for them."""
    notes = logging.getLogger("bishop_ray")
    before = notes.handlers, notes.propagate, notes.level
    yield
    notes.handlers, notes.propagate, notes.level = before


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch computes on one thread, as trials do."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads the user's OpenML settings or writes to the user's cache."""
    monkeypatch.delenv("BISHOP_OPENML_SERVER", raising=False)
    monkeypatch.setenv("OPENML_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "unset-openml-cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "config"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The shared folder; tests that need it are skipped where it is absent."""
    if not (SHARED / "openml_mirror" / "serve.py").is_file():
        pytest.skip(f"needs the shared folder with data and OpenML mirror, not at {SHARED}")
    return SHARED


@pytest.fixture(scope="session")
def mirror(shared: Path) -> Iterator[str]:
    """Address of an OpenML mirror on a free loopback port, in a process of its own."""
    with openml_server(shared / "data") as address:
        yield address


@contextmanager
def openml_server(folder: Path) -> Iterator[str]:
    """Address of a mirror of the tables in `folder`, which has a manifest of them."""
    command = [sys.executable, str(SHARED / "openml_mirror" / "serve.py"), "--port", "0", "--data", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:"), address
            yield address
        finally:
            process.terminate()
            process.wait(10)


@pytest.fixture
def openml_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private, empty cache folder."""
    folder = tmp_path / "openml"
    monkeypatch.setenv("OPENML_CACHE_DIR", str(folder))
    return folder


def _tables() -> tuple[list[Any], list[Any], list[Any]]:
    """The rows of the fault table; endings of odd tables and their messages: of the tests of this process."""
    faults, odd = sys.modules.get("fault_tools"), sys.modules.get("odd_tables")
    endings = (list(odd.TABLE.items()), list(odd.ERRORS.items())) if odd else ([], [])
    return (list(faults.TABLE if faults else ()), *endings)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of several hands its tables to the one that prints them."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["tables"] = _tables()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Takes them over."""
    output = getattr(node, "workeroutput", None)
    if error is not None or not output:
        return
    import fault_tools
    import odd_tables

    rows, endings, messages = output["tables"]
    fault_tools.TABLE.extend(rows)
    odd_tables.TABLE.update({tuple(key): count for key, count in endings})
    odd_tables.ERRORS.update(dict(messages))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The fault table, where faults were tried; the endings of odd tables, where they were."""
    if hasattr(terminalreporter.config, "workeroutput"):
        return
    rows, endings, _ = _tables()
    if rows:
        terminalreporter.section("fault table")
        columns = list(rows[0])
        terminalreporter.line(f"| {' | '.join(columns)} |")
        terminalreporter.line("|---" * len(columns) + "|")
        for row in rows:
            terminalreporter.line(f"| {' | '.join(str(row[c]) for c in columns)} |")
    if endings:
        terminalreporter.section("odd tables")
        for line in sys.modules["odd_tables"].summary():
            terminalreporter.line(line)
