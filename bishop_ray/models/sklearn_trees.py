"""scikit-learn's trees as arrays: saved and loaded without pickle.

Trees are kept and predicted with as scikit-learn's own ``Tree`` objects (attribute ``tree_`` of every fitted tree,
https://scikit-learn.org/stable/auto_examples/tree/plot_unveil_tree_structure.html), whether just fitted or loaded. On
disk stand only their arrays: a forest of 250 deep trees on 10,000 rows takes a fifth of its skops file (47 of 231 MB),
and a loaded tree is checked node by node: nothing downstream would notice a child or a column that does not exist.

Letters: R rows, F inputs of a tree, T trees per round, D values per leaf.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from bishop_ray._compat.sklearn import empty_nodes, make_tree
from bishop_ray.data.table import Table, TableSpec
from bishop_ray.errors import TrainingFailed, UserError
from bishop_ray.models.base import Array, Estimator, NumericKind

TREES, MANIFEST, FORMAT = "trees.safetensors", "trees.json", 1
ONE_HOT_LEVELS = 32
"""Columns with more levels stay codes: one input, not hundreds (the benchmark has none of more than 20)."""
ONE_HOT_WIDTH = 1024
"""One-hot inputs of all columns together: 10,000 rows of them take 40 MB. The widest columns beyond it stay codes."""
_BLOCK = 16
"""Rounds summed one after the other, whatever the number of threads: the same sum on every machine."""
_ARRAYS = {
    "nodes": np.int32,
    "depth": np.int32,
    "leaf": np.bool_,
    "left": np.int32,
    "right": np.int32,
    "feature": np.int32,
    "threshold": np.float64,
    "value": np.float64,
}


class TreeEnsemble(Estimator):
    """A sum of scikit-learn trees. Subclasses grow `trees` and turn `totals` into predictions.

    Categories are one-hot as in the benchmark (Grinsztajn et al. 2022); missing or unseen ones are all zeros. Columns
    of many levels (`ONE_HOT_LEVELS`, `ONE_HOT_WIDTH`) are handed over as their codes. Missing numbers are medians with
    an indicator ("raw"), because not every criterion of the trees reads NaN.

    Attributes:
        trees: Fitted trees, round by round.
        n_per_round: T.
        n_values: D.
    """

    numeric: ClassVar[NumericKind] = "raw"
    takes_weights: ClassVar[bool] = True

    def __init__(self, spec: TableSpec, n_per_round: int, n_values: int) -> None:
        self.spec = spec
        self.n_per_round, self.n_values = n_per_round, n_values
        self.trees: list[Any] = []
        self.one_hot = _one_hot_columns(spec.cat_cardinalities)

    @property
    def n_inputs(self) -> int:
        """F."""
        widths = (c - 1 if hot else 1 for c, hot in zip(self.spec.cat_cardinalities, self.one_hot, strict=True))
        return self.spec.n_num + sum(widths)

    def inputs(self, x_num: Array, x_cat: NDArray[np.int64]) -> Array:
        """(R, N) numbers, (R, C) codes -> (R, F) float32, as the trees read them."""
        x = np.zeros((len(x_num), self.n_inputs), np.float32)
        x[:, : self.spec.n_num] = x_num
        start, rows = self.spec.n_num, np.arange(len(x_num))
        for column, (cardinality, hot) in enumerate(zip(self.spec.cat_cardinalities, self.one_hot, strict=True)):
            codes = x_cat[:, column]
            if hot:
                known = codes > 0
                x[rows[known], start + codes[known] - 1] = 1.0
            else:
                x[:, start] = codes
            start += cardinality - 1 if hot else 1
        return x

    def training_arrays(self, train: Table) -> tuple[Array, NDArray[Any]]:
        """(R, F) inputs and (R,) targets as scikit-learn takes them.

        Raises:
            TrainingFailed: A class has no row: scikit-learn would leave it out of the prediction.
        """
        x = self.inputs(train.x_num, train.x_cat)
        if not self.spec.task.is_classification:
            return x, train.y.astype(np.float64)
        found = len(np.unique(train.y))
        if found < self.spec.n_out:
            raise TrainingFailed(f"every class needs a training row; found {found} of {self.spec.n_out} classes")
        return x, train.y

    def totals(self, x: Array, trees: Sequence[Any]) -> NDArray[np.float64]:
        """(R, F) -> (R, T, D): the sum of `trees` (whole rounds) over their rounds, on `n_threads` threads."""
        step = _BLOCK * self.n_per_round

        def block(start: int) -> NDArray[np.float64]:
            total = np.zeros((len(x), self.n_per_round, self.n_values))
            for index in range(start, min(start + step, len(trees))):
                total[:, index % self.n_per_round] += trees[index].predict(x)  # releases the GIL
            return total

        total = np.zeros((len(x), self.n_per_round, self.n_values))
        if not len(x):
            return total
        starts = range(0, len(trees), step)
        if self.n_threads == 1 or len(starts) == 1:
            for start in starts:
                total += block(start)
            return total
        with ThreadPoolExecutor(self.n_threads) as pool:
            for part in pool.map(block, starts):
                total += part
        return total

    def used_trees(self) -> Sequence[Any]:
        """The trees of the first `rounds` rounds."""
        return self.trees[: self.rounds * self.n_per_round]

    def state(self) -> dict[str, Any]:
        """JSON values that a subclass needs besides its trees."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Reads what `state` gave; KeyError, TypeError or ValueError where it is damaged."""

    def save(self, folder: Path) -> None:
        """Writes the trees of the first `rounds` rounds: safetensors and JSON."""
        save_file(_packed(self.used_trees()), folder / TREES)
        manifest = {"format": FORMAT, "rounds": self.rounds, "n_inputs": self.n_inputs, "state": self.state()}
        (folder / MANIFEST).write_text(json.dumps(manifest), "utf-8")

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote.

        Raises:
            UserError: A missing or damaged file, or trees of another table.
        """
        path = folder / MANIFEST
        try:
            manifest = json.loads(path.read_text("utf-8"))
            if manifest["format"] != FORMAT:
                raise ValueError(f"format {manifest['format']}, expected {FORMAT}")
            if manifest["n_inputs"] != self.n_inputs:
                raise ValueError(f"{manifest['n_inputs']} inputs, expected {self.n_inputs}")
            rounds = int(manifest["rounds"])
            self.set_state(manifest["state"])
            path = folder / TREES
            trees = _unpacked(load_file(path), self.n_inputs, self.n_values)
            if rounds < 1 or len(trees) != rounds * self.n_per_round:
                raise ValueError(f"{len(trees)} trees, expected {rounds} rounds of {self.n_per_round}")
        except FileNotFoundError as error:
            raise UserError(f"{path}: missing") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise UserError(f"{path}: damaged ({type(error).__name__}: {error})") from error
        self.trees, self.rounds = trees, rounds


def _one_hot_columns(cardinalities: tuple[int, ...]) -> tuple[bool, ...]:
    """Per column whether it is one-hot: narrow columns first, while they fit."""
    hot, width = [False] * len(cardinalities), 0
    for column in sorted(range(len(cardinalities)), key=lambda c: cardinalities[c]):
        levels = cardinalities[column] - 1
        width += levels
        hot[column] = levels <= ONE_HOT_LEVELS and width <= ONE_HOT_WIDTH
    return tuple(hot)


def _packed(trees: Sequence[Any]) -> dict[str, NDArray[Any]]:
    """The arrays of `_ARRAYS`, tree after tree: what inner nodes ask, what leaves answer."""
    leaf = np.concatenate([tree.children_left < 0 for tree in trees])
    packed = {
        "nodes": np.array([tree.node_count for tree in trees]),
        "depth": np.array([tree.max_depth for tree in trees]),
        "leaf": leaf,
        "left": np.concatenate([tree.children_left for tree in trees])[~leaf],
        "right": np.concatenate([tree.children_right for tree in trees])[~leaf],
        "feature": np.concatenate([tree.feature for tree in trees])[~leaf],
        "threshold": np.concatenate([tree.threshold for tree in trees])[~leaf],
        "value": np.concatenate([tree.value[:, 0] for tree in trees])[leaf],
    }
    return {name: np.ascontiguousarray(packed[name].astype(dtype)) for name, dtype in _ARRAYS.items()}


def _unpacked(packed: dict[str, NDArray[Any]], n_inputs: int, n_values: int) -> list[Any]:
    """The trees of `_packed` again, after a check of every node.

    Raises:
        ValueError: Arrays that are no trees of `n_inputs` inputs and `n_values` values per leaf.
        KeyError: An array is missing.
    """
    arrays = {name: packed[name] for name in _ARRAYS}
    for name, dtype in _ARRAYS.items():
        if arrays[name].dtype != dtype or arrays[name].ndim != (2 if name == "value" else 1):
            raise ValueError(f"{name} is {arrays[name].dtype} of {arrays[name].ndim} axes")
    nodes, leaf = arrays["nodes"].astype(np.int64), arrays["leaf"]
    if (nodes < 1).any() or nodes.sum() != len(leaf) or len(arrays["depth"]) != len(nodes):
        raise ValueError("node counts do not fit the nodes")
    inner = ~leaf
    own = np.concatenate([np.arange(n) for n in nodes] or [nodes])[inner]
    count = np.repeat(nodes, nodes)[inner]
    for name in ("left", "right"):
        child = arrays[name]
        # children stand behind their parent: every walk ends
        if len(child) != len(own) or (child <= own).any() or (child >= count).any():
            raise ValueError(f"{name} children that do not exist")
    feature, threshold, value = arrays["feature"], arrays["threshold"], arrays["value"]
    if len(feature) != len(own) or (feature < 0).any() or (feature >= n_inputs).any():
        raise ValueError("inputs that do not exist")
    if len(threshold) != len(own) or np.isnan(threshold).any():
        raise ValueError("thresholds that are missing")
    if value.shape != (int(leaf.sum()), n_values) or not np.isfinite(value).all():
        raise ValueError("values of leaves that are missing or not finite")
    return _built(arrays, nodes, n_inputs)


def _built(arrays: dict[str, NDArray[Any]], nodes: NDArray[np.int64], n_inputs: int) -> list[Any]:
    """scikit-learn's trees from checked arrays; what only training needs (impurities, counts) stays zero."""
    leaf, n_values = arrays["leaf"], arrays["value"].shape[1]
    flat = empty_nodes(len(leaf))
    flat["left_child"] = flat["right_child"] = -1
    flat["feature"] = flat["threshold"] = -2
    for field, name in (("left_child", "left"), ("right_child", "right"), ("feature", "feature")):
        flat[field][~leaf] = arrays[name]
    flat["threshold"][~leaf] = arrays["threshold"]
    values = np.zeros((len(leaf), 1, n_values))
    values[leaf, 0] = arrays["value"]
    ends = np.cumsum(nodes)
    return [
        make_tree(n_inputs, int(depth), flat[start:end], values[start:end])
        for start, end, depth in zip(ends - nodes, ends, arrays["depth"], strict=True)
    ]
