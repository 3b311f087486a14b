"""Permutation importance: what is lost when a column's values are exchanged among the rows (Breiman 2001, section 10).

Columns are the user's own. Every column is exchanged in the same orders, so its result does not depend on the others.
Letters: R rows, F columns, S repeats, K outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bishop_ray.data.table import TaskType
from bishop_ray.errors import UserError
from bishop_ray.metrics import evaluate
from bishop_ray.predictor.encoded import Encoded, Orders
from bishop_ray.predictor.single import Predictor

Floats = NDArray[np.float64]
Loss = Callable[[Floats], float]
"""(R, K) output after an exchange -> how much worse, or how different, it is."""
_CELLS = 20_000_000
"""Encoded numbers of one call of the model (80 MB); more only if the rows alone are more."""


def random_orders(rows: int, repeats: int, random: np.random.Generator) -> Orders:
    """(S, R) seeded random orders of the rows."""
    return np.stack([random.permutation(rows) for _ in range(repeats)])


def losses(
    predictor: Predictor, parts: Sequence[Encoded], columns: Sequence[str], orders: Orders, loss: Loss
) -> Floats:
    """(S,): the loss after exchanging `columns` together in each order; as many orders per call as memory allows.

    An order that changes no input costs nothing, exactly: a model's rounding may depend on how many rows it is given.
    """
    moving = np.array([any(part.moves(columns, order) for part in parts) for order in orders])
    result = np.zeros(len(orders))
    orders = orders[moving]
    cells = sum(part.x_num.size + part.x_cat.size for part in parts)
    at_once = max(1, _CELLS // max(cells, 1))
    found: list[float] = []
    for start in range(0, len(orders), at_once):
        some = orders[start : start + at_once]
        output = finite(predictor, [part.shuffled(columns, some) for part in parts])
        found += [loss(copy) for copy in output.reshape(len(some), -1, output.shape[1])]
    result[moving] = found
    return result


def finite(predictor: Predictor, parts: Sequence[Encoded]) -> Floats:
    """The (R, K) output as float64.

    Raises:
        UserError: Some row has none that is finite.
    """
    output = np.asarray(predictor.output_of(parts), np.float64)
    if bad := int((~np.isfinite(output)).any(axis=1).sum()):
        raise UserError(f"explain: {predictor.model_name} has no finite prediction for {bad} of {len(output)} rows")
    return output


def score_loss(metric: str, predictor: Predictor, y: NDArray[Any], output: Floats) -> Loss:
    """How much the metric's score (larger is better) falls.

    Raises:
        UserError: The metric is unknown, does not fit the task or is undefined for these rows.
    """
    task = predictor.task
    scale = 1.0 if task.is_classification else predictor.target.units

    def score(found: Floats) -> float:
        return evaluate(metric, task, y, found, scale=scale)

    try:
        best = score(output)
    except ModuleNotFoundError as error:  # what predicts need not have what judges
        raise UserError(f"explain: {metric} needs {error.name}: pip install scikit-learn") from error
    return lambda changed: best - score(changed)


def output_change(task: TaskType, output: Floats) -> Loss:
    """Mean over rows of how far the output moves.

    Of probabilities half the sum of all classes' absolute changes (the total variation distance, in [0, 1]: for two
    classes the change of either); of a number its absolute change, in standard deviations of the training target.
    """
    half = 0.5 if task.is_classification else 1.0
    return lambda changed: half * float(np.abs(changed - output).sum(axis=1).mean())
