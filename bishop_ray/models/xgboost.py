"""XGBoost: gradient-boosted trees by histograms."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bishop_ray.data.table import Table, TableSpec
from bishop_ray.errors import TrainingFailed, UserError
from bishop_ray.models.base import Array
from bishop_ray.models.boosting import N_ROUNDS, PATIENCE, Boosted, EarlyStopping, as_output, joined, within
from bishop_ray.models.validation import check_whole

FILE = "booster.ubj"


class XGBoost(Boosted):
    """XGBoost (Chen and Guestrin 2016), the library ``xgboost``, method "hist".

    Native categories ("Categorical Data" in its documentation) and missing values: both a missing number and the code
    0 take the direction that a split learnt, so nothing is one-hot encoded, unlike the paper's Datasets I.
    Its table names no number of rounds: early stopping decides, below the cap `n_rounds`.

    Args:
        spec: The table.
        max_depth: Of a tree, 1 or more.
        min_child_weight: Smallest sum of Hessians in a leaf.
        subsample: Fraction of rows per tree.
        learning_rate: Shrinkage of a tree; the library's default where the paper's table says "None".
        colsample_bylevel: Fraction of columns per level.
        colsample_bytree: Fraction of columns per tree.
        gamma: Smallest gain of a split.
        alpha: L1 penalty of leaf values.
        n_rounds: The most rounds.
        patience: Rounds without a lower validation loss before training stops.
    """

    def __init__(
        self,
        spec: TableSpec,
        max_depth: int = 6,
        min_child_weight: float = 1.0,
        subsample: float = 1.0,
        learning_rate: float = 0.3,
        colsample_bylevel: float = 1.0,
        colsample_bytree: float = 1.0,
        gamma: float = 0.0,
        alpha: float = 0.0,
        n_rounds: int = N_ROUNDS,
        patience: int = PATIENCE,
    ) -> None:
        super().__init__(spec, n_rounds, patience)
        check_whole(1, max_depth=max_depth)
        within("learning_rate", learning_rate, 0, 1, open_low=True)
        fractions = {"subsample": subsample, "colsample_bylevel": colsample_bylevel}
        fractions["colsample_bytree"] = colsample_bytree
        for name, value in fractions.items():
            within(name, value, 0, 1, open_low=True)
        penalties = {"min_child_weight": min_child_weight, "gamma": gamma, "alpha": alpha}
        for name, value in penalties.items():
            within(name, value, 0, math.inf)
        self._params = {"max_depth": max_depth, "learning_rate": learning_rate, **fractions, **penalties}

    def _train(self, train: Table, rounds: int, val: Table | None, watch: EarlyStopping | None) -> None:
        import xgboost

        data = {"feature_types": self._types(), "enable_categorical": True, "nthread": self.n_threads}
        try:
            fitted = xgboost.QuantileDMatrix(
                joined(train.x_num, train.x_cat), label=train.y, weight=train.weight, **data
            )
            watched, callbacks = [], []
            if val is not None and watch is not None:
                held = xgboost.QuantileDMatrix(joined(val.x_num, val.x_cat), label=val.y, ref=fitted, **data)
                watched.append((held, "val"))
                callbacks.append(_callback(watch, held, self.spec))
            self._booster = xgboost.train(
                self._settings(), fitted, rounds, evals=watched, verbose_eval=False, callbacks=callbacks
            )
        except xgboost.core.XGBoostError as error:
            raise TrainingFailed(f"xgboost: {_line(error)}") from error

    def _types(self) -> list[str]:
        return ["q"] * self.spec.n_num + ["c"] * self.spec.n_cat

    def _settings(self) -> dict[str, Any]:
        task = self.spec.task
        objective = {"objective": "reg:squarederror", "eval_metric": "rmse"}
        if task.is_classification and self.spec.n_out == 2:
            objective = {"objective": "binary:logistic", "eval_metric": "logloss"}
        elif task.is_classification:
            objective = {"objective": "multi:softprob", "eval_metric": "mlogloss", "num_class": str(self.spec.n_out)}
        how = {"tree_method": "hist", "device": self.device, "nthread": self.n_threads, "seed": self.seed}
        return {**objective, **self._params, **how, "verbosity": 0}

    def _raw(self, x_num: Array, x_cat: NDArray[np.int64]) -> NDArray[Any]:
        import xgboost

        rows = xgboost.DMatrix(
            joined(x_num, x_cat), feature_types=self._types(), enable_categorical=True, nthread=self.n_threads
        )
        self._booster.set_param({"device": self.device, "nthread": self.n_threads})
        prediction: NDArray[Any] = self._booster.predict(rows, iteration_range=(0, self.rounds))
        return prediction

    def save(self, folder: Path) -> None:
        """Writes ``booster.ubj`` (XGBoost's Universal Binary JSON) with the first `rounds` rounds."""
        self._booster[: self.rounds].save_model(folder / FILE)

    def load(self, folder: Path) -> None:
        """See `Estimator.load`."""
        import xgboost

        path = folder / FILE
        if not path.is_file():
            raise UserError(f"{path}: missing")
        try:
            self._booster = xgboost.Booster(model_file=path)
            self.rounds = self._booster.num_boosted_rounds()
        except xgboost.core.XGBoostError as error:
            raise UserError(f"{path}: damaged ({_line(error)})") from error


def _callback(watch: EarlyStopping, held: Any, spec: TableSpec) -> Any:
    """XGBoost's hook after each round. Predicting rows that are evaluated anyway costs only the newest trees."""
    import xgboost

    class Hook(xgboost.callback.TrainingCallback):
        def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
            loss = next(iter(evals_log["val"].values()))[-1]
            return watch.stops(epoch + 1, float(loss), lambda: as_output(model.predict(held), spec))

    return Hook()


def _line(error: Exception) -> str:
    """What went wrong, without the library's stack."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "Check failed" in line or "Error" in line), lines[0] if lines else "")[:300]
