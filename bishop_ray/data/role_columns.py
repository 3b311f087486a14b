"""Weights, groups and points in time of the rows, read from the columns that `Roles` names."""

from __future__ import annotations

import difflib
import logging
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.data.columns import category_codes, is_number, to_numbers
from bishop_ray.data.moments import is_moment
from bishop_ray.data.roles import Roles
from bishop_ray.data.table import RawDataset
from bishop_ray.errors import BadTable, UnknownName, UserError

logger = logging.getLogger(__name__)


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
