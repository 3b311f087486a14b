"""Validation of model constructor arguments."""

from __future__ import annotations


def check_whole(lowest: int, **arguments: int) -> None:
    """Nothing, if every argument is a whole number of at least `lowest`.

    Raises:
        ValueError: Names the argument, what was expected and what was found.
    """
    for name, value in arguments.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise ValueError(f"{name} must be a whole number >= {lowest}; found {value!r}")


def check_rate(**arguments: float) -> None:
    """Nothing, if every argument is a share that leaves something, as a dropout rate must: in [0, 1).

    Raises:
        ValueError: Names the argument, what was expected and what was found.
    """
    for name, value in arguments.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name} must lie in [0, 1); found {value!r}")


def check_choice(known: tuple[str, ...], **arguments: str) -> None:
    """Nothing, if every argument is one of `known`.

    Raises:
        ValueError: Names the argument, what was expected and what was found.
    """
    for name, value in arguments.items():
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; found {value!r}")
