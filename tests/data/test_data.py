"""Names, files, embedded tables, task inference, splits."""

from __future__ import annotations

import datetime
import gzip
import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fakes import make_table
from hypothesis import given, settings
from hypothesis import strategies as st

from bishop_ray.data import (
    DatasetRef,
    RawDataset,
    SplitProtocol,
    TaskType,
    embedded_ref,
    file_ref,
    list_datasets,
    load_dataset,
    protocol,
    split_dataset,
    suite_id,
    task_ref,
)
from bishop_ray.data.refs import EMBEDDED
from bishop_ray.data.schema import infer_task
from bishop_ray.data.split import DATASETS_I, DATASETS_II, split_indices
from bishop_ray.errors import BadTable, UnknownName, UserError


def save(folder: Path, text: str | bytes, name: str = "table.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def load(path: Path, target: str = "y", task_type: str = "") -> RawDataset:
    return load_dataset(file_ref(path, target, task_type))


# names


@pytest.mark.parametrize(("name", "number"), [("CC", 334), ("nc", 337), ("Cr", 335), (" NR ", 336), ("99", 99)])
def test_suite_id(name: str, number: int) -> None:
    assert suite_id(name) == number


@pytest.mark.parametrize("name", ["CX", "", "-3", "0", "3.5", "²"])
def test_unknown_suite(name: str) -> None:
    with pytest.raises(UnknownName, match="unknown suite"):
        suite_id(name)


def test_listing_and_refs_load_nothing_heavy() -> None:
    code = (
        "import sys, bishop_ray.data as d; d.list_datasets(); d.suite_id('CR'); d.task_ref(1); d.embedded_ref('iris');"
        "print([m for m in ('pandas', 'numpy', 'torch', 'openml', 'sklearn') if m in sys.modules])"
    )
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_tables_and_their_listed_facts(name: str) -> None:
    raw = load_dataset(embedded_ref(name))
    (facts,) = [row for row in list_datasets() if row.name == name]
    assert (facts.rows, facts.features, facts.task) == (*raw.frame.shape, raw.task.value)
    assert raw.categorical == ()


def test_embedded_classes_have_their_names() -> None:
    assert set(load_dataset(embedded_ref("iris")).target) == {"setosa", "versicolor", "virginica"}
    assert set(load_dataset(embedded_ref("digits")).target) == set(range(10))


def test_unknown_embedded() -> None:
    with pytest.raises(UnknownName, match=r"unknown dataset 'irsi'; did you mean 'iris'\?"):
        embedded_ref("irsi")


@pytest.mark.parametrize("task", ["x", "-1", "0", "1.5", ""])
def test_bad_task_number(task: str) -> None:
    with pytest.raises(UserError, match="must be a positive number; found"):
        task_ref(task)


# files


def test_formats_agree(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1, 2, 3, 4], "b": ["x", "y", None, "x"], "y": ["p", "q", "p", "q"]})
    text = frame.to_csv(index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    paths = [
        save(tmp_path, text),
        save(tmp_path, "\ufeff" + text, "bom.csv"),
        save(tmp_path, gzip.compress(text.encode()), "t.csv.gz"),
        save(tmp_path, text.replace(",", "\t"), "t.tsv"),
        tmp_path / "t.parquet",
    ]
    tables = [load(path) for path in paths]
    assert len({table.fingerprint() for table in tables}) == 1
    assert (tables[0].task, tables[0].categorical) == (TaskType.BINARY, ("b",))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "", "the file is empty"),
        ("t.csv", "a,y\n", "expected rows; found none"),
        ("t.csv", "y\n1\n2\n", "expected a feature column beside the target 'y'; found none"),
        ("t.csv", "a,a,y\n1,2,3\n", "column 'a' comes 2 times; expected unique names"),
        ("t.csv", "a,y\n1,x\n2,x\n", "needs at least two classes; found one: 'x'"),
        ("t.csv", "a,y\n1,\n2,\n", "target column 'y' is all missing"),
        ("t.csv", "a,y\n1,2\n2,3,4\n", "cannot be read: .*line 3"),
        ("t.csv", "a,y\n1,x,5\n2,z,6\n", "cannot be read: Length of header"),
        ("t.csv", b"\xff\xfe\x00", "cannot be read: 'utf-8' codec"),
        ("t.csv.gz", b"garbage", "cannot be read: Not a gzipped file"),
        ("t.csv.gz", gzip.compress(b"a,y\n1,2\n" * 99, mtime=0)[:30], "cannot be read: "),
        ("t.parquet", b"garbage", "cannot be read: "),
        ("t.parquet", b"PAR1" + b"x" * 99 + b"PAR1", "cannot be read: "),
    ],
)
def test_tables_that_are_refused(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(BadTable, match=message) as caught:
        load(save(tmp_path, content, name))
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadTable, match="expected a table file; found no such file"):
        file_ref(tmp_path / "none.csv", "y")
    with pytest.raises(BadTable, match=r"expected a file ending in \.csv"):
        file_ref(save(tmp_path, "x", "t.xlsx"), "y")
    with pytest.raises(UnknownName, match="unknown task type 'regresion'; did you mean 'regression'"):
        file_ref(save(tmp_path, "x"), "y", "regresion")
    with pytest.raises(UserError, match="expected the name of the target column"):
        file_ref(save(tmp_path, "x"), "")


def test_target_that_is_no_column(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"'incom'; did you mean 'income'\?"):
        load(save(tmp_path, "age,income\n1,2\n3,4\n"), "incom")
    wide = ",".join(f"c{i}" for i in range(500))
    with pytest.raises(UnknownName, match=r"did you mean 'c49'\?") as caught:
        load(save(tmp_path, f"{wide}\n{wide}\n", "wide.csv"), "c49x")
    assert len(str(caught.value)) < 400


def test_target_missing_in_some_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = load(save(tmp_path, "a,y\n1,1.5\n2,\n3,4\n4,\n5,inf\n6,7\n"), task_type="regression")
    assert raw.frame["a"].tolist() == [1, 3, 6]
    assert raw.target.tolist() == [1.5, 4.0, 7.0]
    assert "dropped 2 rows without a target" in caplog.text
    assert "dropped 1 rows with an infinite target" in caplog.text


def test_column_names_of_any_kind(tmp_path: Path) -> None:
    names = ["", " ", 'a:"[]{},', "возраст", "🎈", "a b", "0"]
    frame = pd.DataFrame({name: range(4) for name in names}).assign(y=list("abab"))
    frame.to_parquet(tmp_path / "t.parquet")
    assert list(load(tmp_path / "t.parquet").frame.columns) == names


def test_dates_in_parquet_are_moments(tmp_path: Path) -> None:
    days = [datetime.date(2024, 1, day) for day in range(1, 5)]
    pd.DataFrame({"day": days, "y": list("abab")}).to_parquet(tmp_path / "t.parquet")
    raw = load(tmp_path / "t.parquet")
    assert raw.categorical == ()
    assert raw.frame["day"].dtype.kind == "M"


def test_which_columns_are_categories(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "text": list("abcd"),
            "digits": list("1234"),
            "digit_category": pd.Categorical(list("1212")),
            "flag": [True, False, True, False],
            "flag_na": pd.array([True, None, False, None], "boolean"),
            "whole": [1, 2, 3, 4],
            "whole_na": pd.array([1, None, 3, 4], "Int64"),
            "real": [0.5, 1.5, None, 2.5],
            "when": pd.to_datetime(["2024-01-01"] * 4),
            "y": list("abab"),
        }
    )
    frame.to_parquet(tmp_path / "t.parquet")
    assert load(tmp_path / "t.parquet").categorical == ("text", "digit_category", "flag", "flag_na")


# task types


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 1] * 20, "binary"),
        ([0.0, 1.0] * 20, "binary"),
        (list(range(20)) * 2, "multiclass"),
        (list(range(21)) * 2, "regression"),
        ([i / 7 for i in range(40)], "regression"),
        ([i / 7 for i in range(15)], "regression"),
        ([0.5, 1.5] * 20, "binary"),
        (["1", "2", "3"] * 5, "multiclass"),
        ([True, False] * 5, "binary"),
        (pd.array([1, 2, 1, 2], "Int64"), "binary"),
        (pd.Categorical(["a", "b"] * 4, categories=["a", "b", "c"]), "binary"),
    ],
)
def test_inferred_task(values: object, expected: str) -> None:
    assert infer_task(pd.Series(values, name="y")) == expected


@pytest.mark.parametrize(
    ("values", "task_type", "message"),
    [
        (["a", "b"], "regression", "cannot be a regression target: .*found 'a'"),
        ([1, 2, 3], "binary", "needs two classes for the task type binary; found 3"),
        ([1, 2, 1], "multiclass", "needs three classes or more"),
        ([1, 1, 1], "classification", "needs at least two classes; found one"),
        (pd.to_datetime(["2024-01-01", "2024-01-02"]), "", "holds dates"),
    ],
)
def test_task_type_that_does_not_fit(values: object, task_type: str, message: str) -> None:
    with pytest.raises(BadTable, match=message):
        infer_task(pd.Series(values, name="y"), task_type)


def test_task_type_overrides() -> None:
    assert infer_task(pd.Series([1, 2] * 9), "regression") == "regression"
    assert infer_task(pd.Series(np.arange(50) / 3), "classification") == "multiclass"
    assert infer_task(pd.Series(["1", "2"] * 9), "regression") == "regression"


# splits


def parts(raw: RawDataset, seed: int = 0, **options: object) -> list[np.ndarray]:
    split = split_indices(raw, seed, **options)  # type: ignore[arg-type]
    return [split.train, split.validation, split.test]


def test_protocols() -> None:
    assert protocol(embedded_ref("iris")) == DATASETS_I == SplitProtocol((0.7, 0.2, 0.1), None)
    assert protocol(task_ref(1)) == DATASETS_II == SplitProtocol((0.7, 0.09, 0.21), 10_000)
    assert protocol(task_ref(1), max_rows=0).max_rows is None
    assert protocol(DatasetRef("file", "/x.csv", "x"), (0.5, 0.25, 0.25), 100) == SplitProtocol((0.5, 0.25, 0.25), 100)


@pytest.mark.parametrize("fractions", [(0.5, 0.5, 0.0), (0.7, 0.2, 0.2), (1.2, -0.1, -0.1), (float("nan"), 0.5, 0.5)])
def test_fractions_that_are_refused(fractions: tuple[float, float, float]) -> None:
    with pytest.raises(UserError, match="sum to 1; found"):
        split_dataset(make_table(), 0, fractions)


@pytest.mark.parametrize("task", list(TaskType))
def test_sizes_of_a_suite_dataset(task: TaskType) -> None:
    raw = make_table(task, 2, 1, rows=12_345)
    assert [len(part) for part in parts(raw, 0, fractions=DATASETS_II.fractions, max_rows=10_000)] == [7000, 900, 2100]


@pytest.mark.parametrize("task", list(TaskType))
def test_disjoint_covering_repeatable(task: TaskType) -> None:
    raw = make_table(task, 2, 1, rows=501)
    first = parts(raw, 3)
    assert sorted(np.concatenate(first)) == list(range(501))
    assert [len(part) for part in first] == [351, 100, 50]
    assert all((a == b).all() for a, b in zip(first, parts(raw, 3), strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, parts(raw, 4), strict=True))


def test_the_index_plays_no_part() -> None:
    raw = make_table(rows=200)
    shuffled = RawDataset(
        raw.name, raw.frame.set_axis(range(900, 700, -1)), raw.target.set_axis(["i"] * 200), raw.task, raw.categorical
    )
    first, second = split_dataset(raw, 1), split_dataset(shuffled, 1)
    pd.testing.assert_frame_equal(first.train.frame, second.train.frame)
    pd.testing.assert_series_equal(first.test.target, second.test.target)


@pytest.mark.parametrize(
    ("task", "rows", "order"),
    [
        ("regression", "b5ff8dc469a6c3ca", "57b8aba84ef15e00"),
        ("multiclass", "f26278650fa97b9a", "45d4909ae1e884c6"),
    ],
)
def test_the_same_rows_on_every_machine(task: str, rows: str, order: str) -> None:
    """Pinned: a change here gives every stored study other rows, or the same in another order."""

    def digest(parts: list[np.ndarray]) -> str:
        return hashlib.sha256(b"".join(part.astype("<i8").tobytes() for part in parts)).hexdigest()[:16]

    target = pd.Series(np.arange(12_000) ** 2 % 7 // 2, name="y")
    raw = RawDataset("t", pd.DataFrame({"x": range(12_000)}), target, TaskType(task), ())
    found = parts(raw, 7, fractions=DATASETS_II.fractions, max_rows=10_000)
    assert digest([np.sort(part) for part in found]) == rows
    assert digest(found) == order


def test_stratified() -> None:
    target = pd.Series(["a"] * 900 + ["b"] * 90 + ["c"] * 10, name="y")
    raw = RawDataset("t", pd.DataFrame({"x": range(1000)}), target, TaskType.MULTICLASS, ())
    counts = split_dataset(raw, 0).map(lambda part: part.target.value_counts().to_dict())
    assert counts.train == {"a": 630, "b": 63, "c": 7}
    assert counts.validation == {"a": 180, "b": 18, "c": 2}
    assert counts.test == {"a": 90, "b": 9, "c": 1}


@pytest.mark.parametrize("seed", range(5))
def test_a_class_of_one_row_is_trained_on(seed: int) -> None:
    target = pd.Series(["a"] * 60 + ["b"] * 39 + ["only", "two", "two"], name="y")
    raw = RawDataset("t", pd.DataFrame({"x": range(102)}), target, TaskType.MULTICLASS, ())
    split = split_dataset(raw, seed)
    assert set(split.train.target) == {"a", "b", "only", "two"}
    cut = split_dataset(raw, seed, max_rows=20)
    assert set(cut.train.target) == {"a", "b", "only", "two"}
    assert [len(part) for part in (cut.train, cut.validation, cut.test)] == [14, 4, 2]


@given(
    counts=st.lists(st.integers(1, 40), min_size=2, max_size=8),
    seed=st.integers(0, 2**40),
    cut=st.one_of(st.none(), st.integers(20, 200)),
)
@settings(max_examples=60, deadline=None)
def test_any_class_counts(counts: list[int], seed: int, cut: int | None) -> None:
    target = pd.Series(np.repeat(np.arange(len(counts)), counts), name="y")
    raw = RawDataset("t", pd.DataFrame({"x": range(len(target))}), target, TaskType.MULTICLASS, ())
    rows = min(len(raw), cut or len(raw))
    sizes = [int(rows * 0.7 + 0.5), int(rows * 0.2 + 0.5)]
    if len(counts) > sizes[0] or sizes[1] < 1 or sum(sizes) >= rows:
        with pytest.raises(BadTable, match=r"too few rows|classes for"):
            parts(raw, seed, max_rows=cut)
        return
    train, validation, test = parts(raw, seed, max_rows=cut)
    assert [len(train), len(validation)] == sizes
    kept = np.concatenate([train, validation, test])
    assert len(set(kept)) == len(kept) == min(len(raw), cut or len(raw))
    assert set(target.iloc[train]) == set(range(len(counts)))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_too_few_rows(rows: int) -> None:
    raw = RawDataset("tiny", pd.DataFrame({"x": range(rows)}), pd.Series(range(rows)), TaskType.REGRESSION, ())
    with pytest.raises(BadTable, match=f"tiny: too few rows to split: {rows} rows"):
        split_dataset(raw, 0)


def test_more_classes_than_rows() -> None:
    target = pd.Series([f"id{i}" for i in range(50)], name="id")
    raw = RawDataset("t", pd.DataFrame({"x": range(50)}), target, TaskType.MULTICLASS, ())
    with pytest.raises(BadTable, match="target column 'id' has 50 classes for 35 training rows"):
        split_dataset(raw, 0)


def test_seed_below_zero() -> None:
    with pytest.raises(UserError, match="the seed must be >= 0; found -1"):
        split_dataset(make_table(), -1)


@pytest.mark.parametrize(("rows", "rare"), [(100, 5), (300, 4), (40, 3), (60, 1), (60, 2)])
def test_a_rare_class_is_in_every_part_that_it_can_fill(rows: int, rare: int) -> None:
    raw = make_table("binary", rows=rows)
    target = pd.Series(["yes"] * rare + ["no"] * (rows - rare), name="target")
    parts = split_dataset(replace(raw, target=target), seed=0)
    counts = [int((part.target == "yes").sum()) for part in (parts.train, parts.validation, parts.test)]
    assert sum(counts) == rare
    assert sum(count > 0 for count in counts) == min(rare, 3)
    assert counts[0] > 0
