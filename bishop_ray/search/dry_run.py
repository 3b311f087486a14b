"""Dry run: one short training of a model on a few rows of a table, without Ray."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from bishop_ray.config import StudyConfig, TrialConfig
from bishop_ray.data.split import split_dataset
from bishop_ray.data.table import RawDataset
from bishop_ray.errors import BadTable, TrainingFailed, UserError
from bishop_ray.models import not_installed
from bishop_ray.search.dataset import Loaded, Prepared, prepare, unable
from bishop_ray.search.space import load_space, unflatten

ROWS = 100
"""Rows of a tryout, as far as the table's classes and rare values allow."""
_PARTS = (0.7, 0.15, 0.15)
OK, SKIPPED, FAILED = "ok", "skipped", "failed"


@dataclass(frozen=True)
class DryRun:
    """How a model did.

    Attributes:
        model: Its name.
        outcome: `OK`; `SKIPPED`, when a search leaves it out too; `FAILED`.
        reason: Why it was skipped or failed, in one line.
        seconds: What it took.
    """

    model: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0


def try_model(config: StudyConfig, raw: RawDataset) -> DryRun:
    """Trains the model's first point for one epoch or chunk of rounds, saves it, loads it and predicts other rows.

    Args:
        config: The study whose model is tried.
        raw: The whole table.
    """
    began = time.perf_counter()
    if reason := not_installed(config.model):
        return DryRun(config.model, SKIPPED, reason)
    try:
        if reason := _train_and_predict(config, raw):
            return DryRun(config.model, SKIPPED, reason)
    except Exception as error:  # whatever a library raises is what is asked for here
        kind = "" if isinstance(error, UserError | TrainingFailed) else f"{type(error).__name__}: "
        words = (str(error).strip().splitlines() or ["no message"])[0][:300]
        return DryRun(config.model, FAILED, kind + words, time.perf_counter() - began)
    return DryRun(config.model, OK, seconds=time.perf_counter() - began)


def _train_and_predict(config: StudyConfig, raw: RawDataset) -> str:
    """Why the model cannot be trained on such a table, or ""."""
    from bishop_ray.predictor import Predictor
    from bishop_ray.training.job import PREDICTOR, train_here

    prepared, asked = _sample(config, raw)
    if reason := unable(config, prepared):
        return reason
    # A few rows may hold one class only, of which no area under a curve exists.
    metric = "accuracy" if raw.task.is_classification else "r2"
    params = unflatten(load_space(config.space, config.model).defaults)
    job = TrialConfig.from_params(config.model, params, metric=metric, max_epochs=1, seed=config.seed)
    with tempfile.TemporaryDirectory(prefix="bishop-doctor-") as name:
        folder = Path(name)
        train_here(job, prepared.data, folder / "checkpoint", lambda report: True, folder)
        answer = Predictor.load(folder / PREDICTOR).predict(asked.frame)
    if len(answer) != len(asked) or answer.isna().any():
        raise TrainingFailed(f"predicted {int(answer.notna().sum())} of {len(asked)} rows")
    return ""


def _sample(config: StudyConfig, raw: RawDataset) -> tuple[Prepared, RawDataset]:
    """Some 70 rows to train on and 15 to watch, encoded; and 15 to predict. More where these say nothing."""
    # of a hundred rows most groups, times and weights are gone
    plain = replace(raw, weights=None, groups=None, time=None)
    most = [max(ROWS, 3 * raw.target.nunique() if raw.task.is_classification else 0), 10 * ROWS, 100 * ROWS]
    for rows in sorted(most):
        parts = split_dataset(plain, config.seed, _PARTS, rows)
        sizes = (len(parts.train), len(parts.validation), len(parts.test))
        loaded = Loaded(replace(config, metric=""), parts.train, parts.validation, "", sizes)
        try:
            return prepare(loaded), parts.test
        except BadTable:  # columns that are nearly constant
            if sum(sizes) == len(raw) or rows == max(most):
                raise
    raise AssertionError("not reached")
