"""Single oddities of real tables that the generated ones do not pin down."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from bishop_ray.data import Preprocessor, split_dataset
from bishop_ray.data.schema import make_raw
from bishop_ray.errors import BadTable

ROWS = 60


def frame_of(**columns: object) -> pd.DataFrame:
    return pd.DataFrame({**columns, "y": ["no", "yes"] * (ROWS // 2)})


@pytest.mark.parametrize("dtype", [object, "string", "category"])
def test_yes_no_and_missing_are_three_states(dtype: str) -> None:
    """Case 19."""
    answers = pd.Series(["yes", "no", pd.NA] * (ROWS // 3), dtype=dtype)
    fitted = Preprocessor.fit(make_raw("t", frame_of(a=answers), "y"))
    _, x_cat = fitted.transform_features(pd.DataFrame({"a": answers.head(3)}))
    assert x_cat[:, 0].tolist() == [2, 1, 0]
    assert fitted.spec.cat_cardinalities == (3,)


def test_two_columns_of_one_name_are_one_clear_error() -> None:
    """Case 21."""
    frame = pd.DataFrame(np.zeros((4, 3)), columns=["a", "a", "y"])
    with pytest.raises(BadTable, match="column 'a' comes 2 times; expected unique names"):
        make_raw("t", frame, "y")
    with pytest.raises(BadTable, match="column '1' comes 2 times"):
        make_raw("t", frame.set_axis(pd.Index([1, "1", "y"], dtype=object), axis=1), "y")


def test_three_rows_without_a_target_are_dropped_with_their_count(caplog: pytest.LogCaptureFixture) -> None:
    """Case 24."""
    frame = frame_of(x=range(ROWS))
    frame.loc[[1, 5, 9], "y"] = None
    assert len(make_raw("t", frame, "y")) == ROWS - 3
    assert "dropped 3 rows without a target ('y')" in caplog.text


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_target_is_found_by_name_wherever_it_stands(place: int) -> None:
    """Case 29: neither at fit nor at predict does a position decide, nor a target among the columns."""
    features = pd.DataFrame({"x": np.arange(ROWS), "kind": ["a", "b", "c"] * (ROWS // 3)})
    frame = features.copy()
    frame.insert(place, "y", np.arange(ROWS) % 2)
    raw = make_raw("t", frame, "y")
    assert list(raw.frame.columns) == ["x", "kind"]
    assert raw.target.tolist() == [0, 1] * (ROWS // 2)
    fitted = Preprocessor.fit(raw)
    expected = fitted.transform_features(features)
    for other in (frame, frame.assign(y=1 - frame["y"]), frame.assign(y=np.nan), frame[frame.columns[::-1]]):
        found = fitted.transform_features(other)
        assert all((a == b).all() for a, b in zip(expected, found, strict=True))


def test_validation_rows_are_encoded_by_what_train_has() -> None:
    """Case 16: the rows that stop a booster early carry the codes that its training rows do."""
    rng = np.random.default_rng(0)
    frame = frame_of(x=rng.normal(size=ROWS), kind=rng.choice(["a", "b", "c", "d"], ROWS))
    parts = split_dataset(make_raw("t", frame, "y"), 0)
    fitted = Preprocessor.fit(parts.train)
    codes = {level: code for code, level in enumerate(fitted.categories[0].levels, start=1)}
    for part in (parts.train, parts.validation, parts.test):
        assert fitted.transform(part).x_cat[:, 0].tolist() == [codes.get(kind, 0) for kind in part.frame["kind"]]


def test_whole_numbers_in_train_may_lack_at_predict() -> None:
    """Case 62: an int64 column comes back with a hole as float64, or as Int64."""
    frame = frame_of(n=np.arange(ROWS))
    fitted = Preprocessor.fit(make_raw("t", frame, "y"))
    for later in ([5.0, np.nan], pd.array([5, None], "Int64"), ["5", ""], [5, None]):
        x_num, _ = fitted.transform_features(pd.DataFrame({"n": later}))
        middle, _ = fitted.transform_features(pd.DataFrame({"n": [5, fitted.numbers[0].median]}))
        np.testing.assert_array_equal(x_num, middle)


@pytest.mark.parametrize(
    "name", ['a:"[]{},', "возраст", "🎈", "a b", " ", "", "a\nb", "<b>", "target", 0, 1.5, None, ("a", 1)], ids=repr
)
def test_names_of_any_kind(name: object) -> None:
    """Case 25; models read arrays and never see a name."""
    frame = pd.DataFrame({"x": range(ROWS), "y": ["no", "yes"] * (ROWS // 2)})
    frame.columns = pd.Index([name, "y"], dtype=object, tupleize_cols=False)
    fitted = Preprocessor.fit(make_raw("t", frame, "y"))
    assert fitted.schema == ((str(name), "number"),)
    again = Preprocessor.from_dict(fitted.to_dict())
    assert again.transform_features(frame)[0].shape == (ROWS, 1)


@pytest.mark.parametrize(
    "values",
    [
        pd.array([1.5, None, 2.5], "Float32"),
        pd.array([1, None, 3], "Int8"),
        pd.array([1.5, None, 2.5], "double[pyarrow]"),
        pd.arrays.SparseArray([0.0, np.nan, 2.0]),
        pd.to_timedelta(["1 min", None, "2 h"]),
        pd.array(pd.to_timedelta(["1 min", None, "2 h"]), "duration[ns][pyarrow]"),
    ],
    ids=lambda values: str(values.dtype),
)
def test_numbers_with_holes_in_every_dtype(values: object) -> None:
    frame = frame_of(n=pd.Series(values).take([0, 1, 2] * (ROWS // 3)).reset_index(drop=True))
    fitted = Preprocessor.fit(make_raw("t", frame, "y"), "native")
    assert fitted.schema == (("n", "number"),)
    x_num, _ = fitted.transform_features(frame)
    assert np.isnan(x_num[:, 0]).tolist() == [False, True, False] * (ROWS // 3)
    assert len(np.unique(x_num[::3])) == len(np.unique(x_num[2::3])) == 1
