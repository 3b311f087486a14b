"""Fitted on train only; every dtype, missing values, unseen levels; labels and targets back in the user's terms."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
from fakes import UNSEEN, make_table
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bishop_ray.data import Preprocessor, RawDataset, TaskType, split_dataset
from bishop_ray.data.columns import canonical_text, to_numbers
from bishop_ray.data.target import TargetCoder
from bishop_ray.errors import BadTable
from bishop_ray.metrics import evaluate


def raw_of(frame: pd.DataFrame, categorical: tuple[str, ...] = (), target: object = None) -> RawDataset:
    values = pd.Series(target if target is not None else np.arange(len(frame)) % 2, name="y")
    return RawDataset("t", frame, values, TaskType.BINARY, categorical)


def codes_of(values: object, fitted: Preprocessor) -> list[int]:
    _, x_cat = fitted.transform_features(pd.DataFrame({"c": values}))
    return x_cat[:, 0].tolist()


def fit_category(values: object) -> Preprocessor:
    return Preprocessor.fit(raw_of(pd.DataFrame({"c": values}), ("c",)))


@pytest.mark.parametrize("task", list(TaskType))
@pytest.mark.parametrize("numeric", ["normal", "raw"])
@pytest.mark.parametrize(("n_num", "n_cat"), [(3, 0), (0, 2), (3, 2)])
def test_table_and_spec(task: TaskType, numeric: str, n_num: int, n_cat: int) -> None:
    split = split_dataset(make_table(task, n_num, n_cat, rows=300, with_missing=True), 0)
    fitted = Preprocessor.fit(split.train, numeric)
    table = fitted.transform(split.train)
    assert fitted.spec.n_num == table.x_num.shape[1] == 2 * n_num  # each with its indicator
    assert fitted.spec.cat_cardinalities == (5,) * n_cat
    assert (table.x_num.dtype, table.x_cat.dtype) == (np.float32, np.int64)
    assert np.isfinite(table.x_num).all()
    assert fitted.spec.task is task
    assert fitted.spec.n_out == {"binary": 2, "multiclass": 3, "regression": 1}[task]
    assert table.y.dtype == (np.float32 if task is TaskType.REGRESSION else np.int64)


def test_nothing_but_train_is_learnt() -> None:
    """Other parts may hold anything: the same train gives the same coder."""
    split = split_dataset(make_table("regression", rows=200, with_missing=True), 0)
    fitted = Preprocessor.fit(split.train)
    changed = RawDataset(
        "t",
        split.test.frame.assign(num_0=1e9, cat_0="zzz"),
        split.test.target * 100,
        split.test.task,
        ("cat_0", "cat_1"),
    )
    before = fitted.to_dict()
    table = fitted.transform(changed)
    assert fitted.to_dict() == before == Preprocessor.fit(split.train).to_dict()
    assert (table.x_cat[:, 0] == 0).all()
    assert (table.x_num[:, 0] == 1e4).all()  # cut, not infinite


def test_standardised_by_train_in_float64() -> None:
    frame = pd.DataFrame({"a": [1e9, 1e9 + 1, 1e9 + 2, 1e9 + 3], "b": np.array([250, 251, 252, 255], np.uint8)})
    x_num, _ = Preprocessor.fit(raw_of(frame)).transform_features(frame)
    for j, name in enumerate(frame):
        values = frame[name].to_numpy(np.float64)
        np.testing.assert_allclose(x_num[:, j], (values - values.mean()) / values.std(), rtol=1e-6)


def test_raw_numbers_stay() -> None:
    frame = pd.DataFrame({"a": [1.5, -2.0, np.nan, 7.0]})
    x_num, _ = Preprocessor.fit(raw_of(frame), "raw").transform_features(frame)
    assert x_num.tolist() == [[1.5, 0.0], [-2.0, 0.0], [1.5, 1.0], [7.0, 0.0]]


def test_missing_and_infinite_take_the_median_and_an_indicator() -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0, 4.0, np.inf, np.nan, -np.inf], "full": range(7)})
    fitted = Preprocessor.fit(raw_of(frame))
    assert fitted.numbers[0].median == 2.5
    x_num, _ = fitted.transform_features(frame)
    assert x_num.shape == (7, 3)
    assert x_num[:, 2].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert len(set(x_num[4:, 0])) == 1
    # a column that was whole in train has no indicator, but a hole in it is filled
    later, _ = fitted.transform_features(pd.DataFrame({"a": [1.0], "full": [np.nan]}))
    assert later[0, 1] == x_num[3, 1]


def test_columns_without_information_are_dropped_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Cases 3 and 4: three constant, two all-missing, and a category that is empty."""
    frame = pd.DataFrame(
        {
            "x": [1.0, 2.0, 3.0, 4.0],
            "k1": 5,
            "k2": 0.1,
            "k3": "same",
            "n1": [np.nan] * 4,
            "n2": pd.array([None] * 4, "Int64"),
            "n3": pd.Categorical([None] * 4, ["a", "b"]),
        }
    )
    fitted = Preprocessor.fit(raw_of(frame, ("k3", "n3")))
    assert fitted.dropped == ("k1", "k2", "k3", "n1", "n2", "n3")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert fitted.schema == (("x", "number"),)
    x_num, x_cat = fitted.transform_features(frame[["x"]])
    assert (x_num.shape, x_cat.shape) == ((4, 1), (4, 0))
    with pytest.raises(BadTable, match="no feature column with two different values"):
        Preprocessor.fit(raw_of(frame[["k1", "n1"]]))


@pytest.mark.parametrize("name", ["yes", "a"])
def test_one_level_and_missing_are_two_states(name: str) -> None:
    fitted = fit_category([name, None, name, None])
    assert codes_of([name, None], fitted) == [1, 0]


@pytest.mark.parametrize(
    "later",
    [
        [1, 2, 3, None],
        [1.0, 2.0, 3.0, np.nan],
        np.array([1, 2, 3, 9], np.uint8),
        pd.array([1, 2, 3, None], "Int64"),
        pd.array(["1", "2", "3", None], "string"),
        pd.Series(["1", "2", "3", pd.NA], dtype=object),
        pd.Series([1, "2", 3.0, None], dtype=object),
        pd.Series([np.int64(1), np.float32(2), Decimal("3"), float("nan")], dtype=object),
        pd.Categorical(["1", "2", "3", None], categories=["3", "2", "1", "0"]),
        pd.Categorical([1.0, 2.0, 3.0, None]),
        ["1.0", "2.0", "3.00", "4"],
    ],
)
@pytest.mark.parametrize("train", [["1", "2", "3", "1"], [1, 2, 3, 1], pd.Categorical([1.0, 2.0, 3.0, 1.0])])
def test_a_category_reads_the_same_in_every_dtype(train: object, later: object) -> None:
    """Case 1."""
    assert codes_of(later, fit_category(train)) == [1, 2, 3, 0]


@pytest.mark.parametrize(
    "later",
    [
        [True, False],
        np.array([True, False]),
        pd.array([True, False], "boolean"),
        pd.Series([True, pd.NA, False], dtype=object).drop(index=1),
        ["True", "False"],
        pd.Categorical([True, False]),
    ],
)
@pytest.mark.parametrize(
    "train",
    [[True, False], pd.array([True, False, None, True], "boolean"), pd.Categorical([True, False]), ["True", "False"]],
)
def test_two_valued_columns(train: list[object], later: object) -> None:
    """Cases 10 and 19."""
    values = pd.Series(train)
    assert codes_of(pd.Series(later).reset_index(drop=True), fit_category(values)) == [2, 1]


def test_true_is_not_one() -> None:
    values = pd.Series([True, 1, "1", "True", None], dtype=object)
    assert codes_of(values, fit_category(values)) == [2, 1, 1, 2, 0]


def test_zip_codes_are_no_numbers() -> None:
    assert len({canonical_text("01"), canonical_text("1"), canonical_text("1.10"), canonical_text("1.1")}) == 4
    assert canonical_text(np.float32(0.1)) == canonical_text(0.1) == "0.1"
    assert canonical_text(-0.0) == canonical_text(0) == "0"
    assert canonical_text(10**30) == str(10**30)


def test_unseen_and_all_missing_at_predict() -> None:
    """Cases 2 and 30."""
    fitted = Preprocessor.fit(make_table(n_num=1, n_cat=2))
    later = make_table(n_num=1, n_cat=2, with_unseen_category=True)
    _, x_cat = fitted.transform_features(later.frame)
    assert later.frame["cat_0"].iloc[-1] == UNSEEN
    assert x_cat[-1].tolist() == [0, 0]
    assert (x_cat[:-1] > 0).all()
    _, x_cat = fitted.transform_features(later.frame.assign(cat_0=np.nan, cat_1=None))
    assert (x_cat == 0).all()


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows_at_predict(rows: int) -> None:
    fitted = Preprocessor.fit(make_table(with_missing=True))
    x_num, x_cat = fitted.transform_features(make_table().frame.head(rows))
    assert (x_num.shape, x_cat.shape) == ((rows, 6), (rows, 2))


@pytest.mark.parametrize(
    "values",
    [
        [1, 2, 3, 5],
        ["1", "2.0", " 3 ", "5"],
        pd.array([1, 2, 3, 5], "Int64"),
        pd.Series([1, "2", 3.0, Decimal(5)], dtype=object),
        pd.Categorical(["1", "2", "3", "5"]),
        pd.Categorical([1, 2, 3, 5]),
        np.array([1, 2, 3, 5], np.uint8),
        pd.array([1.0, 2.0, 3.0, 5.0], "float32[pyarrow]"),
    ],
)
def test_numbers_in_any_dtype(values: object) -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0, 5.0]})
    fitted = Preprocessor.fit(raw_of(frame))
    expected, _ = fitted.transform_features(frame)
    found, _ = fitted.transform_features(pd.DataFrame({"a": values}))
    assert found.tolist() == expected.tolist()
    assert Preprocessor.fit(raw_of(pd.DataFrame({"a": values}))) == fitted


@pytest.mark.parametrize(
    "hole", [None, np.nan, pd.NA, pd.NaT, "", "  ", float("inf"), "nan", "-inf", np.float32("nan"), Decimal("NaN")]
)
def test_missing_numbers_in_any_form(hole: object) -> None:
    fitted = Preprocessor.fit(raw_of(pd.DataFrame({"a": [1.0, 3.0, None]})))
    x_num, _ = fitted.transform_features(pd.DataFrame({"a": pd.Series([hole, 2], dtype=object)}))
    assert x_num.tolist() == [[0.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("value", ["abc", "1,5", "1_000", [1], 1j, datetime.date(2024, 1, 1), "0x10"])
def test_text_where_a_number_must_be(value: object) -> None:
    fitted = Preprocessor.fit(raw_of(pd.DataFrame({"price": [1.0, 2.0]})))
    with pytest.raises(BadTable, match=r"column 'price': expected a number; found ") as caught:
        fitted.transform_features(pd.DataFrame({"price": pd.Series([1, value], dtype=object)}))
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Kathmandu"])
@pytest.mark.parametrize("numeric", ["normal", "raw"])
def test_moments(unit: str, zone: str | None, numeric: str) -> None:
    """Case 17: the unit of a datetime column says nothing; text is read as ISO 8601."""
    text = ["2024-01-01 00:00:00", "2024-01-03 12:00:00", None, "2024-01-31 23:59:59"]
    moments = pd.to_datetime(pd.Series(text, name="d")).dt.as_unit(unit)
    moments = moments if zone is None else moments.dt.tz_localize(zone)
    frame = pd.DataFrame({"d": moments})
    fitted = Preprocessor.fit(raw_of(frame), numeric)
    assert fitted.schema == (("d", "moment"),)
    x_num, _ = fitted.transform_features(frame)
    days = (x_num[:, 0] - x_num[0, 0]) / (x_num[3, 0] - x_num[0, 0]) * 31
    np.testing.assert_allclose(days, [0, 2.5, 2.5, 31], atol=1e-4)
    assert x_num[:, -1].tolist() == [0, 0, 1, 0]
    same, _ = fitted.transform_features(pd.DataFrame({"d": [None if pd.isna(m) else str(m) for m in moments]}))
    assert same.tolist() == x_num.tolist()
    with pytest.raises(BadTable, match="column 'd': expected a date or time; found 5"):
        fitted.transform_features(pd.DataFrame({"d": [5]}))
    with pytest.raises(BadTable, match="column 'd': expected a date or time; found 'soon'"):
        fitted.transform_features(pd.DataFrame({"d": ["soon"]}))


def test_durations_are_seconds() -> None:
    assert to_numbers(pd.Series(pd.to_timedelta(["1 min", None, "2 h"]))).tolist()[::2] == [60.0, 7200.0]


def test_the_schema_is_law() -> None:
    raw = make_table(with_missing=True)
    fitted = Preprocessor.fit(raw)
    expected = fitted.transform_features(raw.frame)
    other = raw.frame.assign(extra="x", y=1)[["y", *reversed(raw.frame.columns), "extra"]].set_axis(range(500, 380, -1))
    found = fitted.transform_features(other)
    assert all((a == b).all() for a, b in zip(expected, found, strict=True))
    with pytest.raises(BadTable, match="missing columns 'num_1', 'cat_0'; expected"):
        fitted.transform_features(raw.frame.drop(columns=["cat_0", "num_1"]))
    with pytest.raises(BadTable, match="column 'num_0' comes 2 times; expected once"):
        fitted.transform_features(pd.concat([raw.frame, raw.frame[["num_0"]]], axis=1))


def test_names_of_any_type_at_predict() -> None:
    frame = pd.DataFrame({"0": [1.0, 2.0], "🎈": [3.0, 4.0]})
    fitted = Preprocessor.fit(raw_of(frame))
    found, _ = fitted.transform_features(frame.rename(columns={"0": 0}))
    assert found.tolist() == fitted.transform_features(frame)[0].tolist()


@pytest.mark.parametrize("task", list(TaskType))
def test_json_round_trip_is_exact(task: TaskType) -> None:
    raw = make_table(task, with_missing=True)
    fitted = Preprocessor.fit(raw)
    again = Preprocessor.from_dict(json.loads(json.dumps(fitted.to_dict())))
    assert again == fitted
    first, second = fitted.transform(raw), again.transform(raw)
    assert (first.x_num == second.x_num).all()
    assert (first.x_cat == second.x_cat).all()
    assert (first.y == second.y).all()


# targets


@pytest.mark.parametrize(
    ("make", "classes"),
    [
        (lambda: pd.Series(["b", "a", "b", "a"], dtype="str"), ["a", "b"]),
        (lambda: pd.Series(["b", "a", "b", "a"], dtype="string"), ["a", "b"]),
        (lambda: pd.Series(["b", "a", "b", "a"], dtype=object), ["a", "b"]),
        (lambda: pd.Series(pd.Categorical(["b", "a", "b", "a"], ["c", "b", "a"])), ["a", "b"]),
        (lambda: pd.Series(pd.Categorical(["b", "a", "b", "a"], ["c", "b", "a"], ordered=True)), ["b", "a"]),
        (lambda: pd.Series([True, False, True, False]), [False, True]),
        (lambda: pd.Series(pd.array([True, False, True, False], "boolean")), [False, True]),
        (lambda: pd.Series([10, 9, 10, 9]), [9, 10]),
        (lambda: pd.Series([10, 9, 10, 9], dtype="uint8"), [9, 10]),
        (lambda: pd.Series(pd.array([10, 9, 10, 9], "Int64")), [9, 10]),
        (lambda: pd.Series([1.5, 0.5, 1.5, 0.5]), [0.5, 1.5]),
        (lambda: pd.Series(pd.Categorical([10, 9, 10, 9])), [9, 10]),
    ],
)
def test_labels_come_back_in_their_type(make: Callable[[], pd.Series], classes: list[object]) -> None:
    """Case 11."""
    target = make().rename("y")
    fitted = Preprocessor.fit(RawDataset("t", pd.DataFrame({"x": range(4)}), target, TaskType.BINARY, ()))
    again = Preprocessor.from_dict(json.loads(json.dumps(fitted.to_dict())))
    assert list(again.classes) == classes
    assert [type(label) for label in again.classes] == [type(label) for label in classes]
    probabilities = np.eye(2)[again.encode_target(target)]
    pd.testing.assert_series_equal(again.labels(probabilities), target)
    assert len(again.labels(np.zeros((0, 2)))) == 0


@pytest.mark.parametrize("later", [[9.0, 10.0], ["9", "10"], pd.Categorical(["9", "10"]), np.array([9, 10], np.int8)])
def test_labels_read_the_same_in_every_dtype(later: object) -> None:
    fitted = Preprocessor.fit(raw_of(pd.DataFrame({"x": [1.0, 2.0]}), target=[10, 9]))
    assert fitted.encode_target(pd.Series(later)).tolist() == [0, 1]


@pytest.mark.parametrize(("later", "found"), [(["a", "c"], "'c'"), (["a", None], "a missing value")])
def test_label_that_train_does_not_have(later: list[object], found: str) -> None:
    fitted = Preprocessor.fit(raw_of(pd.DataFrame({"x": [1.0, 2.0]}), target=["a", "b"]))
    with pytest.raises(BadTable, match=f"expected one of 2 classes seen in train; found {found}"):
        fitted.encode_target(pd.Series(later))


def test_task_follows_the_classes_of_train() -> None:
    raw = make_table("multiclass", rows=60)
    keep = np.flatnonzero(raw.target != "b")
    assert Preprocessor.fit(raw.rows(keep)).spec.task is TaskType.BINARY
    with pytest.raises(BadTable, match="has one class in train: 'a'"):
        Preprocessor.fit(raw.rows(np.flatnonzero(raw.target == "a")))


@pytest.mark.parametrize("probabilities", [np.zeros((3, 3)), np.zeros(3), np.array([[np.nan, 1.0]])])
def test_probabilities_that_make_no_sense(probabilities: np.ndarray) -> None:
    with pytest.raises(ValueError, match="probabilities"):
        Preprocessor.fit(make_table()).labels(probabilities)


@given(st.lists(st.floats(-1e12, 1e12).map(lambda value: round(value, 9)), min_size=2, max_size=50))
@settings(max_examples=60, deadline=None)
def test_regression_target_there_and_back(values: list[float]) -> None:
    raw = RawDataset("t", pd.DataFrame({"x": range(len(values))}), pd.Series(values, name="y"), TaskType.REGRESSION, ())
    fitted = Preprocessor.fit(raw)
    coded = fitted.encode_target(raw.target)
    assert coded.dtype == np.float32
    back = fitted.inverse_target(coded.reshape(-1, 1))
    assert back.dtype == np.float64
    assert back.shape == (len(values),)
    np.testing.assert_allclose(back, values, rtol=1e-5, atol=1e-5 * max(map(abs, values)) + 1e-30)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=20))
@example([1e308, -1e308, 1e308])
@example([1e308, 1.1e308])
@example([1e-200, 2e-200])
@example([1e150, -1e150])
@example([0.1, 0.1, 0.1])
@example([0.0, 5e-324])
@settings(max_examples=150, deadline=None)
def test_any_regression_target_is_finite_or_refused(values: list[float]) -> None:
    target = pd.Series(values, name="y")
    size = max(map(abs, values))
    spread = max(values) - min(values) if size <= 1e150 else np.inf
    if size > 1e150 or 0 < spread < 1e-150:
        with pytest.raises(
            BadTable, match=r"^target column 'y': expected (numbers up to 1e\+150|a spread of .*1e-150)"
        ):
            TargetCoder.fit(target, TaskType.REGRESSION)
        return
    if 0 < spread < 1e-149:  # the deviation may lie on either side of the bound
        return
    coder = TargetCoder.fit(target, TaskType.REGRESSION)
    coded = coder.encode(target)
    assert np.isfinite(coded).all()
    if spread > 1e-9 * size:
        assert coded.std() == pytest.approx(1.0, rel=1e-3)
        truth, back = (coder.inverse(each).astype(np.float64) for each in (coded, coded * 0.5))
        assert np.isfinite(evaluate("r2", TaskType.REGRESSION, truth, back))


def test_a_target_far_from_those_of_train_is_refused() -> None:
    coder = TargetCoder.fit(pd.Series([1.0, 2.0], name="y"), TaskType.REGRESSION)
    with pytest.raises(BadTable, match=r"'y'.*near those of train, 1.5 ± 0.5; found 1e\+100"):
        coder.encode(pd.Series([1.0, 1e100]))


@given(
    st.lists(
        st.one_of(st.none(), st.floats(), st.integers(-(2**63), 2**63 - 1).map(float)), min_size=2, max_size=30
    ).filter(lambda values: len({v for v in values if v is not None and np.isfinite(v)}) > 1),
    st.sampled_from(["normal", "raw"]),
)
@example([1.7e308, 1.6e308, None], "normal")
@example([1.7e308, -1.7e308, None], "raw")
@settings(max_examples=150, deadline=None)
def test_any_numbers_give_finite_features(values: list[float | None], numeric: str) -> None:
    frame = pd.DataFrame({"a": pd.Series(values, dtype=float)})
    x_num, _ = Preprocessor.fit(raw_of(frame), numeric).transform_features(frame)
    assert np.isfinite(x_num).all()
