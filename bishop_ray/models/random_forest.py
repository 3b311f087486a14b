"""Random forests, by scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bishop_ray.data.table import Table, TableSpec, TaskType
from bishop_ray.models.base import Array
from bishop_ray.models.sklearn_trees import TreeEnsemble
from bishop_ray.models.validation import check_choice, check_whole


class RandomForest(TreeEnsemble):
    """A forest of trees, each grown on a bootstrap sample (Breiman, "Random Forests", 2001).

    ``sklearn.ensemble.RandomForestClassifier`` and ``RandomForestRegressor``
    (https://scikit-learn.org/stable/modules/ensemble.html#random-forests), as in the benchmark of Grinsztajn et al.
    (2022): one-hot categories, the target of a regression standardised instead of optionally quantile-transformed.
    A leaf has two rows, the least that the benchmark searches: scikit-learn's single row was worse on all three real
    tables we tried (abalone, blastchar, shrutime; blastchar by 1.5 points of AUC, below a linear model). Grown in
    chunks (``warm_start``), which gives the same forest as growing it at once. More trees never hurt in expectation, so
    there is no early stopping.

    Args:
        spec: The table.
        n_trees: Trees of the whole forest; the benchmark's number.
        max_features: Inputs tried per split: a share in (0, 1], "sqrt" or "log2" of their number, or None for
            scikit-learn's default ("sqrt" for classes, all for numbers).
        max_depth: Levels of a tree, None for no limit.
        min_samples_split: Rows a node needs to be split.
        min_samples_leaf: Rows of a leaf, at least.
        min_impurity_decrease: Gain a split needs.
        bootstrap: Grow each tree on a bootstrap sample, else on all rows.
        class_criterion: "gini" or "entropy"; classification only.
        number_criterion: "squared_error" or "absolute_error"; regression only.

    Raises:
        ValueError: An impossible value.
    """

    reports: ClassVar[int] = 10

    def __init__(
        self,
        spec: TableSpec,
        *,
        n_trees: int = 250,
        max_features: float | str | None = None,
        max_depth: int | None = None,
        min_samples_split: int = 2,
        min_samples_leaf: int = 2,
        min_impurity_decrease: float = 0.0,
        bootstrap: bool = True,
        class_criterion: str = "gini",
        number_criterion: str = "squared_error",
    ) -> None:
        super().__init__(spec, 1, spec.n_out)
        check_whole(1, n_trees=n_trees, min_samples_leaf=min_samples_leaf)
        check_whole(2, min_samples_split=min_samples_split)
        if max_depth is not None:
            check_whole(1, max_depth=max_depth)
        if isinstance(max_features, str):
            check_choice(("sqrt", "log2"), max_features=max_features)
        elif max_features is not None and not 0.0 < max_features <= 1.0:
            raise ValueError(f"max_features must lie in (0, 1]; found {max_features!r}")
        if not min_impurity_decrease >= 0.0:
            raise ValueError(f"min_impurity_decrease must be >= 0; found {min_impurity_decrease!r}")
        check_choice(("gini", "entropy"), class_criterion=class_criterion)
        check_choice(("squared_error", "absolute_error"), number_criterion=number_criterion)
        self.n_trees = n_trees
        is_classes = spec.task.is_classification
        default_features: str | float = "sqrt" if is_classes else 1.0
        self.settings: dict[str, Any] = {
            "criterion": class_criterion if is_classes else number_criterion,
            "max_features": default_features if max_features is None else _share_or_name(max_features),
            "max_depth": max_depth,
            "min_samples_split": min_samples_split,
            "min_samples_leaf": min_samples_leaf,
            "min_impurity_decrease": min_impurity_decrease,
            "bootstrap": bootstrap,
        }

    def fit(self, train: Table, val: Table, on_round: Callable[[int, Array], bool]) -> None:
        """Grows the forest chunk by chunk; `rounds` are trees."""
        x, y = self.training_arrays(train)
        x_val = self.inputs(val.x_num, val.x_cat)
        forest, step = self._forest(), max(1, self.n_trees // self.reports)
        total = np.zeros((len(val), 1, self.n_values))
        for n_trees in range(step, self.n_trees + step, step):
            n_trees = min(n_trees, self.n_trees)
            self._grow(forest, x, y, n_trees, train.weight)
            if n_trees == self.n_trees:
                break
            total += self.totals(x_val, self.trees[-step:])
            if on_round(n_trees, self._prediction(total / n_trees)):
                break

    def refit(self, train: Table, rounds: int) -> None:
        """Grows a forest of `rounds` trees."""
        x, y = self.training_arrays(train)
        self._grow(self._forest(), x, y, rounds, train.weight)

    def importances(self) -> NDArray[np.float64]:
        """(N + C,) share of the forest's decrease in impurity by each column of the table, numbers first; sums to 1.

        The mean over the trees, as scikit-learn's ``feature_importances_``; one-hot inputs count for their column. All
        are 0 where no tree has a split. Only of a forest grown in this process: files hold no impurities.
        """
        found = np.zeros(self.n_inputs)
        for tree in self.trees:
            if tree.node_count > 1:
                found += tree.compute_feature_importances()
        widths = [c - 1 if hot else 1 for c, hot in zip(self.spec.cat_cardinalities, self.one_hot, strict=True)]
        numbers, start = found[: self.spec.n_num], self.spec.n_num
        categories = []
        for width in widths:
            categories.append(found[start : start + width].sum())
            start += width
        by_column = np.concatenate([numbers, np.array(categories, np.float64)])
        return by_column / total if (total := by_column.sum()) > 0 else by_column

    def predict(self, x_num: Array, x_cat: NDArray[np.int64]) -> Array:
        """The mean over the trees of class shares (R, K) or of the standardised target (R, 1)."""
        return self._prediction(self.totals(self.inputs(x_num, x_cat), self.used_trees()) / self.rounds)

    def _forest(self) -> Any:
        from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

        build = RandomForestRegressor if self.spec.task is TaskType.REGRESSION else RandomForestClassifier
        return build(warm_start=True, random_state=self.seed, n_jobs=self.n_threads, **self.settings)

    def _grow(self, forest: Any, x: Array, y: NDArray[Any], n_trees: int, weight: Array | None) -> None:
        """Up to `n_trees` trees; those that are there stay."""
        forest.set_params(n_estimators=n_trees).fit(x, y, sample_weight=weight)
        self.trees = [member.tree_ for member in forest.estimators_]
        self.rounds = n_trees

    @staticmethod
    def _prediction(mean: NDArray[np.float64]) -> Array:
        """(R, 1, D) -> (R, K)."""
        return mean[:, 0].astype(np.float32)


def _share_or_name(share: float | str) -> float | str:
    """A whole number as the share it stands for: 1 is all inputs to the benchmark, a single one to scikit-learn."""
    return share if isinstance(share, str) else float(share)
