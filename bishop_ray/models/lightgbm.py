"""LightGBM: gradient-boosted trees grown leaf by leaf."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bishop_ray.data.table import Table, TableSpec
from bishop_ray.errors import TrainingFailed, UserError
from bishop_ray.models.base import Array
from bishop_ray.models.boosting import PATIENCE, Boosted, EarlyStopping, as_output, joined, within
from bishop_ray.models.validation import check_whole

FILE = "booster.txt"
HEAD = b"tree\n"


class LightGBM(Boosted):
    """LightGBM (Ke et al. 2017), the library ``lightgbm``.

    Native categories ("Optimal Split for Categorical Features" in its documentation) and missing values, so nothing is
    one-hot encoded, unlike the paper's Datasets I. Below 1,000 rows a group of levels may be smaller than the library's
    ``min_data_per_group`` of 100: a tenth of the rows.
    Always on the CPU, also where a trial owns a GPU: the package on PyPI is built without CUDA, and its OpenCL learner
    needs a driver that machines and containers with GPUs mostly lack; 150 trees of 50 leaves take seconds.

    Args:
        spec: The table.
        n_estimators: The most rounds; early stopping may end before.
        num_leaves: Of a tree, 2 or more.
        subsample: Fraction of rows, drawn anew each round: LightGBM's ``bagging_fraction``, which has no effect unless
            ``bagging_freq`` is set, here to 1.
        colsample: Fraction of columns per tree.
        learning_rate: Shrinkage of a tree; the library's default where the paper's table says "None".
        patience: Rounds without a lower validation loss before training stops.
    """

    reports: ClassVar[int] = 10  # of 150 rounds at most: scoring more often would cost a tenth of a training

    def __init__(
        self,
        spec: TableSpec,
        n_estimators: int = 100,
        num_leaves: int = 31,
        subsample: float = 1.0,
        colsample: float = 1.0,
        learning_rate: float = 0.1,
        patience: int = PATIENCE,
    ) -> None:
        check_whole(1, n_estimators=n_estimators)
        check_whole(2, num_leaves=num_leaves)
        super().__init__(spec, n_estimators, patience)
        for name, value in (("subsample", subsample), ("colsample", colsample), ("learning_rate", learning_rate)):
            within(name, value, 0, 1, open_low=True)
        self._params = {
            "num_leaves": num_leaves,
            "bagging_fraction": subsample,
            "bagging_freq": 1,
            "feature_fraction": colsample,
            "learning_rate": learning_rate,
        }

    def _train(self, train: Table, rounds: int, val: Table | None, watch: EarlyStopping | None) -> None:
        import lightgbm

        settings = self._settings(len(train))
        categories = list(range(self.spec.n_num, self.spec.n_num + self.spec.n_cat))
        fitted = lightgbm.Dataset(
            joined(train.x_num, train.x_cat), train.y, weight=train.weight, categorical_feature=categories,
            params=settings,
        )  # fmt: skip
        hooks: dict[str, Any] = {}
        if val is not None and watch is not None:
            hook = _Hook(watch, self.spec)
            held = fitted.create_valid(joined(val.x_num, val.x_cat), val.y)
            hooks = {"valid_sets": [held], "feval": hook.keep_prediction, "callbacks": [hook]}
        try:
            self._booster = lightgbm.train(settings, fitted, rounds, **hooks)
        except lightgbm.basic.LightGBMError as error:
            raise TrainingFailed(f"lightgbm: {' '.join(str(error).split())[:300]}") from error

    def _settings(self, n_rows: int) -> dict[str, Any]:
        task = self.spec.task
        objective: dict[str, Any] = {"objective": "regression", "metric": "l2"}
        if task.is_classification and self.spec.n_out == 2:
            objective = {"objective": "binary", "metric": "binary_logloss"}
        elif task.is_classification:
            objective = {"objective": "multiclass", "metric": "multi_logloss", "num_class": self.spec.n_out}
        rows = {
            # LightGBM cuts the number of rows down to a whole one, and refuses none at all.
            "bagging_fraction": min(1.0, max(self._params["bagging_fraction"], 1.5 / n_rows)),
            # The library's 100 forbids every split of levels in a table of 100 rows.
            "min_data_per_group": min(100, max(1, n_rows // 10)),
        }
        # Without the last two, a run that times both layouts picks one of them, and sums in another order.
        how = {"seed": self.seed, "num_threads": self.n_threads, "deterministic": True, "force_row_wise": True}
        return {**objective, **self._params, **rows, **how, "verbosity": -1}

    def _raw(self, x_num: Array, x_cat: NDArray[np.int64]) -> NDArray[Any]:
        prediction: NDArray[Any] = self._booster.predict(
            joined(x_num, x_cat), num_iteration=self.rounds, num_threads=self.n_threads
        )
        return prediction

    def save(self, folder: Path) -> None:
        """Writes ``booster.txt`` (LightGBM's text format) with the first `rounds` rounds."""
        self._booster.save_model(folder / FILE, num_iteration=self.rounds)

    def load(self, folder: Path) -> None:
        """See `Estimator.load`."""
        import lightgbm

        path = folder / FILE
        if not path.is_file():
            raise UserError(f"{path}: missing")
        with path.open("rb") as file:
            if file.read(len(HEAD)) != HEAD:  # the library would print its own complaint, beside ours
                raise UserError(f"{path}: damaged (no model of LightGBM)")
        try:
            self._booster = lightgbm.Booster(model_file=path)
            self.rounds = self._booster.current_iteration()
        except lightgbm.basic.LightGBMError as error:
            raise UserError(f"{path}: damaged ({' '.join(str(error).split())[:300]})") from error


class _Hook:
    """LightGBM's two hooks: its predictions of the validation rows are handed to metrics only."""

    def __init__(self, watch: EarlyStopping, spec: TableSpec) -> None:
        self._watch, self._spec = watch, spec
        self._prediction: NDArray[Any] = np.zeros(0)
        self._done = 0

    def keep_prediction(self, prediction: NDArray[Any], rows: Any) -> list[Any]:
        """A metric of no value: keeps what LightGBM predicts for the validation rows after this round."""
        self._prediction = prediction
        return []

    def __call__(self, env: Any) -> None:
        """Called after each round; a round that found no split adds no tree and counts for nothing."""
        import lightgbm

        done, results = env.model.current_iteration(), env.evaluation_result_list
        if done == self._done:
            return
        self._done = done
        if self._watch.stops(done, results[0][2], lambda: as_output(self._prediction, self._spec)):
            raise lightgbm.callback.EarlyStopException(self._watch.best_round - 1, results)
