"""Dates in any dtype give the same features; nothing else is taken for one; calendar and elapsed time are right."""

from __future__ import annotations

import datetime

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from bishop_ray.data import Preprocessor, RawDataset
from bishop_ray.data.columns import to_numbers
from bishop_ray.data.datetimes import PARTS, as_dates, calendar, seconds_of
from bishop_ray.data.schema import make_raw
from bishop_ray.errors import BadTable

DAYS = ["2023-12-30", "2024-01-01", None, "2024-02-29", "2024-03-10", "2025-07-04", "1969-12-31", "2100-01-01"]


def table(days: object) -> RawDataset:
    column = pd.Series(days).reset_index(drop=True)
    return make_raw("t", pd.DataFrame({"d": column, "y": ["a", "b"] * (len(column) // 2)}), "y")


def stamps(unit: str = "us") -> pd.Series:
    return pd.to_datetime(pd.Series(DAYS)).astype(f"datetime64[{unit}]")


IN_EVERY_DTYPE = {
    "datetime64[s]": lambda: stamps("s"),
    "datetime64[ns]": lambda: stamps("ns"),
    "UTC": lambda: stamps().dt.tz_localize("UTC"),
    "text in object": lambda: pd.Series(DAYS, dtype=object),
    "text in string": lambda: pd.Series(DAYS, dtype="string"),
    "text in str": lambda: pd.Series(DAYS, dtype="str"),
    "text of Arrow": lambda: pd.Series(DAYS).astype(pd.ArrowDtype(pa.string())),
    "text in string[pyarrow]": lambda: pd.Series(DAYS, dtype="string[pyarrow]"),
    "category of text": lambda: pd.Series(DAYS, dtype="category"),
    "category of datetimes": lambda: stamps().astype("category"),
    "datetime.date": lambda: pd.Series([d and datetime.date.fromisoformat(d) for d in DAYS], dtype=object),
    "datetime.datetime": lambda: pd.Series([d and datetime.datetime.fromisoformat(d) for d in DAYS], dtype=object),
    "Timestamp": lambda: stamps().astype(object),
    "date32": lambda: stamps().astype("date32[pyarrow]"),
    "timestamp[us]": lambda: stamps().astype("timestamp[us][pyarrow]"),
    "period": lambda: stamps().dt.to_period("D"),
    "with midnight": lambda: pd.Series([d and f"{d}T00:00:00Z" for d in DAYS]),
    "another zone": lambda: pd.Series([d and f"{d} 05:45:00+05:45" for d in DAYS]),
    "day.month.year": lambda: pd.Series([d and ".".join(reversed(d.split("-"))) for d in DAYS]),
    "blank where missing": lambda: pd.Series([d or " " for d in DAYS]),
    "NaT where missing": lambda: pd.Series([d or "NaT" for d in DAYS]),
    "zeros where missing": lambda: pd.Series([d or "0000-00-00" for d in DAYS]),
}


@pytest.mark.parametrize("kind", IN_EVERY_DTYPE)
def test_date_strings_and_datetimes_give_the_same_features(kind: str) -> None:
    """Cases 17 and 18."""
    expected = Preprocessor.fit(table(stamps()))
    raw = table(IN_EVERY_DTYPE[kind]())
    assert raw.categorical == ()
    assert Preprocessor.fit(raw) == expected
    x_num, x_cat = expected.transform_features(table(stamps()).frame)
    found, _ = expected.transform_features(pd.DataFrame({"d": IN_EVERY_DTYPE[kind]()}))
    np.testing.assert_array_equal(found, x_num)
    assert x_cat.shape == (8, 0)


def test_calendar_and_elapsed_time() -> None:
    text = ["2024-02-29 13:30:00", "1969-12-31 23:59:59", "2025-01-06 00:00:00", "0001-01-01 05:00:00", None]
    moments = pd.Series(pd.to_datetime([*text[:3], None, None]))
    seconds = to_numbers(pd.Series(text), moment=True)
    for part, name in zip(PARTS, ("year", "month", "day", "weekday", "hour"), strict=True):
        found = calendar(seconds, part)
        np.testing.assert_array_equal(found[:3], getattr(moments.dt, name)[:3])
        assert np.isnan(found[4])
    first = datetime.datetime(1, 1, 1, 5, tzinfo=datetime.UTC)
    assert [calendar(seconds, part)[3] for part in PARTS] == [1, 1, 1, first.weekday(), 5]
    assert seconds[3] == first.timestamp()


def test_only_parts_that_vary_stand_beside_the_elapsed_time() -> None:
    raw = table(pd.date_range("2024-03-01", periods=20, freq="D"))
    fitted = Preprocessor.fit(raw)
    assert [column.part for column in fitted.numbers] == ["", "day", "weekday"]
    assert fitted.schema == (("d", "moment"),)
    assert fitted.spec.n_num == 3
    hours = Preprocessor.fit(table(pd.date_range("2024-03-01", periods=24, freq="37h")))
    assert [column.part for column in hours.numbers] == ["", "month", "day", "weekday", "hour"]
    constant = make_raw("t", pd.DataFrame({"d": ["2024-01-01"] * 4, "x": range(4), "y": list("abab")}), "y")
    assert Preprocessor.fit(constant).dropped == ("d",)


@pytest.mark.parametrize("numeric", ["normal", "quantile", "raw", "native"])
def test_a_missing_date_is_told_once(numeric: str) -> None:
    raw = table(DAYS)
    fitted = Preprocessor.fit(raw, numeric)
    x_num, _ = fitted.transform_features(raw.frame)
    assert x_num.shape[1] == len(fitted.numbers) + (numeric != "native")
    assert np.isnan(x_num[2]).all() if numeric == "native" else x_num[2, -1] == 1
    if numeric in ("raw", "native"):
        years = x_num[:, [column.part for column in fitted.numbers].index("year")]
        assert years[[0, 6, 7]].tolist() == [2023, 1969, 2100]
    again = Preprocessor.from_dict(fitted.to_dict())
    assert again == fitted
    np.testing.assert_array_equal(again.transform_features(raw.frame)[0], x_num)
    for later in (pd.DataFrame({"d": [None, None]}), pd.DataFrame({"d": [np.nan]}), raw.frame.head(0)):
        found, _ = fitted.transform_features(later)
        np.testing.assert_array_equal(found, np.repeat(x_num[2:3], len(later), axis=0))


NO_DATES = [
    ["2020", "2021", "2022", "2023"],
    ["20240101", "20240102", "20240103", "20240104"],
    ["2020-01", "2020-02", "2020-03", "2020-04"],
    ["10115", "01234", "90210", "00501"],
    ["1.2.3", "2024.1.0", "10.4.2", "3.11.13"],
    ["192.168.1.1", "10.0.0.1", "8.8.8.8", "127.0.0.1"],
    ["01/02/2024", "03/04/2024", "05/06/2024", "07/08/2024"],
    ["01-02-2024", "03-04-2024", "05-06-2024", "07-08-2024"],
    ["2024-13-01", "2024-00-10", "2024-02-30", "2023-02-29"],
    ["12345-67-89", "2024-01-011", "x2024-01-01", "2024-01-01x"],
    ["10:30", "11:45", "12:00", "13:15"],
    ["May", "June", "Monday", "today"],
    ["now", "may 5", "5", "march"],
    ["2024-01-01", "soon", "2024-01-03", "later"],
    ["2024-01-01", 3, "2024-01-03", 4],
    ["٢٠٢٤-٠١-٠١", "٢٠٢٤-٠١-٠٢", "٢٠٢٤-٠١-٠٣", "٢٠٢٤-٠١-٠٤"],
    [None, " ", "nan", ""],
]


@pytest.mark.parametrize("values", NO_DATES, ids=lambda values: str(values[0]))
@pytest.mark.parametrize("dtype", [object, "string", "category"])
def test_what_is_no_date_stays_what_it_was(values: list[object], dtype: object) -> None:
    if dtype == "string" and any(isinstance(value, int) for value in values):
        return
    column = pd.Series(values, dtype=dtype)  # type: ignore[call-overload]
    assert as_dates(column) is None
    if "nan" not in values:
        assert {kind for _, kind in Preprocessor.fit(table(column)).schema} <= {"number", "category"}


def test_a_column_of_dates_may_have_any_name() -> None:
    frame = pd.DataFrame(
        {"self": ["2024-01-01", "2024-02-02"] * 2, "": ["1.1.2024", "2.3.2024"] * 2, "y": list("abab")}
    )
    assert Preprocessor.fit(make_raw("t", frame, "y")).schema == (("self", "moment"), ("", "moment"))
    assert frame["self"].tolist() == ["2024-01-01", "2024-02-02"] * 2


def test_a_column_said_to_be_a_category_stays_one() -> None:
    frame = pd.DataFrame({"d": ["2024-01-01", "2024-01-02"] * 4, "y": ["a", "b"] * 4})
    raw = make_raw("t", frame, "y", categorical=["d"])
    assert Preprocessor.fit(raw).schema == (("d", "category"),)


@pytest.mark.parametrize(
    "text",
    [
        "2024-01-05 13:07:09",
        "2024-01-05T13:07:09",
        "2024-01-05T13:07:09Z",
        "2024-01-05T14:07:09+01:00",
        "2024-01-05 09:07:09 -0400",
        "2024-01-05T13:07:09.000",
        "2024/01/05 13:07:09",
        "05.01.2024 13:07:09",
        "5.1.2024, 13:07:09",
        "5 Jan 2024 13:07:09",
        "05-Jan-2024 13:07:09",
        "Jan 5, 2024 1:07:09 PM",
        "January 5 2024 13:07:09 UTC",
        "Fri, 05 Jan 2024 13:07:09 GMT",
        "Friday, 5 January 2024 13:07:09",
        " 2024-01-05 13:07:09 ",
    ],
)
def test_forms_of_one_moment(text: str) -> None:
    expected = datetime.datetime(2024, 1, 5, 13, 7, 9, tzinfo=datetime.UTC).timestamp()
    assert seconds_of(text) == expected
    assert as_dates(pd.Series([text, "2024-01-01"])) is not None


def test_a_slip_among_many_dates_is_missing_and_said(caplog: pytest.LogCaptureFixture) -> None:
    days = [str(day.date()) for day in pd.date_range("2020-01-01", periods=398)]
    raw = table(["2024-02-31", "unknown", *days])
    assert raw.frame["d"].isna().tolist() == [True, True, *[False] * 398]
    assert "column 'd' holds dates; took 2 values as missing that are none, such as '2024-02-31'" in caplog.text
    assert table([*["unknown"] * 5, "x", *days[:100]]).categorical == ("d",)


def test_a_date_that_can_be_read_in_two_ways_is_said(caplog: pytest.LogCaptureFixture) -> None:
    frame = pd.DataFrame({"d": ["01/02/2024", "31/01/2024"] * 4, "e": ["1/2/24", None] * 4, "y": ["a", "b"] * 4})
    assert make_raw("t", frame, "y").categorical == ("d", "e")
    assert "day and month cannot be told apart: 'd' (01/02/2024), 'e' (1/2/24)" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "value", ["soon", "01/02/2024", "now", "today", "2024", "10:30", 5, 2024.0, True, "2024-02-30", ["2024-01-01"]]
)
def test_no_date_at_predict_is_one_clear_error(value: object) -> None:
    fitted = Preprocessor.fit(table(DAYS))
    with pytest.raises(BadTable, match="column 'd': expected a date or time; found ") as caught:
        fitted.transform_features(pd.DataFrame({"d": pd.Series(["2024-01-01", value], dtype=object)}))
    assert repr(value) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_far_dates(unit: str) -> None:
    """Beyond the years that nanoseconds reach (1677 to 2262), and in text."""
    far = pd.Series(np.array(["1066-10-14", "9999-12-31", "3000-01-01", "2024-01-01"], f"datetime64[{unit}]"))
    fitted = Preprocessor.fit(table(far), "native")
    x_num, _ = fitted.transform_features(pd.DataFrame({"d": far}))
    assert x_num[:, [column.part for column in fitted.numbers].index("year")].tolist() == [1066, 9999, 3000, 2024]
    text = pd.DataFrame({"d": ["1066-10-14", "9999-12-31T23:59:59", "3000-01-01", "2024-01-01"]})
    found, _ = fitted.transform_features(text)
    np.testing.assert_array_equal(found[[0, 2, 3]], x_num[[0, 2, 3]])
    assert Preprocessor.fit(table(text["d"]), "native").schema == (("d", "moment"),)
    huge = pd.DataFrame({"d": np.array(["292277026596-12-04", "-5000-01-01"], "datetime64[s]")})
    assert np.isfinite(Preprocessor.fit(table(far)).transform_features(huge)[0]).all()


def test_zones_may_be_mixed() -> None:
    zones = [
        datetime.datetime(2024, 1, 1, 12, tzinfo=datetime.timezone(datetime.timedelta(hours=hours))) for hours in (0, 5)
    ]
    raw = table(pd.Series([*zones, *zones], dtype=object))
    assert raw.frame["d"].dt.hour.tolist() == [12, 7, 12, 7]
    mixed = table(["2024-01-01T12:00+00:00", "2024-01-01T12:00+05:00", "2024-01-01 12:00", "2024-01-01T07:00Z"])
    assert mixed.frame["d"].dt.hour.tolist() == [12, 7, 12, 7]


def test_a_target_of_dates_is_refused() -> None:
    days = [str(day.date()) for day in pd.date_range("2020-01-01", periods=30)]
    for target in (pd.to_datetime(pd.Series(days)), pd.Series(days), pd.Series(days, dtype="string")):
        with pytest.raises(BadTable, match="target column 'y' holds dates; expected classes or numbers"):
            make_raw("t", pd.DataFrame({"x": range(30), "y": target}), "y")
    few = pd.DataFrame({"x": range(30), "y": days[:2] * 15})
    assert make_raw("t", few, "y").task == "binary"
    assert make_raw("t", pd.DataFrame({"x": range(60), "y": days * 2}), "y", "multiclass").task == "multiclass"
