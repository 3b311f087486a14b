"""The winner's configuration trained once more, on train and validation rows, for the epochs or rounds found."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import ray

from bishop_ray.config import Params, StudyConfig
from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.weighting import encoded
from bishop_ray.models import model_class
from bishop_ray.predictor import Predictor
from bishop_ray.training.trial import StudyData, TrialSettings
from bishop_ray.training.worker import refit
from bishop_ray.tuning.prepare import combined
from bishop_ray.tuning.room import Ask


def refit_winner(
    config: StudyConfig, settings: TrialSettings, params: Params, seed: int, found: Predictor, number: int, ask: Ask
) -> Predictor:
    """The refitted predictor; there are no rows left to validate it on.

    Args:
        config: The study.
        settings: What its trials shared.
        params: The winner's parameters.
        seed: Of the training.
        found: The winner as it was trained on the training rows: its ``info["rounds"]`` is how long to train.
        number: Its trial.
        ask: What the training asks Ray for.
    """
    both, validation = combined(config)
    preprocessor = Preprocessor.fit(both, model_class(config.model).numeric)
    data = StudyData(
        preprocessor.spec,
        encoded(preprocessor, both, config.ref.roles.balance),
        preprocessor.transform(validation),
        preprocessor.to_dict(),
        preprocessor.target.units,
    )
    folder = Path(settings.folder) / "refit" / f"{number:04d}-seed-{seed}"
    mine = replace(settings, data=ray.put(data), seed=seed)
    task = ray.remote(refit).options(**ask.options())
    try:
        return Predictor.load(ray.get(task.remote(mine, params, int(found.info["rounds"]), str(folder))))
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # registered from memory
