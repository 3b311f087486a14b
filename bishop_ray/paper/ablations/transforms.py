"""Data transforms of ablations: rotation, removed columns.

Letters: R rows, N numerical columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.table import RawDataset, Table
from bishop_ray.errors import BadTable
from bishop_ray.paper.ablations.settings import Change

FOREST_SEED = 0
"""Of the forest that ranks the features: the order of their importance is one for all runs."""


def rotation(n: int, seed: int) -> NDArray[np.float64]:
    """A random rotation (N, N), uniform over the special orthogonal group: orthogonal, determinant 1.

    QR of a Gaussian matrix with the signs of R's diagonal divided out (Mezzadri, "How to generate random matrices from
    the classical compact groups", 2007); a reflection is turned into a rotation by one sign.

    Raises:
        BadTable: Fewer than two columns, which nothing can rotate.
    """
    if n < 2:
        raise BadTable(f"a rotation needs at least two numerical columns; found {n}")
    q, r = np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))
    q = q * np.sign(np.diagonal(r))
    if np.linalg.det(q) < 0:
        q[:, 0] = -q[:, 0]
    matrix: NDArray[np.float64] = q
    return matrix


def rotated(table: Table, matrix: NDArray[np.float64]) -> Table:
    """The table with its first N numerical columns multiplied by the matrix (N, N).

    Those are the table's own columns as encoded (standardised); missing-value indicators after them and categories stay
    as they are (Grinsztajn et al. 2022, section 5.4, rotate numerical features).
    """
    n = len(matrix)
    turned = (table.x_num[:, :n].astype(np.float64) @ matrix).astype(np.float32)
    return replace(table, x_num=np.ascontiguousarray(np.concatenate([turned, table.x_num[:, n:]], axis=1)))


def forest_importance(train: RawDataset, threads: int = 1) -> dict[str, float]:
    """Column -> share of a random forest's decrease in impurity, of the columns that carry information.

    A column's missing-value indicator and its one-hot inputs count for it. The forest is the package's own with its
    default settings, grown on the training rows.
    """
    from bishop_ray.models.random_forest import RandomForest

    preprocessor = Preprocessor.fit(train, RandomForest.numeric)
    table = preprocessor.transform(train)
    forest = RandomForest(preprocessor.spec)
    forest.seed, forest.n_threads = FOREST_SEED, threads
    forest.refit(table, forest.n_trees)
    names = [column.name for column in preprocessor.numbers]
    names += [column.name for column in preprocessor.numbers if column.indicator]
    names += [column.name for column in preprocessor.categories]
    found = dict.fromkeys(preprocessor.order, 0.0)
    for name, value in zip(names, forest.importances().tolist(), strict=True):
        found[name] += value
    return found


def removed(columns: Sequence[str], change: Change, importance: dict[str, float], seed: int) -> list[str]:
    """The columns that a change takes away; one is always left.

    The columns of a smaller share are among those of a larger one. "increasing" takes the least important first,
    "decreasing" the most important; equal ones go in the table's order.

    Args:
        columns: All that carry information, in the table's order.
        change: What to remove.
        importance: Of the columns; needed for the orders that go by it.
        seed: Of a random order.
    """
    names = list(columns)
    if change.order == "random":
        names = [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
    elif change.order:
        sign = 1.0 if change.order == "increasing" else -1.0
        names.sort(key=lambda name: sign * importance[name])
    count = min(round(len(names) * change.remove / 100), len(names) - 1)
    return names[:count]


def without(raw: RawDataset, columns: Sequence[str]) -> RawDataset:
    """The dataset without these columns."""
    gone = set(columns)
    kept = tuple(name for name in raw.categorical if name not in gone)
    return replace(raw, frame=raw.frame.drop(columns=list(columns)), categorical=kept)
