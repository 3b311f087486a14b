"""A small store of an earlier version, ``tests/data/store_v1``: unpacked where a test wants it, and the jobs on it.

Everything here goes through the command line and the formats of Optuna, MLflow and SQLite, so that it holds whatever
the package's modules are called. ``tests/data/make_old_store.py`` says how the store was made.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

ROOT = Path(__file__).resolve().parents[1]
STORE = ROOT / "tests" / "data" / "store_v1"
HOME, EXPECTED = "home.tar.xz", "expected.json"
PLACE = "/store_v1"
"""Stands in the archive for the folder that the store was made in."""

_ONE = ["--max-concurrent", "1"]
_RENTS = ["--table", "rents.csv", "--target", "rent", "--space", "tiny", "--max-epochs", "8", *_ONE]
_CHURN = ["--table", "churn.csv", "--target", "left", "--models", "xgboost", "mlp", "--metric", "neg_log_loss", *_ONE]
_MLP = ["--model", "mlp", "--set", "n_blocks=2", "d_block=8", "lr=0.01", "batch_size=16", "--max-epochs", "40"]
_FEWER = ["--models", "bishop", "--settings", "decreasing_50"]
FINISHED = (
    ["tune.py", *_RENTS, "--trials", "5", "--eval-seeds", "1", "--seed", "3"],
    ["tune.py", *_CHURN, "--trials", "9", "--max-epochs", "12", "--seed", "2"],
)
"""What has ended in the store, and registered models."""
HALF_DONE = {
    "single": ["tune.py", *_RENTS, "--trials", "8", "--eval-seeds", "1", "--seed", "4"],
    "several": ["tune.py", *_CHURN, "--trials", "9", "--max-epochs", "12", "--seed", "0"],
    "fixed": ["train.py", "--table", "rents.csv", "--target", "rent", *_MLP, "--seeds", "3", *_ONE],
    "ablation": ["ablate.py", "sparsity", *_RENTS, *_FEWER, "--runs", "2", "--seed", "3"],
}
"""What was killed in the middle. All are run in the store's folder, which has tables and search spaces."""


def unpack(folder: Path) -> Path:
    """The store in the new `folder`, as if it had been made there: tables, search spaces, and ``home``."""
    shutil.copytree(STORE, folder, ignore=shutil.ignore_patterns(HOME, EXPECTED))
    with tarfile.open(STORE / HOME) as archive:
        archive.extractall(folder, filter="data")
    move(folder / "home", PLACE, str(folder))
    return folder


def move(home: Path, old: str, new: str) -> None:
    """Writes `new` for the place `old` in all that names it: texts, and the columns of MLflow's database."""
    for path in home.rglob("*"):
        if not path.is_file() or old.encode() not in (content := path.read_bytes()):
            continue
        if content.startswith(b"SQLite format 3\0"):
            _move_rows(path, old, new)
        else:
            path.write_text(content.decode().replace(old, new))


def _move_rows(path: Path, old: str, new: str) -> None:
    database = sqlite3.connect(path)
    with database:
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            for _, column, *_ in database.execute(f'PRAGMA table_info("{table}")').fetchall():
                database.execute(
                    f'UPDATE "{table}" SET "{column}" = replace("{column}", ?, ?) '
                    f'WHERE typeof("{column}") = \'text\' AND instr("{column}", ?)',
                    (old, new, old),
                )
    database.execute("VACUUM")  # nothing of what was overwritten stays in free pages
    database.close()


def environment(folder: Path) -> dict[str, str]:
    """That of a job on the store in `folder`."""
    env = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI")}
    return env | {"BISHOP_RAY_HOME": str(folder / "home"), "PYTHONUNBUFFERED": "1"}


def begin(command: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """A job in its own process, its output in a pipe; ``command`` is the file in ``jobs`` and its flags."""
    line = [sys.executable, str(ROOT / "jobs" / command[0]), *command[1:]]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(line, cwd=folder, env=environment(folder), **pipe)


def run(command: Sequence[str], folder: Path, codes: Sequence[int] = (0,)) -> str:
    """What a job prints that must end with one of `codes`."""
    with begin(command, folder) as process:
        try:
            text, _ = process.communicate(timeout=600)
        finally:
            process.kill()
    assert process.returncode in codes, text
    return text


def tracking(folder: Path) -> str:
    """MLflow's address."""
    return f"sqlite:///{folder / 'home' / 'mlflow.db'}"


def trials(folder: Path, study: str) -> list[FrozenTrial]:
    """The trials of a study that were asked for, as its journal has them now; none before there is a study."""
    path = folder / "home" / "studies" / study / "optuna.journal"
    if not path.is_file():  # Optuna would make an empty one
        return []
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = JournalStorage(JournalFileBackend(str(path)))
    if study not in {known.study_name for known in storage.get_all_studies()}:
        return []
    found = optuna.load_study(study_name=study, storage=storage).get_trials(deepcopy=False)
    return [trial for trial in found if trial.state != TrialState.WAITING]


def facts(trial: FrozenTrial) -> dict[str, Any]:
    """What must be the same of a trial whether or not its search was interrupted, as JSON has it."""
    reports = {str(step): value for step, value in sorted(trial.intermediate_values.items())}
    return {"state": trial.state.name, "value": trial.value, "params": trial.params, "reports": reports}


def said(model: Any, name: str, folder: Path) -> np.ndarray[Any, Any]:
    """What a model says of ten rows of its table, columns turned round: probabilities of classes, or numbers."""
    frame = pd.read_csv(folder / f"{name}.csv").head(10)
    frame = frame[frame.columns[::-1]]
    return (model.predict_proba(frame) if name == "churn" else model.predict(frame)).to_numpy()
