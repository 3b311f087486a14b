"""What is to know of the target: rows without it, how its classes are spread, whether rows are enough."""

from __future__ import annotations

import numpy as np
import pandas as pd

from bishop_ray.data.columns import category_codes, is_number
from bishop_ray.data.findings import DROPPED, NOTED, Finding, listed
from bishop_ray.data.table import RawDataset, Split

FEW_ROWS = 200
"""Rows below which a score is little more than a hint."""
RARE, IMBALANCED = 10, 0.95
"""Rows of a class below which it is rare; share of the largest class from which the others hardly count."""


def missing_target(given: pd.Series, kept: int) -> list[Finding]:
    """Rows that go since their target is missing, blank or, for a regression, infinite.

    Args:
        given: The target column as it came.
        kept: Rows that stayed.
    """
    gone = len(given) - kept
    detail = f"{gone:,} of {len(given):,} rows have no target that can be learnt"
    return [Finding("missing target", str(given.name), detail, DROPPED)] if gone else []


def class_counts(target: pd.Series) -> tuple[tuple[str, int], ...]:
    """Label as text and rows of every class, the largest first."""
    codes, labels = category_codes(target)
    counts = np.bincount(codes, minlength=len(labels))
    return tuple((labels[code], int(counts[code])) for code in np.argsort(-counts, kind="stable"))


def target_findings(raw: RawDataset, classes: tuple[tuple[str, int], ...], asked: bool) -> list[Finding]:
    """Rare classes, one class that is nearly all, classes that look like numbers.

    Args:
        raw: The table.
        classes: `class_counts`; empty for a regression.
        asked: The user named the task type.
    """
    name, found = str(raw.target.name), []
    rare = [f"{label} ({count})" for label, count in reversed(classes) if count < RARE]
    if rare:
        detail = f"{len(rare)} of {len(classes)} classes have fewer than {RARE} rows: {listed(rare)}"
        found.append(Finding("rare class", name, detail, NOTED))
    if classes and classes[0][1] >= IMBALANCED * len(raw):
        detail = f"{classes[0][1] / len(raw):.1%} of the rows are {classes[0][0]!r}: accuracy says little, auc more"
        found.append(Finding("imbalance", name, detail, NOTED))
    if len(classes) > 2 and not asked and is_number(raw.target):
        detail = f"{len(classes)} different numbers, read as classes; --task-type regression reads them as numbers"
        found.append(Finding("task type", name, detail, NOTED))
    return found


def few_rows(raw: RawDataset, parts: Split[np.ndarray]) -> list[Finding]:
    """A table that is too small for scores to mean much."""
    if len(raw) >= FEW_ROWS:
        return []
    detail = f"{len(raw)} rows; scores of {len(parts.validation)} validation and {len(parts.test)} test rows are rough"
    return [Finding("few rows", "", detail, NOTED)]
