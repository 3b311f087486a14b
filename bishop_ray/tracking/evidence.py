"""What a model is registered with, to be checked by and compared with others. Imports nothing heavy.

Letters: R rows, K outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from bishop_ray.training.paired import Scored

FOLDER = "gate"
"""Among the artifacts of a registered model, beside ``predictor``; see ``sample.py``."""


@dataclass(frozen=True)
class Validation:
    """What the score that selected a model is made of.

    Attributes:
        key: Says which rows, so that two models of one key are compared row by row.
        scored: Target and predictions; of an ensemble those of weights that the row did not choose.
    """

    key: str
    scored: Scored


@dataclass(frozen=True)
class Evidence:
    """What a model is registered with.

    Attributes:
        frame: (R, features) raw rows that no test split holds, best of validation; some are kept.
        trained: (R, K) what the training process predicted for them, where that is known.
        on_gpu: That process may have used a GPU.
        validation: Predictions of the validation rows, where they are known.
    """

    frame: pd.DataFrame
    trained: NDArray[Any] | None = None
    on_gpu: bool = False
    validation: Validation | None = None
