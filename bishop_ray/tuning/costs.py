"""What a predictor costs: how long it takes to fit and to predict."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.predictor import Predictor

ROWS = 1000


@dataclass(frozen=True)
class Costs:
    """Of one predictor.

    Attributes:
        fit_seconds: Its training took.
        predict_ms: Milliseconds per 1,000 rows, from a raw table to outputs, in this process.
    """

    fit_seconds: float
    predict_ms: float


def measure(predictor: Predictor, frame: pd.DataFrame) -> tuple[NDArray[Any], Costs]:
    """The output (R, K) for the R rows of `frame`, and what it cost."""
    predictor.output(frame.head(1))  # what a first call loads and compiles is no part of a prediction
    # A small table is repeated up to 1,000 rows: what a call costs by itself would be multiplied otherwise.
    timed = frame.iloc[np.resize(np.arange(len(frame)), max(len(frame), ROWS))] if len(frame) else frame
    began = time.perf_counter()
    output = predictor.output(timed)[: len(frame)]
    seconds = time.perf_counter() - began
    fit = float(predictor.info.get("fit_seconds", 0.0))
    return output, Costs(fit, 1000 * seconds * ROWS / max(1, len(timed)))
