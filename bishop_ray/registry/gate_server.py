"""The other side of ``gate.py``: loads registered files in a fresh process and says whether they answer as stored.

Started as ``python -m bishop_ray.registry.gate_server`` in no GPU's sight. It imports PyTorch once and forks for every
request, so that each model is loaded by a process that has loaded nothing before, and whatever a library does there
(leak, crash, never end) ends with it. A request is a line of JSON: the folder with ``predictor`` and ``gate``, and how
long the check may take in seconds. The answer is a line of JSON: ``failure``, "" where all is well, ``cases`` and
``worst``, the largest difference found.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from bishop_ray.errors import UserError
from bishop_ray.predictor import Predictor
from bishop_ray.registry.gate_cases import FOLDER, read_cases

LAZY = "torch.fx.experimental.symbolic_shapes"
"""What PyTorch imports at a network's first forward pass, half a second: here once for all forks."""
IDLE_SECONDS = 60.0
"""Without a request for so long it ends; the next check starts another one."""


def check(folder: Path) -> dict[str, Any]:
    """The answer for a downloaded folder.

    Args:
        folder: Holds ``predictor`` and ``gate``.
    """
    cases, worst = 0, 0.0
    try:
        predictor = Predictor.load(folder / "predictor")
        for case, expected in read_cases(folder / FOLDER):
            if expected is None:
                return _failed(f"{case.name}: the model could not predict it where it was trained: {case.error}")
            try:
                frame = case.frame(folder / FOLDER)
                found = np.asarray(predictor.output(frame), np.float64)
            except Exception as error:  # of any library: an answer, not an end
                return _failed(f"{case.name}: {type(error).__name__}: {error}")
            if reason := _differs(found, expected, case.tolerance):
                return _failed(f"{case.name}: {reason}")
            cases += 1
            worst = max(worst, float(np.abs(found - expected).max(initial=0.0)))
    except UserError as error:
        # The folder is a copy that is gone by the time anybody reads this.
        return _failed(str(error).replace(f"{folder}{os.sep}", ""))
    if not cases:
        return _failed("it has no stored sample to be checked with")
    return {"failure": "", "cases": cases, "worst": worst}


def _differs(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], tolerance: float) -> str:
    if found.shape != expected.shape:
        return f"expected predictions of shape {expected.shape}; found {found.shape}"
    if not np.isfinite(expected).all():
        return "the stored predictions are not finite"
    if not np.allclose(found, expected, rtol=tolerance, atol=tolerance):
        worst = float(np.nanmax(np.abs(found - expected))) if np.isfinite(found).any() else float("nan")
        rows = int((~np.isclose(found, expected, rtol=tolerance, atol=tolerance)).any(axis=1).sum())
        return f"other predictions than stored in {rows} of {len(found)} rows, by up to {worst:.3g} ({tolerance:g})"
    return ""


def _failed(reason: str) -> dict[str, Any]:
    return {"failure": " ".join(reason.split())[:500], "cases": 0, "worst": 0.0}


def _in_a_fork(folder: Path, seconds: float) -> str:
    """The answer's line, made by a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _answer_and_end(folder, seconds, write)
    os.close(write)
    with open(read, encoding="utf-8") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return json.dumps(_failed(f"loading it ended the process: {signal.Signals(os.WTERMSIG(status)).name}"))
    return text or json.dumps(_failed("loading it ended the process"))


def _answer_and_end(folder: Path, seconds: float, write: int) -> NoReturn:
    """In the fork: whatever happens, its copy of the loop below must never go on."""
    try:
        signal.alarm(int(seconds) + 30)  # for a check whose asker was killed
        try:
            answer = check(folder)
        except BaseException as error:
            answer = _failed(f"{type(error).__name__}: {error}")
        os.write(write, json.dumps(answer).encode())  # less than a pipe holds
    finally:
        os._exit(0)


def main() -> None:
    """Answers until the other side is gone, or idle for long."""
    warnings.simplefilter("ignore")
    with contextlib.suppress(ImportError):
        importlib.import_module(LAZY)
    # Libraries may print: the answers get a channel of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory(prefix="bishop-gate-") as empty:
        os.chdir(empty)
        while select.select([0], [], [], IDLE_SECONDS)[0]:
            line = sys.stdin.readline()
            if not line:
                break
            folder, seconds = json.loads(line)
            answers.write(_in_a_fork(Path(folder), seconds) + "\n")
            answers.flush()
        os.chdir("/")


if __name__ == "__main__":
    main()
