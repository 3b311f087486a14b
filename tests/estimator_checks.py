"""scikit-learn's own estimator checks, as the tests of both families of estimators ask them."""

from __future__ import annotations

from collections.abc import Container
from typing import Any
from unittest import SkipTest

from sklearn.utils.estimator_checks import estimator_checks_generator


def names_of(estimator: Any) -> set[str]:
    """The checks that apply to it."""
    return {name for name, _, _ in _checks(estimator)}


def failures(estimator: Any, names: Container[str]) -> dict[str, str]:
    """What of the checks of these names does not pass, and why."""
    failed = {}
    for name, model, check in _checks(estimator):
        if name not in names:
            continue
        try:
            check(model)
        except SkipTest:
            continue
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    return failed


def _checks(estimator: Any) -> list[tuple[str, Any, Any]]:
    found = estimator_checks_generator(estimator, legacy=True)
    return [(getattr(check, "func", check).__name__, model, check) for model, check in found]
