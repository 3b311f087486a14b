"""What Ray runs: one trial of a search, one training of a final evaluation.

One loop, two backends. In-process: the trial's own (reused) actor trains. Ray Train: a `TorchTrainer` inside the
trial, for trials of several workers or whole GPUs; a worker group costs 16-20 s to start, so small trials do without.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from bishop_ray.config import Params
from bishop_ray.errors import TrainingFailed
from bishop_ray.training.groups import fit_trainer, overdue, reported
from bishop_ray.training.trial import (
    PREDICTOR,
    STOP_REASON,
    Report,
    TrialSettings,
    model_folder,
    refit_here,
    train_here,
    trial_folder,
)

FAILURE = "failure"


def train_driver(config: dict[str, Any], settings: Mapping[str, TrialSettings]) -> None:
    """The Tune trainable: trains the point of `config` and reports every epoch.

    A diverged training is reported as a failure with its reason, so that the actor can be reused; anything else that
    goes wrong is an exception and Tune's business.

    Args:
        config: ``model``, ``number`` and ``params`` of the trial, and ``ends``: the Unix time after which it stops by
            itself at the next report, 0 for none.
        settings: Of each model's study.
    """
    study = settings[config["model"]]
    job, ends = study.trial(config["params"]), float(config["ends"])
    checkpoint, folder = trial_folder(study, config["number"]), model_folder(study.folder, config["number"])
    if study.through_ray_train:
        from ray.train import RunConfig
        from ray.tune.integration.ray_train import TuneReportCallback

        trial_id = ray.tune.get_context().get_trial_id()
        # Ray's own annotation of `callbacks` names the class of an older API.
        callbacks: list[Any] = [TuneReportCallback()]
        run = RunConfig(name=trial_id, storage_path=str(Path(study.folder) / "train"), callbacks=callbacks)
        fit_trainer(job, study.data, checkpoint, run, folder, ends)
        return

    def report(result: Report) -> bool:
        late = overdue(ends)
        # An estimator that is asked to stop reports once more, then with the reason.
        ray.tune.report(reported(result, late and study.is_network))
        return late

    try:
        train_here(job, ray.get(study.data), checkpoint, report, folder)
    except TrainingFailed as error:
        ray.tune.report({FAILURE: str(error)})


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

        run = RunConfig(name=f"final-{os.getpid()}-{number}-{seed}", storage_path=str(Path(settings.folder) / "train"))
        fit_trainer(job, settings.data, checkpoint, run, folder, deadline)
    else:
        train_here(job, ray.get(settings.data), checkpoint, lambda _: overdue(deadline), folder)
    if _whole(predictor):
        shutil.rmtree(checkpoint, ignore_errors=True)
    return str(predictor)


def _whole(folder: Path) -> bool:
    """Whether a training ended by itself there; one that a deadline cut short goes on when it is asked for again."""
    from bishop_ray.predictor import MANIFEST, Predictor

    return (folder / MANIFEST).is_file() and Predictor.load(folder).info.get(STOP_REASON) != "stopped"


def refit(settings: TrialSettings, params: Params, rounds: int, folder: str) -> str:
    """Trains `params` for `rounds` on the rows of `settings.data`; the folder of the trained `Predictor`."""
    refit_here(settings.trial(params), ray.get(settings.data), rounds, Path(folder))
    return str(Path(folder) / PREDICTOR)
