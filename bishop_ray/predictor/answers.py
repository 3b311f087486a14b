"""All that a predictor says of rows, from one call of the model: what services and files hand out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.data.columns import canonical_text
from bishop_ray.errors import UserError
from bishop_ray.predictor.single import Predictor


@dataclass(frozen=True)
class Answers:
    """Predictions of R rows.

    Attributes:
        predictions: (R,) labels in the user's own type, or the target in its own units.
        probabilities: (R, K) float64 in the order of `labels`; None for regression.
        labels: The K labels as text; empty for regression.
    """

    predictions: pd.Series
    probabilities: NDArray[np.float64] | None
    labels: tuple[str, ...]


def label_texts(predictor: Predictor) -> tuple[str, ...]:
    """The labels of a classification as text, in training order; empty for regression."""
    return tuple(map(label_text, predictor.target.classes))


def label_text(label: Any) -> str:
    """A label as text: of a text its very letters, "1.0" too."""
    return label if isinstance(label, str) else str(canonical_text(label))


def answers(predictor: Predictor, frame: pd.DataFrame) -> Answers:
    """Labels and probabilities, or numbers, of R rows.

    Args:
        predictor: The fitted predictor.
        frame: R rows, as `Predictor.output` takes them.

    Raises:
        UserError: As `Predictor.output`, or the model's result of some row is not finite.
    """
    output = predictor.output(frame)
    if bad := int((~np.isfinite(output)).any(axis=1).sum()):
        raise UserError(f"{predictor.model_name} has no finite prediction for {bad} of {len(frame)} rows")
    if not predictor.task.is_classification:
        values: Any = predictor.target.inverse(output)
        return Answers(pd.Series(values, name=predictor.target.name), None, ())
    labels = predictor.target.labels(output)
    return Answers(labels, np.asarray(output, np.float64), label_texts(predictor))
