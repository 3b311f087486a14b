"""Tables of any shape, learnable, the same for the same arguments."""

from __future__ import annotations

import numpy as np
import pandas as pd

from bishop_ray.data.table import RawDataset, TaskType

LEVELS = ("blue", "green", "red", "white")
UNSEEN = "never seen"


def make_table(
    task: TaskType | str = TaskType.BINARY,
    n_num: int = 3,
    n_cat: int = 2,
    rows: int = 120,
    with_missing: bool = False,
    with_unseen_category: bool = False,
    seed: int = 0,
    *,
    classes: int = 3,
    with_constant: bool = False,
) -> RawDataset:
    """A table whose target follows from its columns `num_0..` and `cat_0..`.

    Args:
        task: Binary ("no"/"yes"), multiclass ("a", "b", ...) or regression (float, mean about 50).
        n_num: Numerical columns.
        n_cat: Categorical columns of four levels.
        rows: Rows; every class is present from twice as many rows on.
        with_missing: Every column lacks about a tenth of its values, the first row all of them.
        with_unseen_category: The last row of every categorical column holds `UNSEEN`, a level found nowhere else:
            transform such a table with a preprocessor that was fitted on one without.
        seed: Of the values.
        classes: Classes of a multiclass target.
        with_constant: One more column ``constant`` of sevens, numerical.
    """
    rng = np.random.default_rng(seed)
    signal = np.zeros(rows)
    columns: dict[str, pd.Series] = {}
    for i in range(n_num):
        values = rng.normal(10.0 * i, 1.0 + i, rows)
        signal += (values - 10.0 * i) / (1.0 + i)
        columns[f"num_{i}"] = pd.Series(values)
    for i in range(n_cat):
        codes = rng.integers(0, len(LEVELS), rows)
        signal += (codes - 1.5) / 1.1
        columns[f"cat_{i}"] = pd.Series(np.array(LEVELS, dtype=object)[codes], dtype="str")
    signal = signal / max(n_num + n_cat, 1) ** 0.5 + rng.normal(0, 0.1, rows)
    frame = pd.DataFrame(columns)
    for name in frame.columns if with_missing else ():
        hole = rng.random(rows) < 0.1
        hole[:1] = True
        frame.loc[hole, name] = None
    if with_unseen_category:
        for i in range(n_cat):
            frame.loc[rows - 1, f"cat_{i}"] = UNSEEN
    if with_constant:
        frame["constant"] = 7.0
    return RawDataset(
        "fake", frame, _target(TaskType(task), signal, classes), TaskType(task), tuple(f"cat_{i}" for i in range(n_cat))
    )


def _target(task: TaskType, signal: np.ndarray, classes: int) -> pd.Series:
    if task is TaskType.REGRESSION:
        return pd.Series(50.0 + 20.0 * signal, name="y")
    labels = ("no", "yes") if task is TaskType.BINARY else tuple("abcdefghijklmnopqrstuvwxyz"[:classes])
    ranks = signal.argsort(kind="stable").argsort(kind="stable")
    return pd.Series(np.array(labels, dtype=object)[ranks * len(labels) // len(signal)], name="y", dtype="str")
