"""Inference of the task type and of column kinds; columns of weights, groups and time."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.data.columns import category_codes, is_number, to_numbers
from bishop_ray.data.datetimes import as_dates, is_moment, is_text, reads_two_ways
from bishop_ray.data.refs import TASK_TYPES, Roles
from bishop_ray.data.table import RawDataset, TaskType
from bishop_ray.errors import BadTable, UnknownName, UserError

logger = logging.getLogger(__name__)
MAX_INFERRED_CLASSES = 20
"""A numeric target with more distinct values than this is a regression target unless the user says otherwise."""


def make_raw(
    name: str,
    frame: pd.DataFrame,
    target: str,
    task_type: str = "",
    categorical: Iterable[str] | None = None,
    where: str = "",
) -> RawDataset:
    """A dataset of `frame`, with its target split off.

    Args:
        name: The dataset's name.
        frame: All columns, of any dtype and with names of any type (they become text).
        target: Name of the target column.
        task_type: One of `TASK_TYPES`, or "" to infer it (`infer_task`).
        categorical: Columns known to be categories; text, booleans and pandas categories are so anyway.
        where: What messages call the table: a path, a task; `name` by default.

    Raises:
        UnknownName: No such target column, or no such task type.
        BadTable: Two columns of one name, no rows, no feature column, a target that is all missing, has one value
            only or does not fit the task type.
    """
    where = where or name
    frame = frame.set_axis([str(column) for column in frame.columns], axis=1).reset_index(drop=True)
    _check_columns(frame, target, where)
    frame, values = _with_target(frame.drop(columns=target), frame[target], where)
    task = infer_task(values, task_type, where)
    if task is TaskType.REGRESSION:
        values = pd.Series(to_numbers(values), name=target)
        finite = np.isfinite(values.to_numpy())
        if not finite.all():
            logger.warning("%s: dropped %d rows with an infinite target %r", where, int((~finite).sum()), target)
            frame, values = frame[finite].reset_index(drop=True), values[finite].reset_index(drop=True)
        if values.nunique() < 2:
            raise BadTable(f"{where}: target column {target!r} needs at least two different values; found one")
    known = set(categorical or ())
    frame = _with_dates(frame, known, where)
    names = tuple(c for c in frame.columns if c in known or _is_categorical(frame[c]))
    return RawDataset(name, frame, values, task, names)


def infer_task(target: pd.Series, task_type: str = "", where: str = "") -> TaskType:
    """The task type of a target column without missing values.

    Inferred: text, booleans and categories are classes. Numbers are classes when they take at most
    `MAX_INFERRED_CLASSES` values and are whole (`1.0` is whole), or take each value twice on average.

    Args:
        target: The target column.
        task_type: One of `TASK_TYPES`, or "" to infer it.
        where: The table's name in messages.

    Raises:
        UnknownName: No such task type.
        BadTable: The target does not fit the task type, has one class only, or holds dates.
    """
    if task_type and task_type not in TASK_TYPES:
        raise UnknownName("task type", task_type, TASK_TYPES)
    column = f"{where}: target column {target.name!r}".removeprefix(": ")
    if is_moment(target):
        raise BadTable(f"{column} holds dates; expected classes or numbers")
    if task_type == "regression":
        try:
            to_numbers(target)
        except BadTable as error:
            raise BadTable(f"{column} cannot be a regression target: {error}") from None
        return TaskType.REGRESSION
    if not task_type and is_number(target) and not _looks_like_classes(target):
        return TaskType.REGRESSION
    texts = category_codes(target)[1]
    classes = len(texts)
    if not task_type and classes > MAX_INFERRED_CLASSES and is_text(target) and as_dates(target) is not None:
        raise BadTable(f"{column} holds dates; expected classes or numbers")
    if classes < 2:
        raise BadTable(f"{column} needs at least two classes; found one: {next(iter(texts), None)!r}")
    if task_type == "binary" and classes != 2:
        raise BadTable(f"{column} needs two classes for the task type binary; found {classes}")
    if task_type == "multiclass" and classes < 3:
        raise BadTable(f"{column} needs three classes or more for the task type multiclass; found {classes}")
    return TaskType.BINARY if classes == 2 else TaskType.MULTICLASS


def _looks_like_classes(target: pd.Series) -> bool:
    values = to_numbers(target)
    distinct = len(np.unique(values))
    whole = bool((np.isfinite(values) & (np.floor(values) == values)).all())
    return distinct <= MAX_INFERRED_CLASSES and (whole or distinct * 2 <= len(values))


def _check_columns(frame: pd.DataFrame, target: str, where: str) -> None:
    names = list(frame.columns)
    if not names:
        raise BadTable(f"{where}: expected columns; found none")
    twice = frame.columns[frame.columns.duplicated()]
    if len(twice):
        raise BadTable(f"{where}: column {twice[0]!r} comes {names.count(twice[0])} times; expected unique names")
    if target not in names:
        # a wide table: the message stays one readable line
        near = names if len(names) <= 20 else difflib.get_close_matches(target, names, n=10, cutoff=0.0)
        raise UnknownName(f"target column of {where}:", target, near)
    if len(frame) == 0:
        raise BadTable(f"{where}: expected rows; found none")
    if len(names) < 2:
        raise BadTable(f"{where}: expected a feature column beside the target {target!r}; found none")


def _with_target(frame: pd.DataFrame, target: pd.Series, where: str) -> tuple[pd.DataFrame, pd.Series]:
    """The rows whose target is known; blank text counts as missing."""
    missing = target.isna()
    if is_text(target):
        missing |= target.map(lambda value: isinstance(value, str) and not value.strip()).astype(bool)
    if missing.all():
        raise BadTable(f"{where}: target column {target.name!r} is all missing")
    if missing.any():
        logger.warning("%s: dropped %d rows without a target (%r)", where, int(missing.sum()), target.name)
        frame, target = frame[~missing].reset_index(drop=True), target[~missing].reset_index(drop=True)
    return frame, target


def _with_dates(frame: pd.DataFrame, known: set[str], where: str) -> pd.DataFrame:
    """Columns of dates as text, as categories of text or as Python's own, read; others as they are."""
    read: dict[str, pd.Series] = {}
    unclear: list[str] = []
    for name in frame.columns:
        if name in known:
            continue
        if (dates := as_dates(frame[name])) is not None:
            read[name], bad = dates
            if bad:
                logger.warning(
                    "%s: column %r holds dates; took %d values as missing that are none, such as %r",
                    where, name, len(bad), bad[0],
                )  # fmt: skip
        elif example := reads_two_ways(frame[name]):
            unclear.append(f"{name!r} ({example})")
    if unclear:
        logger.warning(
            "%s: left as text, because day and month cannot be told apart: %s; write dates as 2024-01-31",
            where, ", ".join(unclear[:10]) + (", ..." if len(unclear) > 10 else ""),
        )  # fmt: skip
    frame = frame.copy(deep=False)
    for name, column in read.items():  # not assign(**read): a column may be called "self"
        frame[name] = column
    return frame


def _is_categorical(series: pd.Series) -> bool:
    if is_number(series) or is_moment(series):
        return False
    if not is_text(series):
        return True
    known = series.dropna()
    if not len(known) or any(isinstance(value, bool | np.bool_) for value in known):
        return True
    try:
        to_numbers(known)
    except BadTable:
        return True
    return False


def with_roles(raw: RawDataset, roles: Roles, where: str = "") -> RawDataset:
    """The dataset with what the named columns say of its rows.

    Columns of weights and of groups are no features. A column of time is one, unless it is a number that no two rows
    share: a counter or a clock, of which later rows have values that no model has seen.

    Args:
        raw: A dataset with all columns as features.
        roles: The columns; without any, the dataset comes back as it is.
        where: What messages call the table; its name by default.

    Raises:
        UnknownName: No such column.
        UserError: A named column is the target, or classes are to be balanced in a regression.
        BadTable: Missing values, weights that are none, text that is no point in time, no feature left.
    """
    if not roles:
        return raw
    where = where or raw.name
    if roles.balance and not raw.task.is_classification:
        raise UserError(f"{where}: --balance needs classes; found a regression of {raw.target.name!r}")
    for flag, name in roles.columns().items():
        _check(raw, flag, name, where)
    named = {flag: f"{where}: {flag}: column {name!r}" for flag, name in roles.columns().items()}
    weights = _weights(raw.frame[roles.weights], named["--weights"]) if roles.weights else None
    groups = _groups(raw.frame[roles.groups], named["--groups"]) if roles.groups else None
    time = _time(raw.frame[roles.time], named["--time"]) if roles.time else None
    gone = {name for name in (roles.weights, roles.groups) if name}
    if time is not None and not is_moment(raw.frame[roles.time]) and len(np.unique(time)) == len(time):
        gone.add(roles.time)
        logger.info("%s only orders the rows: no two share a value, so it is no feature", named["--time"])
    frame = raw.frame.drop(columns=list(gone))
    if not len(frame.columns):
        raise BadTable(f"{where}: expected a feature column beside {', '.join(map(repr, sorted(gone)))}; found none")
    categorical = tuple(name for name in raw.categorical if name not in gone)
    return replace(raw, frame=frame, categorical=categorical, weights=weights, groups=groups, time=time)


def _check(raw: RawDataset, flag: str, name: str, where: str) -> None:
    if name == str(raw.target.name):
        raise UserError(f"{where}: {flag}: expected a column beside the target; found the target {name!r}")
    names = list(raw.frame.columns)
    if name not in names:
        # a wide table: the message stays one readable line
        near = names if len(names) <= 20 else difflib.get_close_matches(name, names, n=10, cutoff=0.0)
        raise UnknownName(f"{flag} column of {where}:", name, near)


def _weights(series: pd.Series, named: str) -> NDArray[np.float64]:
    """(R,) finite, >= 0, not all 0."""
    if is_moment(series):
        raise BadTable(f"{named}: expected weights >= 0; found dates")
    try:
        values = to_numbers(series)
    except BadTable as error:
        raise BadTable(f"{named}: expected weights >= 0; {_after(error)}") from None
    if missing := int(np.isnan(values).sum()):
        raise BadTable(f"{named}: expected a weight in every row; found {missing} missing of {len(values)}")
    bad = ~(np.isfinite(values) & (values >= 0))
    if bad.any():
        raise BadTable(f"{named}: expected weights >= 0, all finite; found {values[np.argmax(bad)]:g}")
    if not values.any():
        raise BadTable(f"{named}: expected a weight above 0; found {len(values)} of 0")
    return values


def _groups(series: pd.Series, named: str) -> NDArray[np.int64]:
    """(R,) codes in order of appearance. A row without a group is refused: it might belong to any of them."""
    codes, texts = category_codes(series)
    blank = np.array([not text.strip() for text in texts] + [True])  # the last entry answers code -1
    if missing := int(blank[codes].sum()):
        raise BadTable(f"{named}: expected a group in every row; found {missing} missing of {len(codes)}")
    return codes


def _time(series: pd.Series, named: str) -> NDArray[np.float64]:
    """(R,) seconds since 1970, or the numbers of a column of numbers."""
    values = None
    for moment in (True,) if is_moment(series) else (False, True):
        try:
            values = to_numbers(series, moment)
            break
        except BadTable as error:
            found = _after(error)
    if values is None:
        raise BadTable(f"{named}: expected dates (such as 2024-01-31) or numbers in every row; {found}")
    if missing := int((~np.isfinite(values)).sum()):
        what = "number" if is_number(series) else "date"
        raise BadTable(f"{named}: expected a {what} in every row; found {missing} missing of {len(values)}")
    return values


def _after(error: Exception) -> str:
    return "found" + str(error).rpartition("; found")[2]
