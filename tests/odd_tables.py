"""Odd tables, as people have them, and the way of each from a frame to predictions of a loaded model.

A table follows from its number alone: which kinds of columns it has, what is missing, how columns are called, its size
and its target. `journey` is what a user does with it; it gives how that ended, and never raises.
"""

from __future__ import annotations

import datetime
import decimal
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from bishop_ray.config import TrainConfig
from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.schema import make_raw
from bishop_ray.data.split import split_dataset
from bishop_ray.errors import UserError
from bishop_ray.models import create_model, model_class
from bishop_ray.models.base import Network
from bishop_ray.predictor import Predictor
from bishop_ray.training.fit_estimator import fit_estimator
from bishop_ray.training.loop import fit_network

Array = np.ndarray[Any, Any]
Make = Callable[[np.random.Generator, int], Any]

TABLE: Counter[tuple[str, str, str]] = Counter()
"""(aspect, kind, ending) -> tables; printed at the end of the test session."""
ERRORS: Counter[str] = Counter()
"""Messages of refused tables, without their numbers."""

MODELS: dict[str, dict[str, Any]] = {
    "bishop": {
        "d_embedding": 4, "stride": 4, "n_pool": 2, "d_model": 8, "d_ff": 8, "n_heads": 2, "n_encoder_levels": 2,
        "n_decoded": 4,
    },
    "xgboost": {"n_rounds": 4, "patience": 4},
    "mlp": {"n_blocks": 1, "d_block": 8},
}  # fmt: skip
"""Small models: what is tried is the way of the data."""

LEVELS = np.array(["blue", "green", "red", "white"], dtype=object)
DAYS = np.array([str(d.date()) for d in pd.date_range("2019-11-30", periods=900)], dtype=object)


def _pick(rng: np.random.Generator, rows: int, values: Any) -> Array:
    return np.asarray(values)[rng.integers(0, len(values), rows)]


def _objects(values: Any) -> pd.Series:
    return pd.Series(list(values), dtype=object)


def _mixed(rng: np.random.Generator, rows: int) -> pd.Series:
    pool = [1, 1.0, "1", "a", True, None, 2.5, b"raw", ("x", 1), decimal.Decimal("2.50"), "", datetime.date(2024, 1, 1)]
    return _objects(pool[int(i)] for i in rng.integers(0, len(pool), rows))


COLUMNS: dict[str, Make] = {
    "float": lambda g, r: g.normal(5, 3, r),
    "whole float": lambda g, r: g.integers(0, 9, r).astype(float),
    "float32": lambda g, r: g.normal(5, 3, r).astype(np.float32),
    "int": lambda g, r: g.integers(-50, 50, r),
    "uint8": lambda g, r: g.integers(0, 256, r).astype(np.uint8),
    "large int": lambda g, r: g.integers(10**17, 10**18, r),
    "Int64": lambda g, r: pd.array(g.integers(0, 9, r), "Int64"),
    "Float32": lambda g, r: pd.array(g.normal(0, 1, r).astype(np.float32), "Float32"),
    "huge float": lambda g, r: g.choice([1e300, -1e300, 1e-300, 0.0], r),
    "infinities": lambda g, r: g.choice([np.inf, -np.inf, 1.0, 2.0, 3.0], r),
    "decimals": lambda g, r: _objects(decimal.Decimal(int(v)) / 4 for v in g.integers(0, 99, r)),
    "digits as text": lambda g, r: _pick(g, r, np.array(["1", "2.5", " 3 ", "-4e1"], dtype=object)),
    "zip codes": lambda g, r: _pick(g, r, np.array(["01234", "90210", "SW1A 1AA", "10115"], dtype=object)),
    "bool": lambda g, r: g.random(r) < 0.5,
    "boolean": lambda g, r: pd.array(g.random(r) < 0.5, "boolean"),
    "bool objects": lambda g, r: _objects(bool(v) for v in g.random(r) < 0.5),
    "yes, no": lambda g, r: _pick(g, r, np.array(["yes", "no"], dtype=object)),
    "text": lambda g, r: _pick(g, r, LEVELS),
    "string": lambda g, r: pd.array(_pick(g, r, LEVELS), "string"),
    "string[pyarrow]": lambda g, r: pd.array(_pick(g, r, LEVELS), "string[pyarrow]"),
    "category": lambda g, r: pd.Categorical(_pick(g, r, LEVELS), [*LEVELS, "never"]),
    "ordered category": lambda g, r: pd.Categorical(_pick(g, r, LEVELS), LEVELS, ordered=True),
    "category of ints": lambda g, r: pd.Categorical(g.integers(1, 5, r)),
    "category of floats": lambda g, r: pd.Categorical(g.integers(1, 5, r) / 2),
    "category of bools": lambda g, r: pd.Categorical(g.random(r) < 0.5),
    "mixed types": _mixed,
    "lists": lambda g, r: _objects([int(v)] for v in g.integers(0, 4, r)),
    "odd texts": lambda g, r: _pick(g, r, np.array(["Москва", "🎈", "a\nb", '"x",', " ", "\x00", "x" * 999], object)),
    "ids": lambda g, r: np.array([f"id-{v:06d}" for v in g.permutation(r)], dtype=object),
    "free text": lambda g, r: _objects(" ".join(g.choice(LEVELS, 5)) for _ in range(r)),
    "complex": lambda g, r: g.normal(size=r) + 1j,
    "datetime": lambda g, r: pd.to_datetime(_pick(g, r, DAYS)),
    "datetime[s], far": lambda g, r: _pick(g, r, np.array(["0800-12-25", "9999-12-31", "2024-01-01"], "datetime64[s]")),
    "datetime, zone": lambda g, r: pd.to_datetime(_pick(g, r, DAYS)).tz_localize("Asia/Kathmandu"),
    "date objects": lambda g, r: _objects(datetime.date.fromisoformat(d) for d in _pick(g, r, DAYS)),
    "date text": lambda g, r: _pick(g, r, DAYS),
    "date string": lambda g, r: pd.array(_pick(g, r, DAYS), "string"),
    "date category": lambda g, r: pd.Categorical(_pick(g, r, DAYS)),
    "time stamps": lambda g, r: _objects(
        f"{d}T{h:02d}:30:00+02:00" for d, h in zip(_pick(g, r, DAYS), g.integers(0, 24, r), strict=True)
    ),
    "two-way dates": lambda g, r: _pick(g, r, np.array(["01/02/2024", "03/04/2024"], dtype=object)),
    "years": lambda g, r: _pick(g, r, np.array(["2019", "2020", "2021"], dtype=object)),
    "times of day": lambda g, r: _objects(datetime.time(int(h)) for h in g.integers(0, 24, r)),
    "duration": lambda g, r: pd.to_timedelta(g.integers(0, 999, r), unit="min"),
    "period": lambda g, r: pd.PeriodIndex(pd.to_datetime(_pick(g, r, DAYS)), freq="M"),
    "interval": lambda g, r: pd.cut(g.random(r), [-1, 0.3, 0.6, 2]),
    "sparse": lambda g, r: pd.arrays.SparseArray(g.integers(0, 2, r).astype(float)),
    "int64[pyarrow]": lambda g, r: pd.array(g.integers(0, 9, r), "int64[pyarrow]"),
    "bool[pyarrow]": lambda g, r: pd.array(g.random(r) < 0.5, "bool[pyarrow]"),
    "date32[pyarrow]": lambda g, r: pd.Series(pd.to_datetime(_pick(g, r, DAYS))).astype("date32[pyarrow]"),
    "constant": lambda g, r: np.full(r, 7),
    "all missing": lambda g, r: np.full(r, np.nan),
    "all missing category": lambda g, r: pd.Categorical([None] * r, ["a"]),
}

TARGETS: dict[str, tuple[Make, str]] = {
    "str": (lambda g, r: pd.array(_pick(g, r, ["no", "yes"]), "str"), "classes"),
    "object": (lambda g, r: _pick(g, r, LEVELS), "classes"),
    "string": (lambda g, r: pd.array(_pick(g, r, LEVELS[:3]), "string"), "classes"),
    "bool": (lambda g, r: g.random(r) < 0.5, "classes"),
    "boolean": (lambda g, r: pd.array(g.random(r) < 0.5, "boolean"), "classes"),
    "category": (lambda g, r: pd.Categorical(_pick(g, r, LEVELS), [*LEVELS, "never"]), "classes"),
    "ordered category": (lambda g, r: pd.Categorical(_pick(g, r, LEVELS), LEVELS[::-1], ordered=True), "classes"),
    "category of ints": (lambda g, r: pd.Categorical(_pick(g, r, [10, 9, 300])), "classes"),
    "int with gaps": (lambda g, r: _pick(g, r, [3, 70, -5]), "classes"),
    "Int64": (lambda g, r: pd.array(_pick(g, r, [0, 1]), "Int64"), "classes"),
    "uint8": (lambda g, r: _pick(g, r, np.array([1, 200], np.uint8)), "classes"),
    "whole float": (lambda g, r: _pick(g, r, [1.0, 2.0]), "classes"),
    "odd labels": (lambda g, r: _pick(g, r, np.array(['a:"[]{},', "да", "🎈"], dtype=object)), "classes"),
    "rare class": (lambda g, r: np.where(np.arange(r) == 0, "rare", _pick(g, r, ["a", "b"])), "classes"),
    "float": (lambda g, r: g.normal(1e6, 3e4, r), "number"),
    "many ints": (lambda g, r: g.permutation(r) * 3, "number"),
    "Float64": (lambda g, r: pd.array(g.normal(0, 1e-6, r), "Float64"), "number"),
    "float with infinity": (lambda g, r: np.where(np.arange(r) % 9 == 4, np.inf, g.normal(0, 1, r)), "number"),
    "some missing": (lambda g, r: pd.Series(_pick(g, r, LEVELS)).mask(g.random(r) < 0.2), "classes"),
    "missing floats": (lambda g, r: pd.Series(g.normal(0, 1, r)).mask(g.random(r) < 0.2), "number"),
    "constant": (lambda g, r: np.full(r, "one", dtype=object), "refused"),
    "all missing": (lambda g, r: np.full(r, np.nan), "refused"),
    "dates": (lambda g, r: pd.to_datetime(_pick(g, r, DAYS)), "refused"),
}

NAMES: dict[str, Callable[[int], Any]] = {
    "plain": lambda i: f"column_{i}",
    "JSON signs": lambda i: f'{i}:"[]{{}},\\',
    "Cyrillic": lambda i: f"столбец {i}",
    "emoji": lambda i: "🎈" * (i + 1),
    "spaces": lambda i: " " * (i + 1),
    "empty first": lambda i: f"{i}" if i else "",
    "ints": lambda i: i,
    "tuples": lambda i: ("level", i),
    "floats, None": lambda i: None if i == 1 else i + 0.5,
    "line breaks": lambda i: f"a\n\t{i}",
    "SQL, HTML": lambda i: f"'; DROP TABLE x; --<script>{i}</script>",
    "long": lambda i: f"{i}" + "x" * 500,
    "twice": lambda i: f"column_{i % 2}",
    "1 and '1'": lambda i: (1, "1")[i] if i < 2 else f"c{i}",
}
MISSING = ("none", "a tenth", "half", "first row", "a row without anything", "in training only")
ROWS = (40, 60, 30, 90, 150, 40, 12, 60, 40, 90, 4, 40, 60, 300, 30, 90, 40, 60, 120, 40)


@dataclass(frozen=True)
class OddTable:
    """A table and what is odd about it.

    Attributes:
        kinds: Of the columns, in order.
        missing: One of `MISSING`.
        names: A key of `NAMES`.
        target_kind: A key of `TARGETS`.
        target: Name of the target column, somewhere among the others.
        frame: All columns.
    """

    number: int
    kinds: tuple[str, ...]
    missing: str
    names: str
    target_kind: str
    target: Any
    frame: pd.DataFrame

    @property
    def must_fail(self) -> bool:
        """Whether no model can be trained on it, whatever else it is."""
        return self.names in ("twice", "1 and '1'") or TARGETS[self.target_kind][1] == "refused"


def odd_table(number: int) -> OddTable:
    """The table of a number: the same everywhere. Every kind of everything comes up within 60 numbers."""
    rng = np.random.default_rng(number)
    kinds = list(COLUMNS)
    rows = ROWS[number % len(ROWS)]
    count = int(rng.integers(2, 7))
    chosen = [kinds[number % len(kinds)], *(kinds[int(i)] for i in rng.integers(0, len(kinds), count - 1))]
    names, target_kind = list(NAMES)[number % len(NAMES)], list(TARGETS)[number % len(TARGETS)]
    # refused whatever else they are: a few are enough
    if names in ("twice", "1 and '1'") and number % 5:
        names = "plain"
    if TARGETS[target_kind][1] == "refused" and number % 4:
        target_kind = "str"
    missing = MISSING[number % len(MISSING)]
    columns = [_with_missing(pd.Series(COLUMNS[kind](rng, rows)), missing, rng) for kind in chosen]
    place = int(rng.integers(0, len(columns) + 1))
    columns.insert(place, pd.Series(TARGETS[target_kind][0](rng, rows)))
    frame = pd.concat(columns, axis=1)
    labels = [NAMES[names](i) for i in range(len(columns))]
    # an Index of tuples would become a MultiIndex
    frame.columns = pd.Index(labels, dtype=object, tupleize_cols=False)
    frame.index = pd.Index(rng.permutation(rows) * 3, name="key")
    return OddTable(number, tuple(chosen), missing, names, target_kind, str(labels[place]), frame)


def _with_missing(column: pd.Series, missing: str, rng: np.random.Generator) -> pd.Series:
    rows = len(column)
    holes = {
        "none": np.zeros(rows, bool),
        "a tenth": rng.random(rows) < 0.1,
        "half": rng.random(rows) < 0.5,
        "first row": np.arange(rows) == 0,
        "a row without anything": np.arange(rows) == rows // 2,
        "in training only": np.arange(rows) % 7 == 3,
    }[missing]
    if not holes.any() or isinstance(column.dtype, pd.SparseDtype):
        return column
    if column.dtype.kind in "biu" and isinstance(column.dtype, np.dtype):
        column = column.astype(float if column.dtype.kind in "iu" else object)
    return column.mask(holes)


def journey(table: OddTable, model: str, folder: Path) -> str:
    """How it ended: "result", "refused: ..." with the one line a user sees, "broken: ..." for everything else."""
    try:
        _travel(table, model, folder)
        return "result"
    except UserError as error:
        line = str(error)
        return f"refused: {line}" if line and "\n" not in line else f"broken: more than a line: {line!r}"
    except Exception:  # whatever it is, it is the finding
        return f"broken: {traceback.format_exc()}"


def note(table: OddTable, model: str, ending: str) -> None:
    """Counts an ending under all that is odd about the table."""
    short = ending.partition(":")[0]
    TABLE["model", model, short] += 1
    for kind in set(table.kinds):
        TABLE["column", kind, short] += 1
    TABLE["target", table.target_kind, short] += 1
    TABLE["names", table.names, short] += 1
    TABLE["missing", table.missing, short] += 1
    TABLE["rows", str(len(table.frame)), short] += 1


def summary() -> list[str]:
    """Counts of endings by kind, and the refusals, as lines of a table."""
    lines = ["| what | kind | result | refused | broken |", "|---|---|---|---|---|"]
    for what, kind in sorted({key[:2] for key in TABLE}):
        counts = " | ".join(str(TABLE[what, kind, ending]) for ending in ("result", "refused", "broken"))
        lines.append(f"| {what} | {kind} | {counts} |")
    return lines + [f"{count} x {message}" for message, count in ERRORS.most_common(12)]


def train(frame: pd.DataFrame, target: str, model: str) -> tuple[Predictor, int]:
    """A fitted predictor of a user's frame, and how many rows were read."""
    raw = make_raw("odd", frame, target)
    raw.fingerprint()
    parts = split_dataset(raw, 0)
    preprocessor = Preprocessor.fit(parts.train, model_class(model).numeric)
    tables = preprocessor.transform(parts.train), preprocessor.transform(parts.validation)
    torch.manual_seed(0)
    network = create_model(model, preprocessor.spec, MODELS[model])
    metric = "accuracy" if raw.task.is_classification else "rmse"
    if isinstance(network, Network):
        config = TrainConfig(max_epochs=1, batch_size=128, lr=1e-3, metric=metric)
        fit_network(network, *tables, config, lambda report: False, target_scale=preprocessor.target.scale)
    else:
        network.n_threads = 1
        fit_estimator(network, *tables, metric, lambda report: False, target_scale=preprocessor.target.scale)
    return Predictor(preprocessor, network, model, MODELS[model]), len(raw)


def _travel(table: OddTable, model: str, folder: Path) -> None:
    fitted, read = train(table.frame, table.target, model)
    wanted = table.frame.iloc[:, [str(c) for c in table.frame.columns].index(table.target)]
    known = wanted.notna()
    if not fitted.task.is_classification:
        known &= np.isfinite(wanted.to_numpy(np.float64, na_value=np.nan))
    assert read == int(known.sum()), f"read {read} of {int(known.sum())} rows with a target"
    loaded = Predictor.load(fitted.save(folder))
    expected = fitted.predict(table.frame)
    _same(loaded.predict(table.frame), expected)
    assert expected.index.equals(table.frame.index)
    assert not expected.isna().any()
    if fitted.task.is_classification:
        _check_labels(loaded, table.frame, wanted, expected)
    for rows in (0, 1):
        _same(loaded.predict(table.frame.head(rows)), expected.head(rows))
    _check_other_frames(loaded, table.frame, table.target, expected)


def _same(found: pd.Series, expected: pd.Series) -> None:
    """Labels are equal, numbers nearly: how many rows are computed at once may change their last digits."""
    if isinstance(expected.dtype, np.dtype) and expected.dtype.kind == "f":
        np.testing.assert_allclose(found.to_numpy(), expected.to_numpy(), rtol=1e-4)
        assert found.index.equals(expected.index)
    else:
        pd.testing.assert_series_equal(found, expected)


def _check_labels(loaded: Predictor, frame: pd.DataFrame, wanted: pd.Series, predicted: pd.Series) -> None:
    assert predicted.dtype == wanted.dtype, f"labels of {wanted.dtype} came back as {predicted.dtype}"
    values = set(wanted.dropna().tolist())
    assert set(predicted.tolist()) <= values
    proba = loaded.predict_proba(frame)
    assert set(proba.columns) <= values
    assert {type(c) for c in proba.columns} <= {type(v) for v in values}
    np.testing.assert_allclose(proba.sum(axis=1), 1.0, atol=1e-5)
    likeliest = [proba.columns[i] for i in proba.to_numpy().argmax(axis=1)]
    assert predicted.tolist() == likeliest


def _check_other_frames(loaded: Predictor, frame: pd.DataFrame, target: str, expected: pd.Series) -> None:
    """Order and further columns do not matter, nor objects instead of a dtype; every column may be missing."""
    names = [str(column) for column in frame.columns]
    features = frame.iloc[:, [i for i, name in enumerate(names) if name != target]]
    turned = features.iloc[:, ::-1].assign(further="x")
    _same(loaded.predict(turned), expected)
    _same(loaded.predict(features.astype(object)), expected)
    nothing = features.astype(object)
    nothing.loc[:, :] = None
    assert len(loaded.predict(nothing)) == len(frame)
    for name, kind in loaded.schema:
        if kind == "category":
            place = [str(column) for column in features.columns].index(name)
            unseen = features.astype(object)
            unseen.isetitem(place, pd.Series(["never seen"] * len(frame), index=frame.index, dtype=object))
            assert len(loaded.predict(unseen)) == len(frame)
    first = loaded.schema[0][0]
    lacking = features.iloc[:, [i for i, c in enumerate(features.columns) if str(c) != first]]
    with pytest.raises(UserError) as caught:
        loaded.predict(lacking)
    assert repr(first)[:40] in str(caught.value)
