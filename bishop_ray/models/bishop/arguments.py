"""Checks of `BiSHop`'s arguments."""

from __future__ import annotations

from typing import Any

from bishop_ray.models.bishop.block import MODULES
from bishop_ray.models.bishop.entmax import ACTIVATIONS

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "activation": ACTIVATIONS,
    "categorical_embedding": ("column", "plain"),
    "numeric_embedding": ("piecewise", "raw"),
    "module": MODULES,
    "compat": (None, "authors"),
}
_LOWEST = {
    "d_embedding": 1,
    "stride": 1,
    "n_pool": 1,
    "n_merge": 2,
    "d_model": 1,
    "d_ff": 1,
    "n_heads": 1,
    "n_encoder_levels": 1,
    "n_decoded": 1,
    "head_max_width": 1,
}


def check_arguments(arguments: dict[str, Any]) -> None:
    """Nothing, if all hyperparameters in `arguments` (by name) can be built.

    Raises:
        ValueError: Names the argument, what was expected and what was found.
    """
    for name, lowest in _LOWEST.items():
        value = arguments[name]
        if name == "head_max_width" and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise ValueError(f"{name} must be a whole number >= {lowest}; found {value!r}")
    if arguments["n_heads"] > arguments["d_model"]:
        raise ValueError(f"n_heads must be <= d_model ({arguments['d_model']}); found {arguments['n_heads']}")
    for name in ("dropout", "head_dropout"):
        if not 0.0 <= arguments[name] < 1.0:
            raise ValueError(f"{name} must lie in [0, 1); found {arguments[name]!r}")
    if not 1.0 < arguments["fixed_alpha"] <= 2.0:
        raise ValueError(f"fixed_alpha must lie in (1, 2]; found {arguments['fixed_alpha']!r}")
    for name, known in _CHOICES.items():
        if arguments[name] not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; found {arguments[name]!r}")
