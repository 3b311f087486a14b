"""Rows as text."""

from __future__ import annotations

from bishop_ray.search.leaderboard import rows_csv, rows_text


def test_columns_are_aligned_with_the_digits_they_need() -> None:
    rows = [
        {"name": "a", "n": 3, "alpha": 1.5, "score": 0.91234, "rise": 2.8e-14},
        {"name": "long", "n": 12, "alpha": 2.0, "score": "", "rise": 0.0},
    ]
    assert rows_text(rows).splitlines() == [
        "name   n  alpha   score     rise",
        "a      3    1.5  0.9123  2.8e-14",
        "long  12    2.0                0",
    ]
    assert rows_text([]) == "none"


def test_csv_has_full_precision_and_every_column() -> None:
    text = rows_csv([{"a": 0.1 + 0.2}, {"b": None, "a": 1}])
    assert text == "a,b\n0.30000000000000004,\n1,\n"
