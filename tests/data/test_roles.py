"""Columns of weights, groups and time: read, refused, split by."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fakes import make_table
from hypothesis import given, settings
from hypothesis import strategies as st

from bishop_ray.data.load import load_dataset
from bishop_ray.data.refs import NO_ROLES, Roles, embedded_ref, file_ref
from bishop_ray.data.schema import with_roles
from bishop_ray.data.split import NoSplit, assign_groups, by_time, split_dataset, split_indices
from bishop_ray.data.table import RawDataset, TaskType
from bishop_ray.errors import BadTable, UserError

FRACTIONS = (0.7, 0.2, 0.1)


def table(rows: int = 60, **columns: Any) -> RawDataset:
    """A binary table with further columns."""
    raw = make_table(rows=rows)
    frame = raw.frame.assign(**columns)
    texts = tuple(name for name in columns if frame[name].dtype.kind not in "iufM")
    return RawDataset("t", frame, raw.target, raw.task, (*raw.categorical, *texts))


@pytest.mark.parametrize(
    ("given_roles", "words"),
    [
        ({"groups": "g", "time": "t"}, "--groups and --time exclude each other"),
        ({"groups": "g", "weights": "g"}, "--weights and --groups: expected two columns; found 'g' twice"),
        ({"time": "g", "weights": "g"}, "--weights and --time"),
    ],
)
def test_roles_that_exclude_each_other(given_roles: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Roles(**given_roles)


def test_roles_in_words() -> None:
    assert not NO_ROLES
    assert not NO_ROLES.told()
    assert not NO_ROLES.tag()
    assert NO_ROLES.facts() == {"weights": "none", "groups": "none", "time": "none", "balance": "no"}
    some = Roles("w", "g", balance=True)
    assert some.tag() == {"roles": "weights 'w', groups 'g', balance yes"}
    assert some.weighted
    assert not Roles(time="t").weighted


def test_weights_and_groups_are_no_features() -> None:
    raw = table(w=np.arange(60) + 0.5, g=[f"p{i % 7}" for i in range(60)])
    found = with_roles(raw, Roles("w", "g"))
    assert found.frame.columns.tolist() == make_table().frame.columns.tolist()
    assert found.categorical == make_table().categorical
    assert found.weights is not None
    assert found.groups is not None
    assert found.weights.tolist() == (np.arange(60) + 0.5).tolist()
    assert found.groups.tolist() == [i % 7 for i in range(60)]
    some = found.rows(np.array([3, 1, 50]))
    assert (some.weights.tolist(), some.groups.tolist()) == ([3.5, 1.5, 50.5], [3, 1, 1])  # type: ignore[union-attr]
    both = some.joined(found.rows(np.array([2])))
    assert both.weights.tolist() == [3.5, 1.5, 50.5, 2.5]  # type: ignore[union-attr]
    assert len(both) == 4


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0] * 59 + [np.nan], "expected a weight in every row; found 1 missing of 60"),
        ([1.0] * 59 + [-0.5], "expected weights >= 0, all finite; found -0.5"),
        ([1.0] * 59 + [np.inf], "expected weights >= 0, all finite; found inf"),
        ([0.0] * 60, "expected a weight above 0; found 60 of 0"),
        (["heavy"] * 60, "expected weights >= 0; found 'heavy'"),
        (pd.date_range("2024-01-01", periods=60), "expected weights >= 0; found dates"),
    ],
)
def test_weights_that_are_none(values: Any, words: str) -> None:
    with pytest.raises(BadTable) as error:
        with_roles(table(w=values), Roles("w"), "my.csv")
    assert str(error.value) == f"my.csv: --weights: column 'w': {words}"


def test_roles_that_the_table_does_not_have() -> None:
    with pytest.raises(UserError, match=r"unknown --groups column of my.csv: 'patent'; did you mean 'patient'"):
        with_roles(table(patient=range(60)), Roles(groups="patent"), "my.csv")
    with pytest.raises(UserError, match=r"--time: expected a column beside the target; found the target 'y'"):
        with_roles(table(), Roles(time="y"))
    with pytest.raises(UserError, match=r"--balance needs classes; found a regression of 'y'"):
        with_roles(make_table(TaskType.REGRESSION), Roles(balance=True))
    lone = RawDataset("t", pd.DataFrame({"g": range(60)}), make_table(rows=60).target, TaskType.BINARY, ())
    with pytest.raises(BadTable, match="expected a feature column beside 'g'; found none"):
        with_roles(lone, Roles(groups="g"))
    for gap in (None, " "):
        with pytest.raises(BadTable, match="expected a group in every row; found 2 missing of 60"):
            with_roles(table(g=["a"] * 58 + [gap, gap]), Roles(groups="g"))


@pytest.mark.parametrize(
    ("values", "seconds", "stays"),
    [
        (pd.date_range("2024-01-01", periods=60), [0, 86400], True),  # a date has a calendar
        (np.arange(60) * 10, [0, 10], False),  # a counter has none
        (np.arange(60) // 12 + 2019, [0, 0], True),  # a year comes again
    ],
)
def test_time_is_a_feature_unless_it_only_counts(values: Any, seconds: list[float], stays: bool) -> None:
    found = with_roles(table(when=values), Roles(time="when"))
    assert found.time is not None
    assert (found.time[:2] - found.time[0]).tolist() == seconds
    assert ("when" in found.frame.columns) is stays


def test_times_that_are_none() -> None:
    gap = pd.Series(pd.date_range("2024-01-01", periods=60)).mask(np.arange(60) < 3)
    with pytest.raises(BadTable, match="--time: column 'when': expected a date in every row; found 3 missing of 60"):
        with_roles(table(when=gap), Roles(time="when"))
    with pytest.raises(BadTable, match=r"expected dates \(such as 2024-01-31\) or numbers in every row; found '01/02/"):
        with_roles(table(when=["01/02/2024"] * 60), Roles(time="when"))
    with pytest.raises(BadTable, match="expected a number in every row; found 1 missing"):
        with_roles(table(when=[np.inf, *range(59)]), Roles(time="when"))


def test_a_file_with_roles(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    frame = pd.DataFrame({"x": range(40), "w": [1, 2] * 20, "day": ["2024-01-31", "5 Feb 2024"] * 20})
    frame.assign(y=["a", None, "b", "a"] * 10).to_csv(path, index=False)
    ref = file_ref(path, "y")
    raw = load_dataset(replace(ref, roles=Roles("w", time="day")))
    assert len(raw) == 30, "rows without a target are gone, and their weights with them"
    assert raw.weights is not None
    assert raw.time is not None
    assert (raw.weights == np.where(raw.frame["x"] % 2, 2, 1)).all()
    assert set(np.diff(np.unique(raw.time))) == {5 * 86400.0}
    with pytest.raises(BadTable, match=r"t.csv: --weights: column 'day': expected weights >= 0; found dates"):
        load_dataset(replace(ref, roles=Roles("day")))
    flowers = load_dataset(replace(embedded_ref("iris"), roles=Roles("petal width (cm)")))
    assert "petal width (cm)" not in flowers.frame


def test_fingerprints_tell_roles_apart() -> None:
    raw = table(w=[1, 2] * 30, g=[1, 2, 3] * 20)
    heavy = with_roles(raw, Roles("w"))
    assert len({r.fingerprint() for r in (raw, heavy, with_roles(raw, Roles(groups="g")))}) == 3
    assert heavy.fingerprint() != with_roles(table(w=[2, 1] * 30, g=[1, 2, 3] * 20), Roles("w")).fingerprint()


@pytest.mark.parametrize(
    ("task", "fingerprint", "whole", "cut"),
    [
        ("binary", "1c6545a2018c4b2f", "19439566ba7e", "55aedd9ade64"),
        ("multiclass", "956cf50a18dff6a2", "03ddbd38e013", "a60bf1f9a2f4"),
        ("regression", "ef3ec32af60f8c6a", "ed9d75bea4b5", "e9c23800c7aa"),
    ],
)
def test_without_roles_all_is_as_before_there_were_any(task: str, fingerprint: str, whole: str, cut: str) -> None:
    """Studies that were begun then go on: the same identity of the data, the same rows in every part."""
    raw = make_table(task, rows=151, with_missing=True)
    assert raw.fingerprint() == fingerprint
    assert with_roles(raw, NO_ROLES) is raw
    for rows, expected in ((None, whole), (90, cut)):
        parts = split_indices(raw, 3, max_rows=rows)
        joined = np.concatenate([parts.train, parts.validation, parts.test])
        assert hashlib.sha256(joined.tobytes()).hexdigest()[:12] == expected


def grouped(groups: Any, labels: Any) -> RawDataset:
    codes = pd.factorize(np.asarray(groups))[0].astype(np.int64)
    kind = {1: TaskType.REGRESSION, 2: TaskType.BINARY}.get(len(set(labels)), TaskType.MULTICLASS)
    frame = pd.DataFrame({"x": np.arange(len(codes), dtype=float)})
    return RawDataset("t", frame, pd.Series(labels, name="y"), kind, (), groups=codes)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=3, max_size=40),
    classes=st.integers(1, 4),
    seed=st.integers(0, 1000),
    limit=st.one_of(st.none(), st.integers(10, 60)),
)
def test_groups_stay_together(sizes: list[int], classes: int, seed: int, limit: int | None) -> None:
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    labels = rng.integers(0, classes, len(groups))
    raw = grouped(groups, labels)
    refused = ""
    try:
        parts = split_indices(raw, seed, FRACTIONS, limit)
    except BadTable as error:
        refused = str(error)
    if refused:
        assert "groups" in refused or "too few rows" in refused or "classes" in refused
        return
    found = [parts.train, parts.validation, parts.test]
    rows = np.concatenate(found)
    assert len(np.unique(rows)) == len(rows) == min(limit or len(groups), len(groups))
    assert all(len(part) for part in found)
    owners = Counter(group for part in found for group in set(groups[part]))
    assert set(owners.values()) == {1}
    assert set(labels[parts.train]) >= set(labels[rows]), "every class is in train"
    again = split_indices(raw, seed, FRACTIONS, limit)
    assert all(np.array_equal(one, other) for one, other in zip(found, vars(again).values(), strict=True))
    moved = RawDataset("t", raw.frame.set_index(rng.permutation(len(raw)) * 3), raw.target, raw.task, (),
                       groups=raw.groups)  # fmt: skip
    assert np.array_equal(split_indices(moved, seed, FRACTIONS, limit).test, parts.test), "the index plays no part"


def test_sizes_and_classes_are_as_near_as_groups_allow() -> None:
    """Ten seeds; groups of 1 to 12 rows and classes that keep to a few groups."""
    firsts = set()
    for seed in range(10):
        rng = np.random.default_rng(seed)
        groups = np.repeat(np.arange(150), rng.integers(1, 13, 150))
        rate = np.where(np.arange(150) % 5 == 0, 0.5, 0.02)[groups]
        labels = (rng.random(len(groups)) < rate).astype(int)
        parts = split_indices(grouped(groups, labels), seed, FRACTIONS)
        for part, share in zip(vars(parts).values(), FRACTIONS, strict=True):
            assert len(part) / len(groups) == pytest.approx(share, abs=0.01)
            assert labels[part].mean() == pytest.approx(labels.mean(), abs=0.02)
        firsts.add(tuple(sorted(set(groups[parts.test]))))
    assert len(firsts) == 10, "another seed, another split"


@pytest.mark.parametrize("seed", range(6))
def test_three_groups_of_the_right_sizes_find_their_places(seed: int) -> None:
    raw = grouped(np.repeat(["a", "b", "c"], [20, 70, 10]), [0.0] * 100)
    parts = split_dataset(raw, seed, FRACTIONS)
    assert [len(part) for part in vars(parts).values()] == [70, 20, 10]


def test_groups_that_cannot_be_divided() -> None:
    with pytest.raises(BadTable, match="--groups: no split into train, validation and test: expected at least 3 groups;"
                       " found 2"):  # fmt: skip
        split_indices(grouped([1, 2] * 30, [0, 1, 1, 0] * 15), 0)
    with pytest.raises(NoSplit, match="found none"):  # every class has its own group: all must train
        assign_groups(np.eye(3, dtype=np.int64) * 20, FRACTIONS)
    # one group has a class alone: it trains, whatever is nearer
    counts = np.array([[0, 10], [20, 0], [20, 0], [20, 0]])
    assert assign_groups(counts, (0.2, 0.4, 0.4))[0] == 0


@settings(max_examples=60, deadline=None)
@given(times=st.lists(st.integers(0, 30), min_size=10, max_size=80), seed=st.integers(0, 99))
def test_time_divides_earlier_from_later(times: list[int], seed: int) -> None:
    time = np.array(times, np.float64)
    raw = RawDataset("t", pd.DataFrame({"x": time}), pd.Series(time, name="y"), TaskType.REGRESSION, (), time=time)
    if len(set(times)) < 3:
        with pytest.raises(
            BadTable, match=f"--time: expected at least three different times .*; found {len(set(times))}"
        ):
            split_indices(raw, seed)
        return
    parts = split_indices(raw, seed, FRACTIONS)
    assert np.array_equal(np.sort(np.concatenate(list(vars(parts).values()))), np.arange(len(time)))
    assert time[parts.train].max() < time[parts.validation].min()
    assert time[parts.validation].max() < time[parts.test].min()
    counts = np.array(sorted(Counter(times).values()))
    if len(counts) == len(times):  # no ties: the exact sizes
        assert len(parts.train) == int(len(times) * 0.7 + 0.5)
    assert np.array_equal(split_indices(raw, seed, FRACTIONS).validation, parts.validation)


def test_ties_move_a_border_to_their_nearer_end() -> None:
    time = np.array([1.0] * 5 + [2.0] * 4 + [3.0] * 1)
    assert [len(part) for part in by_time(time, (7, 2, 1))] == [5, 4, 1]  # type: ignore[union-attr]
    wide = np.array([1.0] * 1 + [2.0] * 8 + [3.0] * 1)  # one time spans two borders
    assert [len(part) for part in by_time(wide, (7, 2, 1))] == [1, 8, 1]  # type: ignore[union-attr]


def test_a_class_of_later_rows_only_is_refused() -> None:
    labels = ["a", "b"] * 45 + ["new"] * 10
    raw = RawDataset("t", pd.DataFrame({"x": range(100)}), pd.Series(labels, name="y"), TaskType.MULTICLASS, (),
                     time=np.arange(100.0))  # fmt: skip
    with pytest.raises(
        BadTable, match=r"every class of 'y' among the earliest 70 rows \(train\); found 'new' in later"
    ):
        split_indices(raw, 0)
