"""Gradient boosted trees with exact splits, by scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bishop_ray.data.table import Table, TableSpec, TaskType
from bishop_ray.models.base import Array
from bishop_ray.models.sklearn_trees import TreeEnsemble
from bishop_ray.models.validation import check_choice, check_whole


class GBDT(TreeEnsemble):
    """Gradient boosting of small trees (Friedman, "Greedy function approximation", 2001).

    ``sklearn.ensemble.GradientBoostingClassifier`` and ``GradientBoostingRegressor``
    (https://scikit-learn.org/stable/modules/ensemble.html#gradient-boosting), the GradientBoostingTree of the benchmark
    of Grinsztajn et al. (2022): one-hot categories, 1,000 rounds at most, stopped after 20 without gain. Different
    from there: the loss that stops is the log loss or squared error on the validation rows, not the training loss on a
    fifth of the training rows; the target of a regression is standardised instead of optionally quantile-transformed.
    scikit-learn boosts on one thread.

    Args:
        spec: The table.
        n_rounds: Rounds at most.
        patience: Rounds without a lower validation loss before boosting stops.
        learning_rate: Factor of every tree.
        subsample: Share of the rows a round sees.
        max_depth: Levels of a tree, None for no limit.
        max_leaf_nodes: Leaves of a tree, None for no limit.
        min_samples_split: Rows a node needs to be split.
        min_samples_leaf: Rows of a leaf, at least.
        min_impurity_decrease: Gain a split needs.
        class_loss: "log_loss" or "exponential"; the latter (AdaBoost's) is of two classes, more take the former.
        number_loss: "squared_error", "absolute_error" or "huber"; regression only.

    Raises:
        ValueError: An impossible value.
    """

    reports: ClassVar[int] = 50

    def __init__(
        self,
        spec: TableSpec,
        *,
        n_rounds: int = 1000,
        patience: int = 20,
        learning_rate: float = 0.1,
        subsample: float = 1.0,
        max_depth: int | None = 3,
        max_leaf_nodes: int | None = None,
        min_samples_split: int = 2,
        min_samples_leaf: int = 1,
        min_impurity_decrease: float = 0.0,
        class_loss: str = "log_loss",
        number_loss: str = "squared_error",
    ) -> None:
        super().__init__(spec, spec.n_out if spec.task is TaskType.MULTICLASS else 1, 1)
        check_whole(1, n_rounds=n_rounds, patience=patience, min_samples_leaf=min_samples_leaf)
        check_whole(2, min_samples_split=min_samples_split)
        if max_depth is not None:
            check_whole(1, max_depth=max_depth)
        if max_leaf_nodes is not None:
            check_whole(2, max_leaf_nodes=max_leaf_nodes)
        if not learning_rate > 0.0:
            raise ValueError(f"learning_rate must be > 0; found {learning_rate!r}")
        if not 0.0 < subsample <= 1.0:
            raise ValueError(f"subsample must lie in (0, 1]; found {subsample!r}")
        if not min_impurity_decrease >= 0.0:
            raise ValueError(f"min_impurity_decrease must be >= 0; found {min_impurity_decrease!r}")
        check_choice(("log_loss", "exponential"), class_loss=class_loss)
        check_choice(("squared_error", "absolute_error", "huber"), number_loss=number_loss)
        self.n_rounds, self.patience = n_rounds, patience
        of_classes = "log_loss" if spec.task is TaskType.MULTICLASS else class_loss
        self.settings: dict[str, Any] = {
            "loss": of_classes if spec.task.is_classification else number_loss,
            "learning_rate": learning_rate,
            "subsample": subsample,
            "max_depth": max_depth,
            "max_leaf_nodes": max_leaf_nodes,
            "min_samples_split": min_samples_split,
            "min_samples_leaf": min_samples_leaf,
            "min_impurity_decrease": min_impurity_decrease,
        }
        self.start = np.zeros(self.n_per_round)

    def fit(self, train: Table, val: Table, on_round: Callable[[int, Array], bool]) -> None:
        """Boosts until the validation loss has not fallen for `patience` rounds."""
        x, y = self.training_arrays(train)
        x_val = self.inputs(val.x_num, val.x_cat)
        raw = np.zeros((len(val), self.n_per_round))
        step = max(1, self.n_rounds // self.reports)
        best, lowest = 1, np.inf

        def monitor(index: int, model: Any, scope: dict[str, Any]) -> bool:
            """scikit-learn's hook after every round; True ends boosting."""
            nonlocal raw, best, lowest
            rounds, new = index + 1, [tree.tree_ for tree in model.estimators_[index]]
            if rounds == 1:
                self.start = self._start(model, x[:1], new)
                raw = raw + self.start
            raw = raw + self._step(x_val, new)
            prediction = self._prediction(raw)
            if (loss := self._loss(val, prediction)) < lowest:
                best, lowest = rounds, loss
            if rounds - best >= self.patience:
                return True
            return rounds % step == 0 and rounds < self.n_rounds and on_round(rounds, prediction)

        self._boost(x, y, self.n_rounds, monitor, train.weight)
        self.rounds = best

    def refit(self, train: Table, rounds: int) -> None:
        """Boosts for `rounds` rounds."""
        x, y = self.training_arrays(train)
        model = self._boost(x, y, rounds, None, train.weight)
        self.start = self._start(model, x[:1], self.trees[: self.n_per_round])
        self.rounds = rounds

    def predict(self, x_num: Array, x_cat: NDArray[np.int64]) -> Array:
        """Class probabilities (R, K), or the standardised target (R, 1)."""
        return self._prediction(self.start + self._step(self.inputs(x_num, x_cat), self.used_trees()))

    def state(self) -> dict[str, Any]:
        """Where boosting starts, (T,)."""
        return {"start": self.start.tolist()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Reads what `state` gave."""
        start = np.array(state["start"], np.float64)
        if start.shape != (self.n_per_round,) or not np.isfinite(start).all():
            raise ValueError(f"start must be {self.n_per_round} finite numbers")
        self.start = start

    def _boost(
        self, x: Array, y: NDArray[Any], rounds: int, monitor: Callable[..., bool] | None, weight: Array | None
    ) -> Any:
        from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor

        build = GradientBoostingRegressor if self.spec.task is TaskType.REGRESSION else GradientBoostingClassifier
        model = build(n_estimators=rounds, random_state=self.seed, **self.settings)
        model.fit(x, y, sample_weight=weight, monitor=monitor)
        self.trees = [tree.tree_ for stage in model.estimators_ for tree in stage]
        return model

    def _start(self, model: Any, x: Array, trees: list[Any]) -> NDArray[np.float64]:
        """(T,): the raw prediction before the first round, read off scikit-learn's own after it (x: one row)."""
        stages = model.staged_predict if self.spec.task is TaskType.REGRESSION else model.staged_decision_function
        first: NDArray[np.float64] = np.reshape(next(stages(x)), self.n_per_round) - self._step(x, trees)[0]
        return first

    def _step(self, x: Array, trees: Any) -> NDArray[np.float64]:
        """(R, F) -> (R, T): what `trees` add to the raw prediction."""
        added: NDArray[np.float64] = self.settings["learning_rate"] * self.totals(x, trees)[:, :, 0]
        return added

    def _prediction(self, raw: NDArray[np.float64]) -> Array:
        """(R, T) -> (R, K)."""
        from scipy.special import expit, softmax

        if self.spec.task is TaskType.REGRESSION:
            return raw.astype(np.float32)
        if self.spec.task is TaskType.MULTICLASS:
            return np.asarray(softmax(raw, axis=1), np.float32)
        yes = expit(2.0 * raw if self.settings["loss"] == "exponential" else raw)
        return np.hstack([1.0 - yes, yes]).astype(np.float32)

    def _loss(self, val: Table, prediction: Array) -> float:
        """Log loss, or squared error of the standardised target."""
        if self.spec.task is TaskType.REGRESSION:
            return float(((prediction[:, 0].astype(np.float64) - val.y) ** 2).mean())
        chosen = prediction[np.arange(len(val)), val.y].astype(np.float64)
        return float(-np.log(np.clip(chosen, 1e-15, 1.0)).mean())
