"""One training of the past repeated: the same rows, parameters, seed and epochs must give the same validation score.

What is repeated is read from MLflow. Repeated is on one CPU thread, in this process; Ray is not needed.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bishop_ray.config import Params, Resources, StudyConfig, TrialConfig
from bishop_ray.data.refs import file_ref
from bishop_ray.errors import TrainingFailed, UnknownName, UserError
from bishop_ray.models import MODELS, not_installed
from bishop_ray.search.dataset import load, prepare
from bishop_ray.search.ensemble import AUTOML
from bishop_ray.search.parameters import FLAGS, fixed_params
from bishop_ray.search.study import RECORD, read_config
from bishop_ray.tracking import environment
from bishop_ray.tracking.query import Reader, RunRecord
from bishop_ray.training.job import ReportCallback, StudyData, TrialSettings, train_here
from bishop_ray.training.ray_train import TIME_LIMIT
from bishop_ray.training.system import GPU_PEAK

TOLERANCE = 1e-6
"""Largest difference of two validation scores of one training, on one CPU thread both times."""
SCORE, EPOCHS = "best_val_score", "epochs"
"""Metrics of a trial's run."""


@dataclass(frozen=True)
class Replayed:
    """A training and its repetition.

    Attributes:
        study: Name of the study.
        trial: Number of the trial.
        model: Registry name.
        metric: Of both scores, which are larger-is-better.
        epochs: Epochs, or chunks of rounds, that the score is of.
        recorded: Best validation score by then, as recorded.
        found: The same, repeated; None where the training failed or ended before.
        problem: Why `found` is None, or "".
        untold: Why the tolerance does not hold for this training, or "".
        differs: What was otherwise then, as far as it is recorded: "torch 2.9.0, now 2.9.1".
    """

    study: str
    trial: int
    model: str
    metric: str
    epochs: int
    recorded: float
    found: float | None
    problem: str
    untold: str
    differs: tuple[str, ...]

    @property
    def difference(self) -> float:
        """Of the two scores, without sign; infinite where one is missing."""
        return math.inf if self.found is None else abs(self.found - self.recorded)

    @property
    def same(self) -> bool:
        """Whether the score came out again."""
        return self.difference <= TOLERANCE


def replay_run(run_id: str, uri: str = "", table: str = "") -> Replayed:
    """Trains a recorded trial again and compares its validation score.

    A trial that was stopped early is trained to the same epoch. The test rows stay closed.

    Args:
        run_id: MLflow's id of a trial's run, or of a study's or search's own, which means its best trial.
        uri: MLflow address, see `tracking.tracking_uri`.
        table: Where the study's file lies now, "" for where it lay.

    Raises:
        UserError: No such run, one that is no trial's or study's, without a score or without what is needed to repeat
            it; or its table is gone or has changed.
    """
    reader = Reader(uri)
    run, study = _trial_and_study(reader, run_id)
    config = _config(study, table)
    name, (recorded, epochs) = study.tags.get("bishop.study", config.name), _result(run)
    job = TrialSettings.of(config, seed=_seed(run), resources=Resources(), trainer="inprocess").trial(
        _params(run, config.model)
    )
    loaded = load(config)
    if loaded.fingerprint != study.tags.get("data_hash"):
        raise UserError(
            f"{config.ref.locator}: expected the rows of study {name} (fingerprint "
            f"{study.tags.get('data_hash')}); found others ({loaded.fingerprint}), whose scores say nothing of its own"
        )
    # A library that is asked to stop reports once more; a search asks it where a time limit is over.
    late = MODELS[config.model].kind != "network" and run.tags.get("bishop.reason") in (TIME_LIMIT, "stopped")
    found, problem = train_again(job, prepare(loaded).data, epochs, epochs - late)
    words = (untold(config, run), _differences(study.tags))
    return Replayed(name, _number(run), config.model, config.metric, epochs, recorded, found, problem, *words)


def train_again(job: TrialConfig, data: StudyData, epochs: int, last: int) -> tuple[float | None, str]:
    """The best score after `epochs` reports, of a training that is asked to stop at its report `last`; or why not."""
    reports: dict[int, ReportCallback] = {}

    def note(report: ReportCallback) -> bool:
        reports[report.epoch] = report
        return report.epoch >= last

    with tempfile.TemporaryDirectory(prefix="bishop-replay-") as scratch:
        try:
            train_here(job, data, Path(scratch), note)
        except TrainingFailed as error:
            return None, f"the training failed: {error}"
    if epochs not in reports:
        return None, f"the training ended by itself after {max(reports, default=0)} reports instead of {epochs}"
    return float(reports[epochs].metrics()[SCORE]), ""


def _trial_and_study(reader: Reader, run_id: str) -> tuple[RunRecord, RunRecord]:
    """The run of a trial, that of `run_id` or the best one of its study or search, and the run of its study."""
    run = reader.run(run_id)
    if run.kind == "trial":
        return run, _own(reader, run)
    if run.kind != "study":
        raise UserError(f"run {run_id}: expected the run of a trial, a study or a search; found {_what(run)}")
    studies = [run]
    if run.tags.get("model") == AUTOML:
        studies = reader.runs({"mlflow.parentRunId": run_id, "bishop.kind": "study"}, run.experiment)
    found = [
        (best, study)
        for study in studies
        if (best := _best(reader.runs({**_identity(study), "bishop.kind": "trial"}, study.experiment), study))
    ]
    if not found:
        raise UserError(f"run {run_id}: expected a study with a scored trial; found none (jobs/models.py sync?)")
    return max(found, key=lambda pair: pair[0].metrics[SCORE])


def _best(trials: Sequence[RunRecord], study: RunRecord) -> RunRecord | None:
    """The trial that the study chose; of one that has not ended, the best so far, ties to the earlier one."""
    scored = [trial for trial in trials if SCORE in trial.metrics]
    chosen = [trial for trial in scored if str(_number(trial)) == study.tags.get("best_trial")]
    return max(chosen or scored, key=lambda trial: (trial.metrics[SCORE], -_number(trial)), default=None)


def _own(reader: Reader, trial: RunRecord) -> RunRecord:
    studies = reader.runs({**_identity(trial), "bishop.kind": "study"}, trial.experiment)
    if not studies:
        raise UserError(f"run {trial.run_id}: expected the run of its study beside it; found none")
    return studies[0]


def _identity(run: RunRecord) -> dict[str, str]:
    return {"bishop.study_id": run.tags.get("bishop.study_id", "")}


def _what(run: RunRecord) -> str:
    return f"one of kind {run.kind!r}" if run.kind else "one that this package did not write"


def _config(study: RunRecord, table: str) -> StudyConfig:
    """The study's settings, with the table where it lies now."""
    if RECORD not in study.tags:
        raise UserError(
            f"run {study.run_id}: expected tag {RECORD} with the study's settings; an older version wrote it"
        )
    config = read_config(study.tags[RECORD])
    if config.model not in MODELS:
        raise UnknownName("model", config.model, MODELS)
    if reason := not_installed(config.model):
        raise UserError(reason)
    if not table:
        return config
    ref = config.ref
    if ref.kind != "file":
        raise UserError(f"--table: expected none, since study {config.name} was not run on a file; found {table!r}")
    return replace(config, ref=replace(ref, locator=file_ref(table, ref.target, ref.task_type).locator))


def _result(run: RunRecord) -> tuple[float, int]:
    """The recorded score, and after how many reports."""
    if run.status == "RUNNING":
        raise UserError(f"run {run.run_id}: expected a trial that has ended; found one that is running")
    if SCORE not in run.metrics or EPOCHS not in run.metrics:
        reason = run.tags.get("bishop.reason", "")
        raise UserError(f"run {run.run_id}: expected a trial with a score; found none{f' ({reason})' * bool(reason)}")
    return run.metrics[SCORE], int(run.metrics[EPOCHS])


def _number(run: RunRecord) -> int:
    return int(run.tags.get("bishop.trial", -1))


def _seed(run: RunRecord) -> int:
    try:
        return int(run.params["train.seed"])
    except (KeyError, ValueError):
        raise UserError(f"run {run.run_id}: expected parameter train.seed; it is not recorded whole") from None


def _params(run: RunRecord, model: str) -> Params:
    """The trial's parameters, which MLflow keeps as text; those that were defaults then are among them."""
    sections = ("model.", "train.") if MODELS[model].kind == "network" else ("model.",)
    given = [
        f"{name}={value}"
        for name, value in run.params.items()
        if name.startswith(sections) and name.partition(".")[2] not in FLAGS
    ]
    try:
        return fixed_params(model, given)
    except UserError as error:
        raise UserError(f"run {run.run_id}: {str(error).removeprefix('--set: ')}") from None


def untold(config: StudyConfig, run: RunRecord) -> str:
    """Why the score need not come out to the last digits."""
    resources = config.resources
    if resources.gpus or GPU_PEAK in run.metrics:
        return f"it was trained on a GPU (precision {config.precision})"
    if resources.workers > 1:
        return f"it was trained by {resources.workers} workers"
    return f"it was trained with {resources.cpus:g} threads" if resources.cpus >= 2 else ""


def _differences(then: Mapping[str, str]) -> tuple[str, ...]:
    """What of code, libraries and processor is otherwise now."""
    now = environment()
    names = [name for name in {**then, **now} if name.startswith("version.") or name in ("git_commit", "processor")]
    return tuple(
        f"{name.removeprefix('version.')} {then[name]}, now {now.get(name) or 'none'}"
        for name in names
        if then.get(name) and then[name] != now.get(name)
    )
