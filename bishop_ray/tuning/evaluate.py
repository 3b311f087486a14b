"""After the search: the winner trained again with fresh seeds, and the one look at the test split."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from bishop_ray.config import Params, StudyConfig
from bishop_ray.data.table import Table
from bishop_ray.errors import TrainingFailed
from bishop_ray.metrics import evaluate
from bishop_ray.predictor import Predictor
from bishop_ray.training.trial import TrialSettings
from bishop_ray.training.worker import evaluate_seed, last_error
from bishop_ray.tuning.costs import Costs, measure
from bishop_ray.tuning.placement import Placement
from bishop_ray.tuning.predictions import predictions_csv
from bishop_ray.tuning.prepare import Prepared, open_test, test_references
from bishop_ray.tuning.refit import refit_winner
from bishop_ray.tuning.room import Ask

GROUP_SECONDS = 20.0
"""What starting and ending a Ray Train worker group takes."""


@dataclass(frozen=True)
class Evaluation:
    """The final word on a study.

    Attributes:
        predictor: The training with the best validation score, or its refit; this one is registered.
        val_scores: Per seed.
        test_scores: Per seed.
        references: Test scores of the constant and the linear prediction on the same rows.
        seeds: The seeds whose training succeeded.
        registered: Position of `predictor` among the seeds.
        costs: Of `predictor`.
        predictions: Of the first seed's training, see `predictions_csv`.
        infos: What each training left in its predictor, e.g. its epochs and seconds.
        failed: Seeds whose training failed, with the reason.
    """

    predictor: Predictor
    val_scores: tuple[float, ...]
    test_scores: tuple[float, ...]
    references: dict[str, float]
    seeds: tuple[int, ...]
    registered: int
    costs: Costs
    predictions: str
    infos: tuple[dict[str, Any], ...] = ()
    failed: dict[int, str] = field(default_factory=dict)

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


def evaluation_seconds(config: StudyConfig, through_ray_train: bool, training: float) -> float:
    """What the final evaluation will take when one training takes `training` seconds; a refit is one more."""
    if through_ray_train:
        return config.eval_seeds * (training + GROUP_SECONDS) + config.refit * training
    return (-(-config.eval_seeds // config.max_concurrent) + config.refit) * training


def final_evaluation(
    config: StudyConfig,
    settings: TrialSettings,
    prepared: Prepared,
    number: int,
    params: Params,
    deadline: float,
    on_opening: Callable[[], object],
    placement: Placement,
) -> Evaluation:
    """Trains the winner once per seed, picks by validation, then opens the test split.

    Args:
        config: The study.
        settings: As the trials had.
        prepared: The study's data.
        number: The winning trial.
        params: Its parameters.
        deadline: Unix time by which the trainings must end, 0 for none.
        on_opening: Called just before the test rows are read.
        placement: Says what a training asks for.

    Raises:
        TrainingFailed: No seed's training succeeded.
    """
    ask = placement.again(params)
    trained, failed = _train(
        settings,
        number,
        params,
        deadline,
        evaluation_seeds(config),
        ask,
        placement.at_a_time(ask, config.max_concurrent),
    )
    predictors = [Predictor.load(folder) for folder in trained.values()]
    validation = prepared.data.validation
    val_outputs = [_outputs(p, validation) for p in predictors]
    val_scores = tuple(_score(config, prepared, validation, output) for output in val_outputs)
    best = int(np.argmax(val_scores))
    refitted = (
        refit_winner(config, settings, params, list(trained)[best], predictors[best], number, ask)
        if config.refit
        else None
    )
    on_opening()
    raw = open_test(config)
    test = prepared.preprocessor.transform(raw)
    test_outputs = [_outputs(p, test) for p in predictors]
    test_scores = tuple(_score(config, prepared, test, output) for output in test_outputs)
    references = test_references(config, raw)
    chosen = refitted or predictors[best]
    _, costs = measure(chosen, raw.frame)
    infos = tuple(dict(p.info) for p in predictors)
    target = prepared.preprocessor.target
    predictions = predictions_csv(target, (validation.y, val_outputs[0]), (test.y, test_outputs[0]))
    seeds = tuple(trained)
    return Evaluation(chosen, val_scores, test_scores, references, seeds, best, costs, predictions, infos, failed)


def _outputs(predictor: Predictor, table: Table) -> NDArray[Any]:
    return predictor.model.predict(table.x_num, table.x_cat)


def _score(config: StudyConfig, prepared: Prepared, table: Table, output: NDArray[Any]) -> float:
    return evaluate(config.metric, prepared.data.spec.task, table.y, output, scale=prepared.data.target_scale)


def _train(
    settings: TrialSettings,
    number: int,
    params: Params,
    deadline: float,
    seeds: tuple[int, ...],
    ask: Ask,
    slots: int,
) -> tuple[dict[int, Path], dict[int, str]]:
    """Seed -> folder of its predictor, and seed -> why its training failed; side by side where trials ran so.

    A deadline bounds each training: those that queue behind others get their share of the time left.
    """
    # A worker group at a time: two could wait for each other's GPUs for ever.
    slots = 1 if settings.through_ray_train else slots
    share = (deadline - time.time()) / -(-len(seeds) // slots) if deadline else 0.0
    if settings.through_ray_train:
        calls = [_guarded(evaluate_seed, settings, number, params, s, _until(share)) for s in seeds]
    else:
        calls = _side_by_side(settings, number, params, seeds, slots, share, ask)
    trained = {seed: Path(found) for seed, found in zip(seeds, calls, strict=True) if not isinstance(found, Exception)}
    # Ray's text of an error is a whole traceback; one line of it says why.
    failed = {
        seed: last_error(str(found).splitlines())
        for seed, found in zip(seeds, calls, strict=True)
        if isinstance(found, Exception)
    }
    if not trained:
        raise TrainingFailed(f"the winner, trial {number}, cannot be trained again: {failed[seeds[0]]}")
    return trained, failed


def _side_by_side(
    settings: TrialSettings, number: int, params: Params, seeds: tuple[int, ...], slots: int, share: float, ask: Ask
) -> list[str | Exception]:
    remote = ray.remote(evaluate_seed).options(max_retries=1, **ask.options())
    results: list[str | Exception] = []
    for start in range(0, len(seeds), slots):
        jobs = [remote.remote(settings, number, params, s, _until(share)) for s in seeds[start : start + slots]]
        results += [_guarded(ray.get, job) for job in jobs]
    return results


def _until(share: float) -> float:
    return time.time() + share if share else 0.0


def _guarded(call: Callable[..., str], *args: object) -> str | Exception:
    """A diverged training is an answer here, since other seeds may do; everything else is an error."""
    from ray.train import TrainingFailedError

    try:
        return call(*args)
    except (TrainingFailed, TrainingFailedError) as error:
        return error
