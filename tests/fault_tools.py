"""Jobs that are killed on purpose, and what must hold of everything they left."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from mlflow import MlflowClient
from optuna.trial import FrozenTrial, TrialState

from bishop_ray.search.journal import JOURNAL
from bishop_ray.search.study import read_study
from bishop_ray.tracking import runs_frame

ROOT = Path(__file__).resolve().parents[1]
TABLE: list[dict[str, Any]] = []
"""The rows of the fault table, printed at the end of the test session."""


class Job:
    """``jobs/tune.py`` in a process of its own, which can be killed at any moment.

    Args:
        flags: Its flags.
        home: Its ``BISHOP_RAY_HOME``.
        extra: Further environment variables.
        prefix: A command that starts the process, e.g. in another namespace.
    """

    def __init__(
        self, flags: list[str], home: Path, extra: dict[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> None:
        env = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI")}
        env |= {"BISHOP_RAY_HOME": str(home), "PYTHONUNBUFFERED": "1", **(extra or {})}
        self.home, self.lines = home, list[str]()
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(ROOT / "jobs" / "tune.py"), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        self._agents: list[psutil.Process] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def text(self) -> str:
        """Everything it has printed."""
        return "\n".join(self.lines)

    def until(self, true: Callable[[], bool], seconds: float = 120.0) -> bool:
        """Waits for a moment; False if the job ended before it came."""
        ends = time.monotonic() + seconds
        while not true():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < ends, f"the moment never came:\n{self.text}"
            time.sleep(0.01)
        return True

    def says(self, words: str) -> bool:
        """Waits until it has printed `words`."""
        return self.until(lambda: words in self.text)

    def children(self, name: str = "") -> list[psutil.Process]:
        """Processes below it whose command line contains `name`."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if name in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def kill(self) -> None:
        """SIGKILL of the driver alone; what holds slots or trains must go by itself, and soon."""
        below = {process: _name(process) for process in self.children()}
        self.process.kill()
        self.process.wait(30)
        # Ray's agents look for their parent once in a while only.
        self._agents += [p for p, name in below.items() if name.endswith("Agent")]
        _, alive = psutil.wait_procs([p for p in below if p not in self._agents], timeout=60)
        assert not alive, f"left behind: {[below[p] for p in alive]}"

    def stop(self, sign: int) -> int:
        """Sends a signal; the exit code."""
        self.process.send_signal(sign)
        return self.wait(90)

    def wait(self, seconds: float = 300.0) -> int:
        """Its exit code."""
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code

    def end(self) -> None:
        """Makes sure that nothing of it runs."""
        if self.process.poll() is None:
            self.kill()
        for process in self._agents:
            with contextlib.suppress(psutil.Error):
                process.kill()


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return (process.cmdline() or [""])[0]
    return ""


def study_of(home: Path) -> Path:
    """The folder of the one study there."""
    (journal,) = (home / "studies").glob(f"*/{JOURNAL}")
    return journal.parent


def trials(home: Path) -> list[FrozenTrial]:
    """The study's trials that were asked for, as they are on disk now."""
    found = read_study(study_of(home)).get_trials(deepcopy=False)
    return [trial for trial in found if trial.state != TrialState.WAITING]


def ops(home: Path, key: str) -> int:
    """How many entries of the journal have a key; half a line at its end does not count."""
    path = next((home / "studies").glob(f"*/{JOURNAL}"), None)
    if path is None:
        return 0
    lines = path.read_text("utf-8").splitlines()
    return sum(f'"{key}"' in line for line in lines)


def started(home: Path, number: int) -> bool:
    """Whether trial `number` was asked for."""
    return ops(home, "param_name") > 0 and any(t.number >= number for t in trials(home))


def reports(home: Path) -> int:
    """Reports of all trials together."""
    return ops(home, "intermediate_value")


def same_search(one: list[FrozenTrial], other: list[FrozenTrial]) -> None:
    """Asserts that two studies hold the same: points, states, every reported value."""

    def facts(trial: FrozenTrial) -> tuple[Any, ...]:
        point = json.loads(trial.user_attrs["params"])
        return trial.number, trial.state, trial.value, trial.params, trial.intermediate_values, point

    for a, b in zip(one, other, strict=True):
        assert facts(a) == facts(b)


@dataclass(frozen=True)
class Audit:
    """What a fault left, counted from the study and from MLflow."""

    states: Counter[str]
    runs: Counter[str]
    versions: int


def audit(fault: str, home: Path, asked: int, versions: int = 1, uri: str = "") -> Audit:
    """Asserts the promise, and adds a row to the fault table; `uri` is MLflow's address when it is not in `home`.

    Every trial asked for is there and has ended; MLflow has one run for each and one for the study, and none of them
    runs; the winner is registered once, and is the best of the study.
    """
    found = trials(home)
    states = Counter(trial.state.name for trial in found)
    uri = uri or f"sqlite:///{home / 'mlflow.db'}"
    frame = runs_frame(uri)
    status = {int(row["trial"]): str(row["status"]) for _, row in frame.iterrows()}
    runs, numbers = Counter(frame["status"]), Counter(frame["trial"].astype(int))
    registered = MlflowClient(uri).search_model_versions()
    lost = [n for n in range(asked) if n not in {t.number for t in found if t.state.is_finished()}]
    doubled = [n for n, count in numbers.items() if count > 1] + [t.number for t in found if t.number >= asked]
    TABLE.append(
        {
            "fault": fault,
            "asked": asked,
            "finished": states["COMPLETE"],
            "early-stopped": states["PRUNED"],
            "failed": states["FAIL"],
            "lost": len(lost),
            "duplicated": len(doubled),
            "MLflow runs": ", ".join(f"{count} {status}" for status, count in sorted(runs.items())),
        }
    )
    assert not lost, f"lost trials {lost}"
    assert not doubled, f"doubled trials {doubled}"
    assert runs["RUNNING"] == runs["SCHEDULED"] == 0, runs
    assert sorted(numbers) == list(range(-1, asked)), f"runs of trials {sorted(numbers)}"
    assert len(registered) == versions, registered
    by_state = {"COMPLETE": "FINISHED", "PRUNED": "KILLED", "FAIL": "FAILED"}
    for trial in found:
        assert status[trial.number] == by_state[trial.state.name], f"trial {trial.number} in MLflow"
    assert status[-1] == "FINISHED"
    return Audit(states, runs, len(registered))


def moments(seed: int, count: int, longest: float) -> list[float]:
    """Seeded delays in seconds."""
    drawn = random.Random(seed)
    return [drawn.uniform(0.0, longest) for _ in range(count)]


def terminate(sign: signal.Signals, job: Job) -> None:
    """Sends a signal and asserts that the job says so and ends as interrupted."""
    assert job.stop(sign) == 130, job.text
    assert "interrupted" in job.text


@contextlib.contextmanager
def ray_with(module: Any) -> Iterator[None]:
    """Ray in this process, with the model of a test module (`NAME`, `register`, `in_every_worker`) known everywhere."""
    import ray

    from bishop_ray.models import MODELS
    from bishop_ray.search.cluster import connect

    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "RAY_RUNTIME_ENV_HOOK")}
    paths = [str(Path(__file__).parent), before["PYTHONPATH"] or ""]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    os.environ["RAY_RUNTIME_ENV_HOOK"] = f"{module.__name__}.in_every_worker"
    module.register()
    connect()
    yield
    ray.shutdown()
    del MODELS[module.NAME]
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
