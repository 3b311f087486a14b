"""Examination of a table before training: findings on columns, target, names and leakage."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.data.doctor.checks import (
    class_counts,
    column_findings,
    constants,
    few_rows,
    missing_target,
    name_findings,
    target_findings,
)
from bishop_ray.data.doctor.findings import (
    DROPPED,
    ENCODED,
    NOTED,
    REFUSED,
    Coded,
    ColumnFacts,
    Finding,
    TableReport,
    coded,
)
from bishop_ray.data.doctor.leakage import copies, leaks
from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.refs import NO_ROLES, Roles
from bishop_ray.data.schema import make_raw, with_roles
from bishop_ray.data.split import DATASETS_I, SplitProtocol, split_indices
from bishop_ray.data.table import RawDataset, Split
from bishop_ray.errors import BadTable, UserError

MOST_CELLS = 2_000_000
"""Size of a table up to which a search looks at all of it before it begins; of a larger one at evenly spaced rows."""


def examine(
    frame: pd.DataFrame,
    target: str,
    *,
    task_type: str = "",
    categorical: Iterable[str] | None = None,
    name: str = "table",
    where: str = "",
    seed: int = 0,
    split: SplitProtocol = DATASETS_I,
    roles: Roles = NO_ROLES,
) -> TableReport:
    """Looks at a whole table as a search would read it.

    Args:
        frame: All columns, the target among them, with names and dtypes of any kind.
        target: Name of the target column.
        task_type: As `make_raw`.
        categorical: As `make_raw`.
        name: The table's name.
        where: What messages call it (a path); `name` by default.
        seed: Of the split.
        split: How rows are split.
        roles: Columns of weights, groups or time.

    Returns:
        The report. A table that cannot be trained on is no error here: ``TableReport.refused`` has the line.
    """
    found = name_findings(list(frame.columns))
    try:
        raw = with_roles(make_raw(name, frame, target, task_type, categorical, where), roles, where)
    except UserError as error:
        return TableReport(name, target, findings=(*found, _refusal(str(error))), refused=str(error))
    classes = class_counts(raw.target) if raw.task.is_classification else ()
    found += missing_target(frame.set_axis([str(c) for c in frame.columns], axis=1)[target], len(raw))
    found += target_findings(raw, classes, asked=bool(task_type))
    columns: list[Coded] = []
    parts, fitted, refused = None, None, ""
    try:
        columns = coded(raw)
        parts = split_indices(raw, seed, split.fractions, split.max_rows)
        fitted = Preprocessor.fit(raw.rows(parts.train))
    except BadTable as error:
        refused = f"{where}: {error}" if where else str(error)
    found += _of_columns(raw, columns, fitted)
    if parts is not None and fitted is not None:
        found += few_rows(raw, parts) + _misleading(raw, columns, parts)
    if refused:
        found.append(_refusal(refused))
    facts = _facts(columns, fitted)
    return TableReport(name, target, raw.task.value, len(raw), classes, facts, tuple(_ordered(found)), refused)


def warnings_of(train: RawDataset, validation: RawDataset, most_cells: int = MOST_CELLS) -> list[Finding]:
    """What a person should know before a search begins: leaks, repeated rows, ids. No test row is looked at.

    Args:
        train: Training rows: a leak is learnt on them.
        validation: Validation rows: it must hold on them.
        most_cells: Of a larger table, evenly spaced rows are looked at; repeated rows are not looked for then.
    """
    both = [_thinned(part, most_cells // max(train.frame.shape[1], 1)) for part in (train, validation)]
    raw = both[0].joined(both[1])
    frame, target = raw.frame, raw.target
    columns = coded(raw)
    learn, check = np.arange(len(both[0])), np.arange(len(both[0]), len(raw))
    found = leaks(columns, target, raw.task.is_classification, learn, check)
    if len(raw) == len(train) + len(validation):
        found += [f for f in copies(columns, target, learn, check) if f.action != NOTED]
    for column in columns:
        found += [f for f in column_findings(frame[column.name], column, ENCODED) if f.kind == "id-like"]
    return found


def _thinned(part: RawDataset, most: int) -> RawDataset:
    step = -(-len(part) // max(most, 1000))
    return part if step <= 1 else part.rows(np.arange(0, len(part), step, dtype=np.int64))


def _refusal(line: str) -> Finding:
    return Finding("refused", "", line, REFUSED)


def _of_columns(raw: RawDataset, columns: list[Coded], fitted: Preprocessor | None) -> list[Finding]:
    dropped = fitted.dropped if fitted else ()
    found = constants(columns, dropped, DROPPED if fitted else NOTED)
    for column in columns:
        action = NOTED if fitted is None else DROPPED if column.name in dropped else ENCODED
        found += column_findings(raw.frame[column.name], column, action)
    return found


def _misleading(raw: RawDataset, columns: list[Coded], parts: Split[NDArray[np.int64]]) -> list[Finding]:
    scored = np.concatenate([parts.validation, parts.test])
    found = leaks(columns, raw.target, raw.task.is_classification, parts.train, scored)
    return found + copies(columns, raw.target, parts.train, scored)


def _facts(columns: list[Coded], fitted: Preprocessor | None) -> tuple[ColumnFacts, ...]:
    kinds = dict(fitted.schema) | dict.fromkeys(fitted.dropped, DROPPED) if fitted else {}
    return tuple(
        ColumnFacts(c.name, c.dtype, kinds.get(c.name, ""), c.distinct, c.missing, c.infinite) for c in columns
    )


def _ordered(found: list[Finding]) -> list[Finding]:
    """What a person must look at first, what is only said last."""
    order = (REFUSED, "warned", DROPPED, ENCODED, NOTED)
    return sorted(found, key=lambda finding: order.index(finding.action))
