"""Final evaluation: the winner trained with fresh seeds or refitted, and scored once on the test split."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import ray
from numpy.typing import NDArray

from bishop_ray.config import Params, StudyConfig
from bishop_ray.data.preprocess import Preprocessor, encoded
from bishop_ray.data.table import Table
from bishop_ray.data.target import TargetCoder
from bishop_ray.errors import TrainingFailed
from bishop_ray.metrics import evaluate
from bishop_ray.models import model_class
from bishop_ray.predictor import Predictor
from bishop_ray.search.dataset import Prepared, combined, open_test, test_references
from bishop_ray.search.placement import Placement, ResourceRequest
from bishop_ray.training.job import VALIDATION, StudyData, TrialSettings
from bishop_ray.training.trainable import evaluate_seed, last_error, refit

ROWS = 1000


@dataclass(frozen=True)
class Costs:
    """Of one predictor.

    Attributes:
        fit_seconds: Its training took.
        predict_ms: Milliseconds per 1,000 rows, from a raw table to outputs, in this process.
    """

    fit_seconds: float
    predict_ms: float


def measure(predictor: Predictor, frame: pd.DataFrame) -> tuple[NDArray[Any], Costs]:
    """The output (R, K) for the R rows of `frame`, and what it cost."""
    predictor.output(frame.head(1))  # what a first call loads and compiles is no part of a prediction
    # A small table is repeated up to 1,000 rows: what a call costs by itself would be multiplied otherwise.
    timed = frame.iloc[np.resize(np.arange(len(frame)), max(len(frame), ROWS))] if len(frame) else frame
    began = time.perf_counter()
    output = predictor.output(timed)[: len(frame)]
    seconds = time.perf_counter() - began
    fit = float(predictor.info.get("fit_seconds", 0.0))
    return output, Costs(fit, 1000 * seconds * ROWS / max(1, len(timed)))


PREDICTIONS = "predictions.csv"
"""Artifact of a study's run."""
CELLS = 200_000
"""Most numbers kept of a part; of a larger one a seeded sample of rows is kept."""
LEAST_ROWS = 1000
"""Kept of a part however many classes there are."""
Part = tuple[NDArray[Any], NDArray[Any]]
"""Encoded target (R,) and output (R, K) of the same rows."""


def predictions_csv(coder: TargetCoder, validation: Part, test: Part) -> str:
    """The table as CSV: part, row, target, then a column per class, or ``prediction``.

    Args:
        coder: Of the training target.
        validation: Encoded target and output of validation rows.
        test: The same of test rows.

    Returns:
        ``part`` is "validation" or "test", ``row`` a position in it. In classification ``target`` is the class's
        position among the columns that follow, which are named by label and hold probabilities; in regression both
        numbers are in the target's own units.
    """
    parts = [_frame(coder, name, part) for name, part in (("validation", validation), ("test", test))]
    text: str = pd.concat(parts, ignore_index=True).to_csv(index=False, float_format="%.8g", lineterminator="\n")
    return text


def _frame(coder: TargetCoder, name: str, part: Part) -> pd.DataFrame:
    y, output = part
    rows = _rows(len(y), coder.n_out)
    head = {"part": np.full(len(rows), name), "row": rows}
    if not coder.task.is_classification:
        values = {"target": coder.inverse(y[rows]), "prediction": coder.inverse(output[rows])}
        return pd.DataFrame(head | values)
    classes = pd.DataFrame(output[rows].astype(np.float64), columns=[f"p({label})" for label in coder.classes])
    return pd.concat([pd.DataFrame(head | {"target": y[rows]}), classes], axis=1)


def _rows(count: int, n_out: int) -> NDArray[np.int64]:
    """All positions, or a sorted sample of them."""
    most = max(LEAST_ROWS, CELLS // n_out)
    if count <= most:
        return np.arange(count, dtype=np.int64)
    return np.sort(np.random.default_rng(0).choice(count, most, replace=False)).astype(np.int64)


def refit_winner(
    config: StudyConfig,
    settings: TrialSettings,
    params: Params,
    seed: int,
    found: Predictor,
    number: int,
    ask: ResourceRequest,
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
        validation: (R, K) outputs of the R validation rows that the registered training's score is made of.
        trained: (R, K) what the process that trained `predictor` said of these rows; None of a refit.
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
    validation: NDArray[Any]
    trained: NDArray[Any] | None = None
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
    own = None if refitted else left_predictions(list(trained.values())[best].parent)
    return Evaluation(
        chosen, val_scores, test_scores, references, seeds, best, costs, predictions, val_outputs[best], own, infos,
        failed,
    )  # fmt: skip


def left_predictions(folder: Path) -> NDArray[Any] | None:
    """The predictions of validation rows that a training left beside its predictor, if it did."""
    path = folder / VALIDATION
    found: NDArray[Any] | None = np.load(path, allow_pickle=False) if path.is_file() else None
    return found


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
    ask: ResourceRequest,
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
    settings: TrialSettings,
    number: int,
    params: Params,
    seeds: tuple[int, ...],
    slots: int,
    share: float,
    ask: ResourceRequest,
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
