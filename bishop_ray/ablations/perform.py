"""One run of an ablation, as a Ray task executes it: train, then score the test split once."""

from __future__ import annotations

import tempfile
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bishop_ray.ablations.changes import forest_importance, removed, rotated, rotation, without
from bishop_ray.ablations.records import COMPLETE, FAILED, RunRecord
from bishop_ray.ablations.settings import Change
from bishop_ray.config import Params, StudyConfig
from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.table import RawDataset, Table
from bishop_ray.errors import StorageFull, TrainingFailed
from bishop_ray.metrics import display, evaluate
from bishop_ray.training.disk import is_full
from bishop_ray.training.trial import PREDICTOR, Report, TrialSettings, train_here
from bishop_ray.tuning.prepare import Loaded, Prepared, open_test, prepare
from bishop_ray.tuning.progress import curves

SCORE = "best_val_score"
STOP = "stop"
"""A file in the ablation's folder: whoever asked for the runs is gone, they end at their next report."""


@dataclass(frozen=True)
class Run:
    """What a task is told.

    Attributes:
        setting: Name of the setting.
        study: Dataset, split and model; its metric is filled in.
        settings: As trials have them; the seed is the run's own, data and folder are not used.
        params: The configuration.
        change: Of the data.
        importance: Of the columns, for changes that go by it.
        openings: How often the test split was opened for this run before.
    """

    setting: str
    study: StudyConfig
    settings: TrialSettings
    params: Params
    change: Change
    importance: dict[str, float]
    openings: int = 0

    @property
    def key(self) -> tuple[str, str, int]:
        """As `RunRecord.key`."""
        return self.setting, self.study.model, self.settings.seed

    def failed(self, reason: str, started: float, openings: int = 0) -> RunRecord:
        """Its record, when it ended without a score."""
        return RunRecord(
            *self.key, FAILED, reason, None, None, time.time() - started, started,
            params=self.settings.all_params(self.params), test_openings=self.openings + openings,
        )  # fmt: skip


def perform(run: Run, loaded: Loaded) -> tuple[RunRecord, str]:
    """The record of a run, and the traceback of an error that is none of training's own, "" otherwise.

    Raises:
        StorageFull: No space is left for what training writes; that is no failure of the run's.
    """
    started, opened = time.time(), [0]
    try:
        return _perform(run, loaded, started, opened), ""
    except TrainingFailed as error:
        return run.failed(str(error), started, opened[0]), ""
    except Exception as error:  # the run has failed with its reason; the others go on
        if is_full(error):
            raise StorageFull(tempfile.gettempdir()) from error
        words = (str(error).strip().splitlines() or ["no message"])[0]
        text = "".join(traceback.format_exception(error))
        return run.failed(f"{type(error).__name__}: {words}"[:500], started, opened[0]), text


def _perform(run: Run, loaded: Loaded, started: float, opened: list[int]) -> RunRecord:
    gone = gone_columns(run.change, loaded.train, run.importance, run.settings.seed)
    parts = replace(
        loaded, config=run.study, train=without(loaded.train, gone), validation=without(loaded.validation, gone)
    )
    prepared = prepare(parts)
    turn = _turn(run, prepared)
    data = replace(prepared.data, train=turn(prepared.data.train), validation=turn(prepared.data.validation))
    epochs: dict[int, dict[str, float]] = {}
    last: list[Report] = []

    def note(report: Report) -> bool:
        epochs[report.epoch] = {n: v for n, v in curves(report.metrics()).items() if n.startswith("epoch/")}
        last[:] = [report]
        if (Path(run.settings.folder) / STOP).exists():
            raise TrainingFailed("interrupted")
        return False

    with tempfile.TemporaryDirectory(prefix="bishop-ablation-") as scratch:
        folder = Path(scratch)
        train_here(run.settings.trial(run.params), data, folder / "checkpoint", note, folder / "model")
        from bishop_ray.predictor import Predictor

        model = Predictor.load(folder / "model" / PREDICTOR).model
    # Trained and chosen by validation: from here on nothing is decided any more.
    opened[0] += 1
    test = turn(prepared.preprocessor.transform(without(open_test(run.study), gone)))
    score = evaluate(
        run.study.metric, data.spec.task, test.y, model.predict(test.x_num, test.x_cat), scale=data.target_scale
    )
    (end,) = last
    return RunRecord(
        *run.key,
        COMPLETE,
        end.stop_reason,
        display(run.study.metric, end.metrics()[SCORE]),
        display(run.study.metric, score),
        time.time() - started,
        started,
        epochs,
        run.settings.all_params(run.params),
        run.openings + opened[0],
    )


def gone_columns(change: Change, train: RawDataset, importance: dict[str, float], seed: int) -> list[str]:
    """The columns that a change takes from a dataset whose training rows are `train`."""
    return removed(Preprocessor.fit(train).order, change, importance, seed) if change.order else []


def _turn(run: Run, prepared: Prepared) -> Any:
    """What is done to every encoded table of the run."""
    if not run.change.rotate:
        return _as_it_is
    matrix = rotation(len(prepared.preprocessor.numbers), run.settings.seed)
    return lambda table: rotated(table, matrix)


def _as_it_is(table: Table) -> Table:
    return table


def rank_features(loaded: Loaded) -> dict[str, float]:
    """`forest_importance` of the training rows, as a task."""
    return forest_importance(loaded.train)
