"""Coding of targets: labels to classes, values to scaled units, and back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.data.columns import canonical_text, category_codes, to_numbers
from bishop_ray.data.table import TaskType
from bishop_ray.errors import BadTable


class Units(float):
    """Units of the target per unit of its standardised form, as a number, which knows the target's mean as well.

    Most metrics look at differences only, for which a scale is enough; some count from zero.
    """

    center: float

    def __new__(cls, scale: float, center: float) -> Units:
        """The number `scale`, with the mean `center`, both in the target's own units."""
        made = super().__new__(cls, scale)
        made.center = float(center)
        return made

    def __getnewargs__(self) -> tuple[float, float]:  # type: ignore[override]
        return float(self), self.center

    def decode(self, coded: NDArray[np.float64]) -> NDArray[np.float64]:
        """(R,) standardised values, once rounded to float32, in the target's own units.

        What cannot be told from zero is zero: a target of counts must not turn negative by rounding.
        """
        values = coded * float(self) + self.center
        noise = np.finfo(np.float32).eps * abs(self.center)
        return np.where(np.abs(values) <= noise, 0.0, values)


_LARGEST = 1e150
"""Bound of a regression target's size and inverse spread: squares, as in every score, stay inside float64."""
Label = str | bool | int | float
"""What a class may be called; JSON keeps the four apart."""


@dataclass(frozen=True)
class TargetCoder:
    """What was learnt of the training target.

    Attributes:
        name: Column name.
        task: The task type; classification is binary exactly when train has two classes.
        classes: Labels in the order of the K outputs: sorted, or in the order of an ordered category.
        dtype: pandas dtype of the labels as they came.
        categories: All categories of a label column of dtype category, else empty.
        ordered: Whether those categories are ordered.
        center: Mean of the training target (regression; 0 for classification).
        scale: Standard deviation of the training target, 1 if it is constant.
    """

    name: str
    task: TaskType
    classes: tuple[Label, ...] = ()
    dtype: str = "object"
    categories: tuple[Label, ...] = ()
    ordered: bool = False
    center: float = 0.0
    scale: float = 1.0

    @classmethod
    def fit(cls, target: pd.Series, task: TaskType) -> TargetCoder:
        """Learns from the training target (R,).

        Raises:
            BadTable: Missing values, fewer than two classes, or a regression target that is no number or whose size or
                spread has a square beyond float64.
        """
        name = str(target.name)
        if target.isna().any():
            raise BadTable(f"target column {name!r} has {int(target.isna().sum())} missing values in train")
        if not task.is_classification:
            center, scale = _moments(name, _finite(target))
            return cls(name, TaskType.REGRESSION, center=center, scale=scale)
        categories: tuple[Label, ...] = ()
        ordered = False
        if isinstance(target.dtype, pd.CategoricalDtype):
            categories = tuple(_label(value) for value in target.cat.categories)
            ordered = bool(target.cat.ordered)
        labels = _distinct(target)
        classes = tuple(c for c in categories if c in labels) if ordered else tuple(sorted(labels, key=_sort_key))
        if len(classes) < 2:
            raise BadTable(f"target column {name!r} has one class in train: {labels[0]!r}; expected at least two")
        kind = TaskType.BINARY if len(classes) == 2 else TaskType.MULTICLASS
        dtype = "category" if categories else str(target.dtype)
        return cls(name, kind, classes, dtype, categories, ordered)

    @property
    def n_out(self) -> int:
        """K: the number of classes, 1 for regression."""
        return len(self.classes) if self.task.is_classification else 1

    @property
    def units(self) -> Units:
        """How the coded target of a regression is read by metrics."""
        return Units(self.scale, self.center)

    def encode(self, target: pd.Series) -> NDArray[np.float32] | NDArray[np.int64]:
        """Class indices int64 (R,), or the standardised target float32 (R,).

        Raises:
            BadTable: A missing value, a label that train does not have, text where a number must be, or a number too
                far from the training target for float32.
        """
        if not self.task.is_classification:
            values = _finite(target.rename(self.name))
            with np.errstate(over="ignore"):
                coded: NDArray[np.float32] = ((values - self.center) / self.scale).astype(np.float32)
            if not np.isfinite(coded).all():
                raise BadTable(
                    f"target column {self.name!r}: expected values near those of train, {self.center:g} ± "
                    f"{self.scale:g}; found {values[np.argmax(~np.isfinite(coded))]:g}"
                )
            return coded
        codes, texts = category_codes(target)
        known = {canonical_text(label): index for index, label in enumerate(self.classes)}
        unknown = [text for text in texts if text not in known]
        if unknown or (codes < 0).any():
            found = repr(unknown[0]) if unknown else "a missing value"
            raise BadTable(
                f"target column {self.name!r}: expected one of {len(self.classes)} classes seen in train; found {found}"
            )
        return np.array([known[text] for text in texts], np.int64)[codes]

    def labels(self, probabilities: NDArray[Any]) -> pd.Series:
        """The likeliest class of each row, (R, K) -> Series (R,) in the dtype the labels came in.

        Raises:
            ValueError: Not K columns, or a row without a finite largest value.
        """
        if probabilities.ndim != 2 or probabilities.shape[1] != self.n_out:
            raise ValueError(f"expected probabilities of shape (R, {self.n_out}); found {probabilities.shape}")
        if np.isnan(probabilities).any():
            raise ValueError("probabilities must not be NaN")
        picks = probabilities.argmax(axis=1)
        values = [self.classes[int(i)] for i in picks]
        if self.categories:
            return pd.Series(pd.Categorical(values, list(self.categories), self.ordered), name=self.name)
        series = pd.Series(values, name=self.name, dtype=object)
        # labels merged from mixed values ("1" and 1) may not fit the dtype they came in
        return series if self.dtype == "object" else series.astype(pd.api.types.pandas_dtype(self.dtype))

    def inverse(self, prediction: NDArray[Any]) -> NDArray[np.float64]:
        """The target in its own units: standardised (R, 1) or (R,) -> float64 (R,)."""
        return np.asarray(prediction, np.float64).reshape(-1) * self.scale + self.center

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "classes": list(self.classes), "categories": list(self.categories)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TargetCoder:
        """The inverse of `to_dict`."""
        changes = {"task": TaskType(data["task"]), "classes": tuple(data["classes"])}
        return cls(**{**data, **changes, "categories": tuple(data["categories"])})


def _finite(target: pd.Series) -> NDArray[np.float64]:
    values = to_numbers(target)
    if not np.isfinite(values).all():
        raise BadTable(f"target column {target.name!r}: expected finite numbers; found missing or infinite values")
    return values


def _moments(name: str, values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and standard deviation (1 for a constant target) of (R,) finite numbers."""
    size = float(np.abs(values).max())
    if size > _LARGEST:
        raise BadTable(f"target column {name!r}: expected numbers up to {_LARGEST:g} in size; found {size:g}")
    if values.min() == values.max():
        return float(values[0]), 1.0
    center = float(values.mean())
    # squares of small deviations underflow: they are taken of the column brought to size 1
    spread = float(np.abs(values - center).max())
    scale = float(((values - center) / spread).std() * spread)
    if scale < 1 / _LARGEST:
        raise BadTable(f"target column {name!r}: expected a spread of at least {1 / _LARGEST:g}; found {scale:g}")
    return center, scale


def _label(value: Any) -> Label:
    """A Python value of one of the four kinds; anything else becomes its text."""
    plain = value.item() if isinstance(value, np.generic) else value
    return plain if isinstance(plain, str | bool | int | float) else str(canonical_text(value))


def _distinct(target: pd.Series) -> list[Label]:
    """One label per canonical text, the first seen of each."""
    codes, texts = category_codes(target)
    rows = [int(np.argmax(codes == code)) for code in range(len(texts))]
    return [_label(target.iloc[row]) for row in rows]


def _sort_key(label: Label) -> tuple[bool, float, str]:
    """Numbers by size, then texts."""
    return (isinstance(label, str), 0.0 if isinstance(label, str) else float(label), str(label))
