"""What a study knows of its winner on the validation rows, as the registry takes it."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from bishop_ray.tracking import Evidence, Validation
from bishop_ray.training.paired import Scored
from bishop_ray.tuning.prepare import Prepared


def evidence(prepared: Prepared, output: NDArray[Any], trained: NDArray[Any] | None, on_gpu: bool) -> Evidence:
    """The evidence of a model that was selected on the R validation rows.

    Args:
        prepared: The study's data.
        output: (R, K) predictions that its validation score is made of: of a refit those of the model before it, of an
            ensemble those by weights that the row did not choose.
        trained: (R, K) what the process that trained it said of the rows, if that is known.
        on_gpu: That process may have used a GPU.
    """
    data, rows = prepared.data, prepared.validation
    scored = Scored(data.validation.y, output, data.target_scale)
    return Evidence(rows.frame, trained, on_gpu, Validation(rows.fingerprint(), scored))
