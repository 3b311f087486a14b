"""The vocabulary of the project: task, table, split.

Letters of shapes: R rows, N numerical columns, C categorical columns, K outputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd


T = TypeVar("T")
U = TypeVar("U")


class TaskType(StrEnum):
    """What is predicted. Both kinds of classification have K = number of classes outputs."""

    BINARY = "binary"
    MULTICLASS = "multiclass"
    REGRESSION = "regression"

    @property
    def is_classification(self) -> bool:
        """Whether labels are predicted, not a number."""
        return self is not TaskType.REGRESSION


@dataclass(frozen=True)
class TableSpec:
    """All a model may know of a table.

    Attributes:
        task: The task type.
        n_num: N, the number of numerical columns of a `Table`.
        cat_cardinalities: Codes per categorical column (length C), the one for unknown or missing (0) counted.
        n_out: K: the number of classes, 1 for regression.
    """

    task: TaskType
    n_num: int
    cat_cardinalities: tuple[int, ...]
    n_out: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", TaskType(self.task))
        object.__setattr__(self, "cat_cardinalities", tuple(int(c) for c in self.cat_cardinalities))
        if self.n_num < 0 or self.n_num + len(self.cat_cardinalities) == 0:
            raise ValueError(f"a TableSpec needs at least one feature; found n_num={self.n_num} and no categories")
        if any(c < 1 for c in self.cat_cardinalities):
            raise ValueError(f"cat_cardinalities must be >= 1; found {self.cat_cardinalities}")
        expected = {TaskType.REGRESSION: self.n_out == 1, TaskType.BINARY: self.n_out == 2}
        if not expected.get(self.task, self.n_out > 2):
            raise ValueError(f"n_out={self.n_out} does not fit the task {self.task.value}")

    @property
    def n_cat(self) -> int:
        """C, the number of categorical columns."""
        return len(self.cat_cardinalities)


@dataclass(frozen=True)
class Table:
    """An encoded split, as networks read it.

    Attributes:
        x_num: (R, N) float32, no infinity; NaN only for models that declare numeric "native".
        x_cat: (R, C) int64; column j lies in [0, cat_cardinalities[j]), 0 is missing, or unknown (`data/levels.py`).
        y: (R,) class index int64, or the standardised target float32.
        weight: (R,) float32 with mean 1, what a training row counts for in the loss; None where all count alike.
    """

    x_num: NDArray[np.float32]
    x_cat: NDArray[np.int64]
    y: NDArray[np.float32] | NDArray[np.int64]
    weight: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        if not len(self.x_num) == len(self.x_cat) == len(self.y):
            raise ValueError(f"row counts differ: x_num {len(self.x_num)}, x_cat {len(self.x_cat)}, y {len(self.y)}")
        if self.weight is not None and self.weight.shape != (len(self.y),):
            raise ValueError(f"expected a weight of shape ({len(self.y)},); found {self.weight.shape}")

    def __len__(self) -> int:
        return len(self.y)

    def weight_key(self) -> dict[str, str]:
        """What tells these weights from others, as JSON; nothing without weights."""
        return {} if self.weight is None else {"weights": hashlib.sha256(self.weight.tobytes()).hexdigest()[:16]}


@dataclass(frozen=True)
class RawDataset:
    """A table as it came, before any fitting.

    Attributes:
        name: The dataset's name.
        frame: (R, features) without the target; unique string column names.
        target: (R,) without missing values.
        task: The task type.
        categorical: Names of the columns to code as categories; all others are numerical.
        weights: (R,) row weights >= 0, not all 0, or None.
        groups: (R,) codes of groups that stay together in a split, or None.
        time: (R,) what a split is ordered by, finite, or None.
    """

    name: str
    frame: pd.DataFrame
    target: pd.Series
    task: TaskType
    categorical: tuple[str, ...]
    weights: NDArray[np.float64] | None = None
    groups: NDArray[np.int64] | None = None
    time: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.frame)

    def rows(self, index: NDArray[np.int64]) -> RawDataset:
        """The same dataset with the rows of `index` (positions) only, renumbered from 0."""
        parts: dict[str, Any] = {name: values[index] for name, values in self._of_rows().items()}
        frame = self.frame.iloc[index].reset_index(drop=True)
        return replace(self, frame=frame, target=self.target.iloc[index].reset_index(drop=True), **parts)

    def joined(self, other: RawDataset) -> RawDataset:
        """These rows, then those of another part of the same dataset."""
        import pandas as pd

        theirs = other._of_rows()
        parts: dict[str, Any] = {
            name: np.concatenate([values, theirs[name]]) for name, values in self._of_rows().items()
        }
        frame = pd.concat([self.frame, other.frame], ignore_index=True)
        return replace(self, frame=frame, target=pd.concat([self.target, other.target], ignore_index=True), **parts)

    def _of_rows(self) -> dict[str, NDArray[Any]]:
        every = {"weights": self.weights, "groups": self.groups, "time": self.time}
        return {name: values for name, values in every.items() if values is not None}

    def fingerprint(self) -> str:
        """A short hash of names, values and target: two datasets with one fingerprint give the same study."""
        import pandas as pd

        digest = hashlib.sha256()
        digest.update(repr((list(self.frame.columns), self.target.name, self.task, self.categorical)).encode())
        for column in (*(self.frame[name] for name in self.frame.columns), self.target):
            values = column.astype("string").fillna("\0") if column.dtype.kind not in "biuf" else column
            digest.update(pd.util.hash_pandas_object(values, index=False).to_numpy().tobytes())
        for name, of_rows in self._of_rows().items():
            digest.update(name.encode() + of_rows.tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Split(Generic[T]):
    """Train, validation and test parts of one thing; the test part is opened once, after the search."""

    train: T
    validation: T
    test: T

    def map(self, function: Callable[[T], U]) -> Split[U]:
        """`function` applied to each part."""
        return Split(function(self.train), function(self.validation), function(self.test))
