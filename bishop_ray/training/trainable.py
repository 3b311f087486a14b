"""Functions that Ray runs: one trial of a search, one training of a final evaluation.

One loop, two backends. In-process: the trial's own (reused) actor trains. Ray Train: a `TorchTrainer` inside the
trial, for trials of several workers or whole GPUs; a worker group costs 6 s and more to start: small trials do without.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from bishop_ray.config import Params
from bishop_ray.errors import TrainingFailed, UserError
from bishop_ray.paths import write_whole
from bishop_ray.training.job import (
    PREDICTOR,
    STOP_REASON,
    ReportCallback,
    TrialSettings,
    model_folder,
    refit_here,
    train_here,
    trial_folder,
)
from bishop_ray.training.ray_train import fit_trainer, overdue, reported, restarts
from bishop_ray.training.system import is_full

logger = logging.getLogger(__name__)
FAILURE, FULL = "failure", "storage_full"
"""Keys of a trial's last report: why it failed; that no space was left, which is no failure of the trial's."""


def train_driver(config: dict[str, Any], settings: Mapping[str, TrialSettings]) -> None:
    """The Tune trainable: trains the point of `config` and reports every epoch.

    Whatever goes wrong is reported with its reason. So the only error that Tune ever sees is the death of a process or
    of its node, and what is begun again for that is what another process may bring to its end.

    Args:
        config: ``model``, ``number``, ``params`` of the trial; ``ends``: the Unix time after which it stops by itself
            at the next report, 0 for none; ``seconds``: its limit from its start, which wins, 0 for none.
        settings: Of each model's study.
    """
    _leave_if_broken()
    study = settings[config["model"]]
    try:
        _drive(config, study)
    except RayError:  # of a process or a node
        raise
    except Exception as error:
        if is_full(error):
            ray.tune.report({FULL: _words(error)})
            return
        if not isinstance(error, TrainingFailed):
            _note(study, config["number"], error)
        ray.tune.report({FAILURE: _words(error)})


def _drive(config: dict[str, Any], study: TrialSettings) -> None:
    job, ends = study.trial(config["params"]), float(config["ends"])
    if config["seconds"]:  # its own time does not begin before its process does
        ends = time.time() + float(config["seconds"])
    checkpoint, folder = trial_folder(study, config["number"]), model_folder(study.folder, config["number"])
    if study.through_ray_train:
        from ray.train import RunConfig
        from ray.tune.integration.ray_train import TuneReportCallback

        trial_id = ray.tune.get_context().get_trial_id()
        # Ray's own annotation of `callbacks` names the class of an older API.
        callbacks: list[Any] = [TuneReportCallback()]
        run = RunConfig(
            name=trial_id,
            storage_path=str(Path(study.folder) / "train"),
            callbacks=callbacks,
            failure_config=restarts(),
        )
        fit_trainer(job, study.data, checkpoint, run, folder, ends)
        return

    def report(result: ReportCallback) -> bool:
        late = overdue(ends)
        # An estimator that is asked to stop reports once more, then with the reason.
        ray.tune.report(reported(result, late and study.is_network))
        return late

    train_here(job, ray.get(study.data), checkpoint, report, folder)


_broken = threading.Event()
"""Set once a GPU's context is lost: every further call to it fails, in this process only."""


def _leave_if_broken() -> None:
    if _broken.is_set():
        os._exit(1)  # the trial is begun again, in a new process


def _note(study: TrialSettings, number: int, error: Exception) -> None:
    """Keeps the traceback, and remembers that this process is of no more use."""
    if "CUDA error" in str(error):
        _broken.set()
    text = "".join(traceback.format_exception(error))
    logger.error("trial %d: %s", number, text)
    with suppress(OSError):
        write_whole(Path(study.folder) / "errors" / f"{number:04d}.txt", text)


def _words(error: Exception) -> str:
    """An error as a trial's reason; Ray Train wraps the worker's own error in its text."""
    from ray.train import TrainingFailedError

    if isinstance(error, TrainingFailed):
        return str(error)
    text = str(error).strip() or "no message"
    if isinstance(error, TrainingFailedError):
        return last_error(text.splitlines())
    return f"{type(error).__name__}: {text.splitlines()[0]}"[:500]


def last_error(lines: Sequence[str]) -> str:
    """The line of a traceback's text that names the error."""
    lines = [line.strip() for line in lines if line.strip()]
    named = [line for line in lines if "Error: " in line or "TrainingFailed: " in line or "Exception: " in line]
    return (
        (named or lines or ["unknown"])[-1].rsplit("bishop_ray.errors.", 1)[-1].removeprefix("TrainingFailed: ")[:500]
    )


def evaluate_seed(settings: TrialSettings, number: int, params: Params, seed: int, deadline: float) -> str:
    """Trains the winning parameters once more with `seed`.

    Args:
        settings: The study's settings.
        number: The winning trial.
        params: Its parameters.
        seed: Training seed.
        deadline: Unix time after which training stops at the next epoch, 0 for none.

    Returns:
        The folder of the trained `Predictor`.
    """
    job = settings.trial(params)
    job = replace(job, train=replace(job.train, seed=seed))
    folder = Path(settings.folder) / "final" / f"{number:04d}-seed-{seed}"
    predictor, checkpoint = folder / PREDICTOR, folder / "checkpoint"
    if _whole(predictor):
        return str(predictor)
    if settings.through_ray_train:
        from ray.train import RunConfig

        run = RunConfig(
            name=f"final-{os.getpid()}-{number}-{seed}",
            storage_path=str(Path(settings.folder) / "train"),
            failure_config=restarts(),
        )
        fit_trainer(job, settings.data, checkpoint, run, folder, deadline)
    else:
        train_here(job, ray.get(settings.data), checkpoint, lambda _: overdue(deadline), folder)
    if _whole(predictor):
        shutil.rmtree(checkpoint, ignore_errors=True)
    return str(predictor)


def _whole(folder: Path) -> bool:
    """Whether a training ended by itself there; one that a deadline cut short goes on when it is asked for again."""
    from bishop_ray.predictor import MANIFEST, Predictor

    if not (folder / MANIFEST).is_file():
        return False
    try:
        return Predictor.load(folder).info.get(STOP_REASON) != "stopped"
    except UserError:  # damaged: it is trained again
        shutil.rmtree(folder)
        return False


def refit(settings: TrialSettings, params: Params, rounds: int, folder: str) -> str:
    """Trains `params` for `rounds` on the rows of `settings.data`; the folder of the trained `Predictor`."""
    refit_here(settings.trial(params), ray.get(settings.data), rounds, Path(folder))
    return str(Path(folder) / PREDICTOR)
