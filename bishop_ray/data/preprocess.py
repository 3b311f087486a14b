"""Preprocessor fitted on training rows: imputing, encoding, scaling; row and class weights.

A `Preprocessor` has no way to see other rows: `fit` takes train, and the transforms change nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.data.categorical import CategoricalColumn, fit_category
from bishop_ray.data.columns import category_codes, to_numbers
from bishop_ray.data.numeric import NUMERIC_KINDS, NumericColumn, coded_numbers, fit_numbers, values_of
from bishop_ray.data.table import RawDataset, Table, TableSpec
from bishop_ray.data.target import Label, TargetCoder
from bishop_ray.errors import BadTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preprocessor:
    """Codes tables as its training table was coded; travels with the model.

    x_num holds the numerical columns in training order (of points in time the time elapsed, then the calendar), then
    the 0/1 missing indicators in the same order; x_cat the categorical columns in training order.

    Attributes:
        numeric: One of `numbers.NUMERIC_KINDS`.
        numbers: The numerical columns; several of one name for a column of points in time.
        categories: The categorical columns.
        target: The target's coder.
        order: Names of the used columns as train had them.
        dropped: Columns without information in train: constant, or all missing.
    """

    numeric: str
    numbers: tuple[NumericColumn, ...]
    categories: tuple[CategoricalColumn, ...]
    target: TargetCoder
    order: tuple[str, ...]
    dropped: tuple[str, ...]

    @classmethod
    def fit(cls, train: RawDataset, numeric: str = "normal") -> Preprocessor:
        """Learns medians, scales, levels and the target's coding.

        Args:
            train: The training rows, no others.
            numeric: What the model declares, one of `numbers.NUMERIC_KINDS`.

        Raises:
            BadTable: No column is left, text in a numerical column, a target that cannot be coded.
        """
        if numeric not in NUMERIC_KINDS:
            raise ValueError(f"numeric must be one of {', '.join(NUMERIC_KINDS)}; found {numeric!r}")
        numbers: list[NumericColumn] = []
        categories: list[CategoricalColumn] = []
        dropped: list[str] = []
        for name in train.frame.columns:
            series = train.frame[name]
            if name in train.categorical and (category := fit_category(series)):
                categories.append(category)
            elif name not in train.categorical and (found := fit_numbers(series, numeric)):
                numbers.extend(found)
            else:
                dropped.append(name)
        if dropped:
            shown = ", ".join(dropped[:10]) + (", ..." if len(dropped) > 10 else "")
            logger.warning("%s: dropped %d constant or all-missing columns: %s", train.name, len(dropped), shown)
        if not numbers and not categories:
            raise BadTable(f"{train.name}: no feature column with two different values in {len(train)} training rows")
        order = tuple(name for name in train.frame.columns if name not in dropped)
        target = TargetCoder.fit(train.target, train.task)
        return cls(numeric, tuple(numbers), tuple(categories), target, order, tuple(dropped))

    @property
    def spec(self) -> TableSpec:
        """What a model is told of the table."""
        n_num = len(self.numbers) + sum(column.indicator for column in self.numbers)
        cardinalities = tuple(column.cardinality for column in self.categories)
        return TableSpec(self.target.task, n_num, cardinalities, self.target.n_out)

    @property
    def classes(self) -> tuple[Label, ...]:
        """Labels in the order of the K outputs; empty for regression."""
        return self.target.classes

    @property
    def schema(self) -> tuple[tuple[str, str], ...]:
        """The columns a frame must have, in training order, each "number", "moment" or "category"."""
        kinds = {column.name: "category" for column in self.categories}
        kinds |= {column.name: "moment" if column.moment else "number" for column in self.numbers}
        return tuple((name, kinds[name]) for name in self.order)

    def transform(self, raw: RawDataset) -> Table:
        """`raw` encoded, target included.

        Raises:
            BadTable: As `transform_features` and `encode_target`.
        """
        x_num, x_cat = self.transform_features(raw.frame)
        return Table(x_num, x_cat, self.encode_target(raw.target))

    def transform_features(self, frame: pd.DataFrame) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """x_num (R, N) float32, x_cat (R, C) int64 of a frame with R rows.

        Columns are found by name: their order, further columns and the index do not matter.

        Raises:
            BadTable: A column is missing or comes twice, or holds text where train has numbers.
        """
        positions = self._positions(frame)
        read = {
            name: to_numbers(frame.iloc[:, positions[name]].rename(name), moment)
            for name, moment in {column.name: column.moment for column in self.numbers}.items()
        }
        values = [values_of(column, read[column.name]) for column in self.numbers]
        parts = [coded_numbers(v, c, self.numeric) for v, c in zip(values, self.numbers, strict=True)]
        parts += [
            (~np.isfinite(v)).astype(np.float32) for v, c in zip(values, self.numbers, strict=True) if c.indicator
        ]
        codes = [column.codes(frame.iloc[:, positions[column.name]]) for column in self.categories]
        return _stacked(parts, len(frame), np.float32), _stacked(codes, len(frame), np.int64)

    def encode_target(self, target: pd.Series) -> NDArray[np.float32] | NDArray[np.int64]:
        """Class indices, or the standardised target; see `TargetCoder.encode`."""
        return self.target.encode(target)

    def labels(self, probabilities: NDArray[Any]) -> pd.Series:
        """(R, K) -> the likeliest labels (R,) in the dtype they came in; see `TargetCoder.labels`."""
        return self.target.labels(probabilities)

    def inverse_target(self, prediction: NDArray[Any]) -> NDArray[np.float64]:
        """(R, 1) standardised -> (R,) float64 in the target's own units."""
        return self.target.inverse(prediction)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; Python writes and reads floats exactly."""
        return {
            "numeric": self.numeric,
            "numbers": [column.to_dict() for column in self.numbers],
            "categories": [column.to_dict() for column in self.categories],
            "target": self.target.to_dict(),
            "order": list(self.order),
            "dropped": list(self.dropped),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Preprocessor:
        """The inverse of `to_dict`."""
        return cls(
            data["numeric"],
            tuple(NumericColumn.from_dict(column) for column in data["numbers"]),
            tuple(CategoricalColumn.from_dict(column) for column in data["categories"]),
            TargetCoder.from_dict(data["target"]),
            tuple(data["order"]),
            tuple(data["dropped"]),
        )

    def _positions(self, frame: pd.DataFrame) -> dict[str, int]:
        """Name -> position of every column that is needed."""
        found: dict[str, list[int]] = {}
        for position, name in enumerate(frame.columns):
            found.setdefault(str(name), []).append(position)
        absent = [name for name in self.order if name not in found]
        if absent:
            shown = ", ".join(map(repr, absent[:10])) + (f" and {len(absent) - 10} more" if len(absent) > 10 else "")
            raise BadTable(
                f"missing column{'s' * (len(absent) > 1)} {shown}; expected the columns of the training table"
            )
        for name in self.order:
            if len(found[name]) > 1:
                raise BadTable(f"column {name!r} comes {len(found[name])} times; expected once")
        return {name: found[name][0] for name in self.order}


def _stacked(columns: list[NDArray[Any]], rows: int, dtype: type) -> NDArray[Any]:
    return np.stack(columns, axis=1) if columns else np.zeros((rows, 0), dtype)


def counted(train: RawDataset) -> RawDataset:
    """The rows that weigh anything: one of weight 0 is as if it were not there, for every model.

    Raises:
        BadTable: None is left, or none of a class.
    """
    if train.weights is None or train.weights.all():
        return train
    kept = train.rows(np.flatnonzero(train.weights > 0))
    if not len(kept):
        raise BadTable(f"{train.name}: --weights: expected a training row with a weight above 0; found none")
    if train.task.is_classification:
        codes, labels = category_codes(train.target)
        lost = np.setdiff1d(codes, codes[train.weights > 0])
        if len(lost):
            raise BadTable(
                f"{train.name}: --weights: expected a training row with a weight above 0 of every class of "
                f"{train.target.name!r}; found none of {labels[lost[0]]!r}"
            )
    return kept


def encoded(preprocessor: Preprocessor, train: RawDataset, balance: bool) -> Table:
    """Training rows as a `Table` with its weight.

    Args:
        preprocessor: Fitted.
        train: The rows.
        balance: Every class weighs the same: `class_weights` times the rows' own weights.
    """
    table = preprocessor.transform(train)
    if train.weights is None and not balance:
        return table
    weight = np.ones(len(table)) if train.weights is None else train.weights / train.weights.max()
    if balance:
        weight = weight * class_weights(table.y)
    # Mean 1: learning rates, and penalties that stand against sums of weights, keep their meaning.
    return replace(table, weight=(weight / weight.mean()).astype(np.float32))


def class_weights(y: NDArray[Any]) -> NDArray[np.float64]:
    """(R,) of class indices (R,): rows over classes times rows of the own class.

    That is ``class_weight="balanced"`` of scikit-learn (``sklearn.utils.class_weight.compute_class_weight``).
    """
    classes, place, counts = np.unique(y, return_inverse=True, return_counts=True)
    weights: NDArray[np.float64] = (len(y) / (len(classes) * counts))[place]
    return weights
