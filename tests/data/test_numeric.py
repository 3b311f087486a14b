"""Numbers as ranks and as they are: equal to scikit-learn's transform, missing values told apart, exact as JSON."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from fakes import make_table
from scipy.stats import norm
from sklearn.preprocessing import QuantileTransformer

from bishop_ray.data.numeric import MAX_QUANTILES, NUMERIC_KINDS, coded_numbers, fit_numbers
from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.table import RawDataset, TaskType


def columns() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "normal": rng.normal(3.0, 2.0, 700),
        "skewed": np.exp(rng.normal(0, 3, 700)),
        "ties": rng.integers(0, 7, 700).astype(float),
        "mostly one value": np.where(rng.random(700) < 0.9, 5.0, rng.normal(5, 1, 700)),
        "constant runs at both ends": np.r_[np.zeros(300), rng.random(100), np.ones(300)],
        "outliers": np.r_[rng.normal(0, 1, 698), -1e6, 1e6],
        "more rows than quantiles": rng.normal(0, 1, 5000),
        "two values": np.r_[np.zeros(300), np.ones(400)],
        "few rows": rng.normal(0, 1, 11),
        "large": rng.normal(1e8, 1e3, 500),
    }


COLUMNS = columns()


def queries(train: np.ndarray) -> np.ndarray:
    """The training values, values between them and far outside."""
    low, high = train.min(), train.max()
    inside = np.random.default_rng(1).uniform(low, high, 200)
    return np.r_[train, inside, low, high, low - 1, high + 1, low - 1e6, high + 1e6, -1e300, 1e300]


def scikit_learn(train: np.ndarray, asked: np.ndarray) -> np.ndarray:
    steps = min(MAX_QUANTILES, len(train))
    theirs = QuantileTransformer(n_quantiles=steps, output_distribution="normal", subsample=None)
    return theirs.fit(train[:, None]).transform(asked[:, None])[:, 0]


def ours(train: np.ndarray, asked: np.ndarray) -> np.ndarray:
    (column,) = fit_numbers(pd.Series(train, name="x"), "quantile")
    assert column is not None
    return coded_numbers(asked, column, "quantile")


@pytest.mark.parametrize("name", COLUMNS)
def test_ranks_equal_those_of_scikit_learn(name: str) -> None:
    """Between runs of one value, and outside the training range, too; shared values have their own test."""
    train = COLUMNS[name]
    values, counts = np.unique(train, return_counts=True)
    asked = queries(train)
    asked = asked[~np.isin(asked, values[counts > 1])]
    np.testing.assert_allclose(ours(train, asked), scikit_learn(train, asked), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["ties", "constant runs at both ends", "two values", "mostly one value"])
def test_a_shared_value_has_the_middle_of_its_ranks(name: str) -> None:
    """As scikit-learn has it, up to the one rank that the rounding of quantiles moves.

    It puts the lowest and the highest value at 5.2 deviations however many rows share them, which is no place for a
    0/1 column; on jittered rows, as the authors of tabular networks use it, it agrees there too.
    """
    train = COLUMNS[name]
    values, counts = np.unique(train, return_counts=True)
    shared = values[counts > 1]
    ordered = np.sort(train)
    ranks = (np.searchsorted(ordered, shared, "left") + np.searchsorted(ordered, shared, "right") - 1) / 2
    found = norm.cdf(ours(train, shared))
    np.testing.assert_allclose(found, ranks / (len(train) - 1), atol=1 / len(train))
    jittered = train.copy()
    for value in shared:
        same = train == value
        jittered[same] += np.linspace(-1e-4, 1e-4, same.sum())
    np.testing.assert_allclose(found, norm.cdf(scikit_learn(jittered, shared)), atol=1 / len(train))
    inner = ~np.isin(shared, [train.min(), train.max()])
    np.testing.assert_allclose(found[inner], norm.cdf(scikit_learn(train, shared)[inner]), atol=1 / len(train))


@pytest.mark.parametrize("name", COLUMNS)
def test_ranks_are_bounded_and_keep_the_order(name: str) -> None:
    found = ours(COLUMNS[name], np.sort(queries(COLUMNS[name])))
    assert found.dtype == np.float32
    assert np.abs(found).max() < 5.3
    assert (np.diff(found) >= -1e-6).all()


@pytest.mark.parametrize("hole", [np.nan, np.inf, -np.inf])
def test_missing_values_among_ranks(hole: float) -> None:
    """They change no rank of the others, get the median's rank, and an indicator tells them apart."""
    train = COLUMNS["skewed"]
    with_holes = np.r_[train[:350], [hole] * 70, train[350:]]
    frame = pd.DataFrame({"x": with_holes})
    target = pd.Series(np.arange(len(frame)) % 2, name="y")
    preprocessor = Preprocessor.fit(RawDataset("t", frame, target, TaskType.BINARY, ()), "quantile")
    x_num, _ = preprocessor.transform_features(frame)
    assert preprocessor.spec.n_num == x_num.shape[1] == 2
    missing = ~np.isfinite(with_holes)
    np.testing.assert_array_equal(x_num[:, 1], missing)
    np.testing.assert_allclose(x_num[~missing, 0], scikit_learn(train, train), atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(x_num[missing, 0], 0.0, atol=0.01)


def test_native_numbers_are_as_they_are() -> None:
    train = np.array([1e-30, -2.5, np.nan, 1e30, np.inf, -np.inf, 1e200, 0.1])
    frame = pd.DataFrame({"x": train, "when": pd.date_range("2024-01-01", periods=8, freq="s")})
    target = pd.Series([0, 1] * 4, name="y")
    preprocessor = Preprocessor.fit(RawDataset("t", frame, target, TaskType.BINARY, ()), "native")
    x_num, _ = preprocessor.transform_features(frame)
    limit = np.finfo(np.float32).max
    expected = np.array([1e-30, -2.5, np.nan, 1e30, np.nan, np.nan, limit, 0.1], np.float32)
    assert preprocessor.spec.n_num == 2, "no indicator: NaN tells"
    np.testing.assert_array_equal(x_num[:, 0], expected)
    np.testing.assert_array_equal(x_num[:, 1], np.arange(8))  # seconds, exact: counted from the earliest
    later = pd.DataFrame({"x": [np.nan], "when": [pd.NaT]})
    assert np.isnan(preprocessor.transform_features(later)[0]).all()


@pytest.mark.parametrize("kind", NUMERIC_KINDS)
def test_a_preprocessor_survives_json_exactly(kind: str) -> None:
    raw = make_table(TaskType.REGRESSION, 4, 2, rows=150, with_missing=True, with_constant=True)
    frame = raw.frame.assign(tiny=np.r_[np.pi * 1e-300, np.full(149, 1 / 3)], when=pd.date_range("2020", periods=150))
    raw = RawDataset("t", frame, raw.target, raw.task, raw.categorical)
    fitted = Preprocessor.fit(raw, kind)
    copy = Preprocessor.from_dict(json.loads(json.dumps(fitted.to_dict())))
    assert copy == fitted
    asked = make_table(TaskType.REGRESSION, 4, 2, 50, with_missing=True, with_unseen_category=True, seed=1).frame
    asked = asked.assign(tiny=np.linspace(-1, 1, 50), when=pd.date_range("2021", periods=50))
    for one, other in zip(fitted.transform_features(asked), copy.transform_features(asked), strict=True):
        np.testing.assert_array_equal(one, other)
