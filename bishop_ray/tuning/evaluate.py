"""After the search: the winner trained again with fresh seeds, and the one look at the test split."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from bishop_ray.config import Params, StudyConfig
from bishop_ray.predictor import Predictor
from bishop_ray.training.metrics import evaluate
from bishop_ray.training.reference import reference_scores
from bishop_ray.training.worker import TrialSettings, evaluate_seed
from bishop_ray.tuning.prepare import Prepared, open_test


@dataclass(frozen=True)
class Evaluation:
    """The final word on a study.

    Attributes:
        predictor: The training with the best validation score; this one is registered.
        val_scores: Per seed.
        test_scores: Per seed.
        references: Test scores of the constant and the linear prediction on the same rows.
        seeds: The training seeds.
        registered: Position of `predictor` among the seeds.
    """

    predictor: Predictor
    val_scores: tuple[float, ...]
    test_scores: tuple[float, ...]
    references: dict[str, float]
    seeds: tuple[int, ...]
    registered: int

    @property
    def test_mean(self) -> float:
        """Mean test score over the seeds."""
        return float(np.mean(self.test_scores))

    @property
    def test_std(self) -> float:
        """Sample standard deviation over the seeds, 0 for one seed."""
        return float(np.std(self.test_scores, ddof=1)) if len(self.test_scores) > 1 else 0.0


def evaluation_seeds(config: StudyConfig) -> tuple[int, ...]:
    """Training seeds of the final evaluation: none is the search's own, whose luck the selection used up."""
    return tuple(config.seed * 1000 + 1 + i for i in range(config.eval_seeds))


def final_evaluation(
    config: StudyConfig, settings: TrialSettings, prepared: Prepared, number: int, params: Params, deadline: float
) -> Evaluation:
    """Trains the winner once per seed, picks by validation, then opens the test split.

    Args:
        config: The study.
        settings: As the trials had.
        prepared: The study's data.
        number: The winning trial.
        params: Its parameters.
        deadline: Unix time by which the trainings must end, 0 for none.
    """
    seeds = evaluation_seeds(config)
    folders = _train(settings, number, params, seeds, deadline)
    predictors = [Predictor.load(folder) for folder in folders]
    validation = prepared.data.validation
    val_scores = tuple(_score(config, prepared, p, validation) for p in predictors)
    test = prepared.preprocessor.transform(open_test(config))
    test_scores = tuple(_score(config, prepared, p, test) for p in predictors)
    data = prepared.data
    references = reference_scores(data.train, test, data.spec, config.metric, scale=data.target_scale)
    best = int(np.argmax(val_scores))
    return Evaluation(predictors[best], val_scores, test_scores, references, seeds, best)


def _score(config: StudyConfig, prepared: Prepared, predictor: Predictor, table: Any) -> float:
    prediction = predictor.model.predict(table.x_num, table.x_cat)
    return evaluate(config.metric, prepared.data.spec.task, table.y, prediction, scale=prepared.data.target_scale)


def _train(settings: TrialSettings, number: int, params: Params, seeds: tuple[int, ...], deadline: float) -> list[Path]:
    """Folders of the trained predictors; side by side where the cluster has room.

    A deadline bounds each training; those that queue behind others get their share of the time left.
    """
    if settings.through_ray_train:
        # Each is a worker group of its own: one after the other, so that two never wait for each other's GPUs.
        share = (deadline - time.time()) / len(seeds) if deadline else 0.0
        return [
            Path(evaluate_seed(settings, number, params, s, time.time() + share if deadline else 0.0)) for s in seeds
        ]
    resources = settings.resources
    remote = ray.remote(evaluate_seed).options(num_cpus=resources.cpus, num_gpus=resources.gpus, max_retries=1)
    slots = _slots(resources.cpus, resources.gpus)
    rounds = -(-len(seeds) // slots)
    share = (deadline - time.time()) / rounds if deadline else 0.0
    jobs = [
        remote.remote(settings, number, params, s, time.time() + share * (1 + i // slots) if deadline else 0.0)
        for i, s in enumerate(seeds)
    ]
    return [Path(folder) for folder in ray.get(jobs)]


def _slots(cpus: float, gpus: float) -> int:
    total = ray.cluster_resources()
    fits = int(total.get("CPU", 1) // cpus)
    return max(1, min(fits, int(total.get("GPU", 0) / gpus + 1e-9)) if gpus else fits)
