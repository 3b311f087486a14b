"""Collection of studies, trials and metric histories for a report."""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bishop_ray.data.table import TaskType
from bishop_ray.errors import UnknownName
from bishop_ray.paper.printed import table
from bishop_ray.report.paper_section import own_key, paper_dataset
from bishop_ray.report.study_records import COMPLETE, EARLY, FAILED, OPEN, Predictions, Study, Trial
from bishop_ray.search.ensemble import AUTOML
from bishop_ray.search.evaluate import PREDICTIONS
from bishop_ray.search.sync import known_trials, study_of
from bishop_ray.tracking import KnownTrial
from bishop_ray.tracking.naming import flatten
from bishop_ray.tracking.query import MetricPoint, Reader, RunRecord

SCORE, LAYERS = "epoch/val_score", "layers/"
ENDED = {"FINISHED": COMPLETE, "KILLED": EARLY, "FAILED": FAILED}


@dataclass(frozen=True)
class Selection:
    """What is reported.

    Attributes:
        studies: Names of studies; a search over several models stands for the studies of its models.
        experiment: An MLflow experiment, "" for any.
        paper_table: Only datasets of this table of the paper, 0 for all.
    """

    studies: tuple[str, ...] = ()
    experiment: str = ""
    paper_table: int = 0

    @property
    def name(self) -> str:
        """Of the report."""
        if self.paper_table:
            return f"paper-table-{self.paper_table}"
        if len(self.studies) > 3:
            digest = hashlib.sha256("\0".join(sorted(self.studies)).encode()).hexdigest()[:8]
            return f"{self.studies[0]}-and-{len(self.studies) - 1}-more-{digest}"
        return "-".join(self.studies) or self.experiment

    def place(self, reader: Reader) -> str:
        """The experiment to look in, "" for all: a paper table's own one, where there is one and none is named."""
        own = self.name if self.paper_table else ""
        return self.experiment or (own if own in reader.experiments() else "")


def collect_studies(reader: Reader, selection: Selection, storage: Path, study_db: str = "") -> list[Study]:
    """The selected studies, of several runs of one name the newest, sorted by dataset and model.

    Args:
        reader: Of MLflow.
        selection: What is wanted.
        storage: Where studies are kept.
        study_db: Database of those that are not kept there.

    Raises:
        UnknownName: A study or an experiment that MLflow does not have.
        UserError: MLflow does not answer, or the database does not open.
    """
    runs = reader.runs({"bishop.kind": "study"}, selection.place(reader))
    newest = {run.tags.get("bishop.study", ""): run for run in sorted(runs, key=lambda run: run.start)}
    chosen = _named(newest, selection.studies) if selection.studies else list(newest.values())
    chosen = [run for run in chosen if run.tags.get("model") != AUTOML]
    if selection.paper_table:
        known = table(selection.paper_table)
        chosen = [run for run in chosen if paper_dataset(known, run.tags.get("dataset", ""))]
    studies = [_study(reader, run, storage, study_db) for run in chosen]
    return sorted(studies, key=lambda s: (s.dataset, s.model, s.seed))


def _named(newest: Mapping[str, RunRecord], names: Sequence[str]) -> list[RunRecord]:
    """The runs of the named studies; a search over several models is replaced by its studies."""
    found: dict[str, RunRecord] = {}
    for name in names:
        if name not in newest:
            raise UnknownName("study", name, newest)
        if newest[name].tags.get("model") == AUTOML:
            found |= {key: run for key, run in newest.items() if run.tags.get("automl") == name}
        else:
            found[name] = newest[name]
    return list(found.values())


def _study(reader: Reader, run: RunRecord, storage: Path, study_db: str) -> Study:
    identity, name = run.tags.get("bishop.study_id", ""), run.tags.get("bishop.study", "")
    runs = reader.runs({"bishop.kind": "trial", "bishop.study_id": identity}, run.experiment)
    trials = {trial.number: trial for trial in (_trial(reader, one) for one in runs)}
    stored = _stored(storage / "studies" / name, identity, study_db)
    for known in stored.trials:
        if known.number not in trials or (trials[known.number].state == OPEN and known.status):
            trials[known.number] = _from_study(known)
    tags, metrics = _with_result(run, stored.result)
    predictions = _predictions(reader.text(run.run_id, PREDICTIONS))
    return Study(
        name=name,
        run_id=run.run_id,
        experiment=run.experiment,
        dataset=own_key(tags.get("dataset", "")),
        model=tags.get("model", ""),
        task=TaskType(tags["task"]),
        metric=tags.get("metric", ""),
        params=run.params,
        metrics=metrics,
        tags=tags,
        start=run.start,
        end=run.end,
        trials=tuple(trials[number] for number in sorted(trials)),
        classes=predictions[0],
        validation=predictions[1].get("validation"),
        test=predictions[1].get("test"),
        layers=_layers(reader, runs, tags.get("best_trial", "")),
    )


@dataclass(frozen=True)
class _Stored:
    """Optuna's record of a study: its trials, and what it ended with."""

    trials: Sequence[KnownTrial] = ()
    result: Mapping[str, Any] | None = None


def _stored(folder: Path, identity: str, study_db: str) -> _Stored:
    """The study of a folder if it is the one of this identity; nothing where it is not here."""
    found = study_of(folder, study_db)
    if found is None or str(found.user_attrs.get("id", "")) != identity:
        return _Stored()
    result = found.user_attrs.get("result")
    return _Stored(known_trials(found), json.loads(result) if result else None)


def _with_result(run: RunRecord, result: Mapping[str, Any] | None) -> tuple[dict[str, str], dict[str, float]]:
    """Tags and metrics of the study's run, completed by the stored result where MLflow was not told."""
    tags, metrics = dict(run.tags), dict(run.metrics)
    if result is None:
        return tags, metrics
    tags.setdefault("test_scores", json.dumps(result["test_scores"]))
    tags.setdefault("best_trial", str(result["best_trial"]))
    metrics.setdefault("best_val_score", float(result["val_score"]))
    metrics.setdefault("test_score_linear", float(result["linear"]))
    metrics.setdefault("test_score_constant", float(result["mean"]))
    return tags, metrics


def _trial(reader: Reader, run: RunRecord) -> Trial:
    reason = run.tags.get("bishop.reason", "")
    state = OPEN if reason.startswith("interrupted") else ENDED.get(run.status, OPEN)
    return Trial(
        number=int(run.tags.get("bishop.trial", "-1")),
        state=state,
        reason=reason,
        params=run.params,
        score=float(run.metrics.get("best_val_score", math.nan)) if state != FAILED else math.nan,
        start=run.start,
        end=run.end,
        seconds=float(run.metrics.get("seconds", math.nan)),
        peak_mb=float(run.metrics.get("peak_memory_mb", math.nan)),
        course=reader.course(run.run_id, SCORE) if SCORE in run.metrics else (),
        run_id=run.run_id,
    )


def _from_study(known: KnownTrial) -> Trial:
    state = ENDED.get(known.status, OPEN)
    # The study keeps no times of epochs: they are spread over the trial.
    epochs, span = sorted(known.epochs), known.ended - known.started
    course = [
        MetricPoint(epoch, known.started + span * (i + 1) // len(epochs), float(known.epochs[epoch][SCORE]))
        for i, epoch in enumerate(epochs)
        if SCORE in known.epochs[epoch]
    ]
    return Trial(
        number=known.number,
        state=state,
        reason=known.reason,
        params={name: str(value) for name, value in flatten(known.params).items()},
        score=float(known.summary.get("best_val_score", math.nan)) if state != FAILED else math.nan,
        start=known.started,
        end=known.ended,
        seconds=float(known.summary.get("seconds", math.nan)),
        peak_mb=math.nan,
        course=course,
        run_id="",
    )


def _layers(reader: Reader, runs: Sequence[RunRecord], best: str) -> dict[str, list[MetricPoint]]:
    winner = next((run for run in runs if best and run.tags.get("bishop.trial") == best), None)
    names = sorted(name for name in winner.metrics if name.startswith(LAYERS)) if winner else []
    return {name.removeprefix(LAYERS): reader.course(winner.run_id, name) for name in names} if winner else {}


def _predictions(text: str) -> tuple[tuple[str, ...], dict[str, Predictions]]:
    """Names of classes and the parts of a `PREDICTIONS` file; nothing for "" or a file that is no such one."""
    if not text:
        return (), {}
    try:
        frame = pd.read_csv(io.StringIO(text), dtype={"part": str})
        outputs = frame.iloc[:, 3:].astype(np.float64)
        parts = {
            str(part): Predictions(
                frame.loc[rows, "target"].to_numpy(np.float64), outputs.loc[rows].to_numpy(np.float64)
            )
            for part, rows in frame.groupby("part").groups.items()
        }
    except (KeyError, ValueError, IndexError):
        return (), {}
    return tuple(str(name).removeprefix("p(").removesuffix(")") for name in outputs.columns), parts
