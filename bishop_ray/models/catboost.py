"""CatBoost: boosting of oblivious trees."""

from __future__ import annotations

import io
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax

from bishop_ray.data.table import Table, TableSpec
from bishop_ray.errors import TrainingFailed, UserError
from bishop_ray.models.base import Array
from bishop_ray.models.boosting import N_ROUNDS, PATIENCE, Boosted, EarlyStopping, as_output, within
from bishop_ray.models.validation import check_whole

FILE = "model.cbm"
GPU_SHARE = 0.2
"""Of a GPU's memory; CatBoost takes 0.95 at once unless told, and a search puts up to four trials on a GPU."""


class CatBoost(Boosted):
    """CatBoost (Prokhorenkova et al. 2018), the library ``catboost``.

    Native categories (target statistics, which count rows whatever they weigh) and missing numbers, so nothing is
    one-hot encoded, unlike the paper's Datasets I; a missing or unknown category is a level of its own. The paper's
    table names no number of rounds: early stopping decides, below the cap `n_rounds`. On a GPU CatBoost hands out no
    predictions while it trains: nothing is reported before the end.

    Args:
        spec: The table.
        depth: Of a tree, 1 to 16 (the library's limit).
        l2_leaf_reg: L2 penalty of leaf values.
        bagging_temperature: Of the Bayesian bootstrap's weights: 0 for equal ones, 1 for exponential ones.
        leaf_estimation_iterations: Newton steps per leaf; None for the library's own number, which depends on the loss.
        learning_rate: Shrinkage of a tree.
        n_rounds: The most rounds.
        patience: Rounds without a lower validation loss before training stops.
    """

    def __init__(
        self,
        spec: TableSpec,
        depth: int = 6,
        l2_leaf_reg: float = 3.0,
        bagging_temperature: float = 1.0,
        leaf_estimation_iterations: int | None = None,
        learning_rate: float = 0.03,
        n_rounds: int = N_ROUNDS,
        patience: int = PATIENCE,
    ) -> None:
        super().__init__(spec, n_rounds, patience)
        check_whole(1, depth=depth)
        within("depth", depth, 1, 16)
        for name, value in (("l2_leaf_reg", l2_leaf_reg), ("bagging_temperature", bagging_temperature)):
            within(name, value, 0, math.inf)
        within("learning_rate", learning_rate, 0, 1, open_low=True)
        if leaf_estimation_iterations is not None:
            check_whole(1, leaf_estimation_iterations=leaf_estimation_iterations)
        self._params = {
            "depth": depth,
            "l2_leaf_reg": l2_leaf_reg,
            # without "Bayesian" the temperature has no effect, or is refused
            "bootstrap_type": "Bayesian",
            "bagging_temperature": bagging_temperature,
            "leaf_estimation_iterations": leaf_estimation_iterations,
            "learning_rate": learning_rate,
        }

    def _train(self, train: Table, rounds: int, val: Table | None, watch: EarlyStopping | None) -> None:
        import catboost

        settings = self._settings(rounds)
        hooks: dict[str, Any] = {}
        judge = None
        if val is not None and watch is not None:
            hooks["eval_set"] = self._pool(val.x_num, val.x_cat, val.y)
            if self.device == "cpu":
                judge = _Judge(watch, self.spec, len(val))
                settings["eval_metric"], hooks["callbacks"] = judge, [judge]
            else:
                settings |= {"od_type": "Iter", "od_wait": self._patience}
        booster = catboost.CatBoost(settings)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # numba would not speed up the metric
                fitted = self._pool(train.x_num, train.x_cat, train.y, train.weight)
                booster.fit(fitted, log_cout=io.StringIO(), log_cerr=io.StringIO(), **hooks)
        except catboost.CatBoostError as error:
            raise TrainingFailed(f"catboost: {' '.join(str(error).split())[:300]}") from error
        if judge is not None and judge.error is not None:
            raise judge.error
        if watch is not None and self.device != "cpu":
            losses = booster.get_evals_result()["validation"][settings["loss_function"]]
            watch.best_round, watch.done = int(np.argmin(losses)) + 1, len(losses)
        self._booster = booster

    def _settings(self, rounds: int) -> dict[str, Any]:
        objective: dict[str, Any] = {"loss_function": "RMSE"}
        if self.spec.task.is_classification:
            loss = "Logloss" if self.spec.n_out == 2 else "MultiClass"
            objective = {"loss_function": loss, "class_names": list(range(self.spec.n_out))}
        # CatBoost's own best model would be cut off after the best round, and chunks that score better with it
        how: dict[str, Any] = {
            "iterations": rounds,
            "use_best_model": False,
            "random_seed": self.seed,
            "thread_count": self.n_threads,
        }
        if self.device != "cpu":
            how |= {"task_type": "GPU", "gpu_ram_part": GPU_SHARE}
        given = {name: value for name, value in self._params.items() if value is not None}
        return {**objective, **given, **how, "allow_writing_files": False, "logging_level": "Silent"}

    def _pool(
        self, x_num: Array, x_cat: NDArray[np.int64], y: NDArray[Any] | None = None, weight: Array | None = None
    ) -> Any:
        """CatBoost's table; its levels are strings."""
        import catboost

        levels = np.arange(max(self.spec.cat_cardinalities, default=0)).astype("S").astype(object)
        features = catboost.FeaturesData(
            num_feature_data=np.ascontiguousarray(x_num, np.float32) if self.spec.n_num else None,
            cat_feature_data=levels[x_cat] if self.spec.n_cat else None,
        )
        return catboost.Pool(features, y, weight=weight, thread_count=self.n_threads)

    def _raw(self, x_num: Array, x_cat: NDArray[np.int64]) -> NDArray[Any]:
        prediction: NDArray[Any] = self._booster.predict(
            self._pool(x_num, x_cat),
            prediction_type="Probability" if self.spec.task.is_classification else "RawFormulaVal",
            ntree_end=self.rounds,
            thread_count=self.n_threads,
        )
        return prediction

    def save(self, folder: Path) -> None:
        """Writes ``model.cbm`` (CatBoost's own binary format) with the first `rounds` rounds."""
        kept = self._booster.copy()
        kept.shrink(self.rounds)
        kept.save_model(str(folder / FILE), format="cbm")

    def load(self, folder: Path) -> None:
        """See `Estimator.load`."""
        import catboost

        path = folder / FILE
        if not path.is_file():
            raise UserError(f"{path}: missing")
        try:
            self._booster = catboost.CatBoost().load_model(str(path), format="cbm")
            self.rounds = int(self._booster.tree_count_)
        except catboost.CatBoostError as error:
            raise UserError(f"{path}: damaged ({' '.join(str(error).split())[:300]})") from error


class _Judge:
    """CatBoost's two hooks in one: it shows raw predictions to metrics only, and is stopped by callbacks only.

    In each round the metric is called with the training rows, then with the validation rows, then the callback is.
    """

    def __init__(self, watch: EarlyStopping, spec: TableSpec, n_val: int) -> None:
        self._watch, self._spec, self._n_val = watch, spec, n_val
        self._done = 0
        self._loss = math.nan
        self._raw: NDArray[Any] = np.zeros((1, 0))
        self.error: BaseException | None = None

    def __deepcopy__(self, memo: Any) -> _Judge:
        # CatBoost copies its settings, metric included; the callback must be the same object.
        return self

    def is_max_optimal(self) -> bool:
        """A loss."""
        return False

    def get_final_error(self, error: float, weight: float) -> float:
        """The loss itself."""
        return error

    def evaluate(self, approxes: Any, target: Any, weight: Any) -> tuple[float, float]:
        """Keeps the validation rows' loss, and what CatBoost's memory holds of them if a report is due."""
        if len(target) != self._n_val:
            return 0.0, 1.0
        raw = np.asarray(approxes)  # (K, R), or (1, R)
        if self._watch.ends_chunk(self._done + 1):
            self._raw = raw.copy()
        self._loss = _mean_loss(raw, np.asarray(target), self._spec)
        return self._loss, 1.0

    def after_iteration(self, info: Any) -> bool:
        """Whether training goes on; CatBoost would hide an exception inside one of its own, so it is kept."""
        self._done += 1
        try:
            return not self._watch.stops(self._done, self._loss, self._prediction)
        except BaseException as error:
            self.error = error
            return False

    def _prediction(self) -> Array:
        if not self._spec.task.is_classification:
            return as_output(self._raw[0], self._spec)
        raw = expit(self._raw[0]) if self._spec.n_out == 2 else softmax(self._raw.T, axis=1)
        return as_output(raw, self._spec)


def _mean_loss(raw: NDArray[Any], target: NDArray[Any], spec: TableSpec) -> float:
    """What CatBoost calls Logloss, MultiClass or (squared) RMSE of raw predictions (K, R) or (1, R)."""
    if not spec.task.is_classification:
        return float(np.mean((raw[0] - target) ** 2))
    if spec.n_out == 2:
        return float(np.logaddexp(0.0, np.where(target > 0, -raw[0], raw[0])).mean())
    chosen = raw[target.astype(np.int64), np.arange(len(target))]
    return float((np.logaddexp.reduce(raw, axis=0) - chosen).mean())
