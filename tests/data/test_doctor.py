"""The examination of a table: every kind of finding, found where it is and not where it is not."""

from __future__ import annotations

import datetime
import json
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bishop_ray.cli import doctor
from bishop_ray.data.doctor import examine, warnings_of
from bishop_ray.data.doctor.findings import DROPPED, ENCODED, NOTED, REFUSED, WARNED, Finding, TableReport, shortened
from bishop_ray.data.schema import make_raw
from bishop_ray.data.split import split_dataset
from bishop_ray.errors import BadTable, UserError

ROWS = 300


def table(rows: int = ROWS, regression: bool = False, **columns: object) -> pd.DataFrame:
    """A plain table without any finding, and further columns; its target follows from `size` and `kind` with noise."""
    rng = np.random.default_rng(0)
    size, kind = rng.normal(size=rows), rng.choice(["red", "green", "blue"], rows)
    value = size + (kind == "red") + rng.normal(size=rows)
    target = value if regression else np.where(value > 0.3, "yes", "no")
    return pd.DataFrame({"size": size, "kind": kind, **columns, "y": target})


def found(frame: pd.DataFrame, kind: str, **options: str) -> list[Finding]:
    return [f for f in examine(frame, "y", **options).findings if f.kind == kind]


def one(frame: pd.DataFrame, kind: str, **options: str) -> Finding:
    matches = found(frame, kind, **options)
    assert len(matches) == 1, examine(frame, "y", **options).findings
    return matches[0]


@pytest.mark.parametrize("regression", [False, True])
def test_a_plain_table_has_no_findings(regression: bool) -> None:
    report = examine(table(regression=regression), "y")
    assert report.findings == ()
    assert report.refused == ""
    assert [(c.name, c.read_as, c.distinct) for c in report.columns] == [
        ("size", "number", ROWS),
        ("kind", "category", 3),
    ]


# names


def test_case_21_duplicate_names_are_refused_with_the_line_of_a_search() -> None:
    frame = table(extra=1.0).set_axis(["size", "size", "extra", "y"], axis=1)
    report = examine(frame, "y", where="my.csv")
    assert [f.action for f in report.findings] == [REFUSED, REFUSED]
    assert report.findings[0] == Finding("duplicate name", "size", "2 columns have this name", REFUSED)
    with pytest.raises(BadTable, match="comes 2 times") as error:
        make_raw("my", frame, "y", where="my.csv")
    assert report.refused == str(error.value)


def test_case_25_names_of_every_kind_are_noted() -> None:
    names = ["", "Unnamed: 4", ' "a": [1]', "b{}", "цена", "\U0001f600", 7, "line\nbreak", "Size", "u\u0308"]
    frame = table().join(pd.DataFrame({n: np.arange(ROWS) % 5 + i for i, n in enumerate(names)}))
    report = examine(frame, "y")
    kinds = {f.kind: f for f in report.findings}
    assert set(kinds) == {"empty name", "odd name", "unicode name", "similar names"}
    assert all(f.action == NOTED for f in report.findings)
    assert kinds["empty name"].column == "'', Unnamed: 4"
    assert "NFC" in kinds["unicode name"].detail
    assert "'Size'" in kinds["similar names"].column
    odd = [f.column for f in report.findings if f.kind == "odd name"]
    assert odd == ["' \"a\": [1]'", "b{}", "'line\\nbreak'", "7"]
    assert {c.name for c in report.columns} == {str(n) for n in names} | {"size", "kind"}


# columns


def test_cases_3_and_4_columns_without_information_are_one_line_each() -> None:
    empty = {f"empty{i}": np.nan for i in range(2)}
    report = examine(table(**{f"const{i}": i for i in range(8)}, **empty), "y")
    assert [(f.kind, f.action) for f in report.findings] == [("all missing", DROPPED), ("constant", DROPPED)]
    assert report.findings[1].column == "const0, const1, const2, const3, const4 and 3 more"
    assert {c.name for c in report.columns if c.read_as == DROPPED} == {*empty, *(f"const{i}" for i in range(8))}


def test_a_column_that_is_constant_in_the_training_rows_only() -> None:
    frame = table(rare=np.where(np.arange(ROWS) == 0, 1.0, 0.0))
    seed = next(
        s
        for s in range(50)
        if 0
        not in split_dataset(make_raw("t", frame.assign(rare=np.arange(ROWS)), "y"), s).train.frame["rare"].to_numpy()
    )
    report = examine(frame, "y", seed=seed)
    assert [(f.kind, f.column, f.action) for f in report.findings] == [("constant", "rare", DROPPED)]
    assert "training rows" in report.findings[0].detail


@pytest.mark.parametrize(
    "values",
    [
        np.random.default_rng(1).permutation(ROWS) + 1000,
        (np.random.default_rng(1).permutation(ROWS) + 1000).astype(float),
        [f"C-{i:05d}" for i in np.random.default_rng(1).permutation(ROWS)],
    ],
    ids=["int", "whole float", "text"],
)
def test_ids(values: object) -> None:
    finding = one(table(customer=values), "id-like")
    # a text that never repeats says nothing to a model
    assert (finding.column, finding.action) == ("customer", DROPPED if isinstance(values, list) else ENCODED)
    assert not found(table(customer=values), "leak")


@pytest.mark.parametrize(
    "values",
    [
        np.random.default_rng(1).integers(0, 100, ROWS),
        np.random.default_rng(1).integers(0, 10**9, ROWS),
        np.random.default_rng(1).normal(size=ROWS),
        [f"C-{i % 150:05d}" for i in range(ROWS)],
    ],
    ids=["small numbers", "large numbers", "float", "text that repeats"],
)
def test_no_ids(values: object) -> None:
    assert not found(table(amount_paid=values), "id-like")


DAYS = pd.date_range("2020-01-30", periods=ROWS)


@pytest.mark.parametrize(
    "values",
    [
        DAYS,
        [day.date() for day in DAYS],
        DAYS.strftime("%Y-%m-%d"),
        DAYS.strftime("%Y-%m-%dT%H:%M:%SZ"),
        DAYS.strftime("%d.%m.%Y"),
        DAYS.strftime("%m/%d/%y"),
        DAYS.strftime("%d %b %Y"),
        DAYS.strftime("%Y%m%d").astype(int),
    ],
    ids=["datetime", "date", "iso", "iso time", "german", "american", "words", "whole numbers"],
)
def test_dates(values: object) -> None:
    finding = one(table(when=values), "date-like")
    american = "/" in str(next(iter(values)))  # type: ignore[call-overload]
    assert (finding.column, finding.action) == ("when", DROPPED if american else ENCODED)  # it reads two ways
    assert not found(table(when=values), "id-like")


@pytest.mark.parametrize(
    "values",
    [
        np.arange(ROWS) % 30 + 1990,
        [f"10.0.{i % 250}.1" for i in range(ROWS)],
        [f"{i % 90}-{i % 7}" for i in range(ROWS)],
    ],
    ids=["years", "addresses", "ranges"],
)
def test_no_dates(values: object) -> None:
    assert not found(table(when=values), "date-like")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["n/a" if i % 50 == 0 else str(i % 40) for i in range(ROWS)], "294 numbers and 6 other texts such as 'n/a'"),
        ([["a", 1, True, datetime.date(2020, 1, 1)][i % 4] for i in range(ROWS)], "75 texts"),
    ],
    ids=["numbers with a word", "python objects"],
)
def test_mixed_types(values: object, words: str) -> None:
    finding = one(table(amount=pd.Series(values, dtype=object)), "mixed types")
    assert finding.action == ENCODED
    assert words in finding.detail


def test_no_mixed_types() -> None:
    texts = ["a", "b", None, "?"] * (ROWS // 4)
    numbers = [1, 2.5, None, "3"] * (ROWS // 4)
    assert not found(
        table(t=texts, n=pd.Series(numbers[:ROWS]).astype("str"), b=[True, None, False] * 100), "mixed types"
    )


def test_infinities_count_as_missing() -> None:
    values = np.where(np.arange(ROWS) % 30 == 0, np.inf, np.arange(ROWS) % 7)
    report = examine(table(ratio=values), "y")
    assert [(f.kind, f.action) for f in report.findings] == [("infinite", ENCODED)]
    assert [(c.missing, c.infinite) for c in report.columns if c.name == "ratio"] == [(0, 10)]


def test_many_categories() -> None:
    rng = np.random.default_rng(2)
    assert one(table(street=[f"street {i}" for i in rng.integers(0, 150, ROWS)]), "many categories").action == ENCODED
    assert not found(table(street=[f"street {i}" for i in rng.integers(0, 20, ROWS)]), "many categories")


# the target


def test_case_24_rows_without_a_target_are_dropped_and_counted() -> None:
    frame = table()
    frame.loc[[1, 2, 3], "y"] = [None, np.nan, " "]
    report = examine(frame, "y")
    assert [(f.kind, f.action) for f in report.findings] == [("missing target", DROPPED)]
    assert report.findings[0].detail.startswith(f"3 of {ROWS} rows")
    assert report.rows == ROWS - 3
    infinite = table(regression=True)
    infinite.loc[0, "y"] = -np.inf
    assert one(infinite, "missing target").detail.startswith(f"1 of {ROWS} rows")


@pytest.mark.parametrize("labels", [["a"] * 10, [1, 2] * 100, [datetime.datetime(2020, 1, 1)] * 10])
def test_a_target_that_cannot_be_learnt_is_refused_with_the_line_of_a_search(labels: list[object]) -> None:
    frame = pd.DataFrame({"x": np.arange(len(labels)), "y": labels})
    options = {"task_type": "multiclass"} if labels[0] == 1 else {}
    report = examine(frame, "y", where="my.csv", **options)
    with pytest.raises(UserError) as error:
        make_raw("t", frame, "y", where="my.csv", **options)
    assert report.refused == str(error.value)
    assert report.findings[-1] == Finding("refused", "", report.refused, REFUSED)


def test_cases_8_and_27_rare_classes_and_imbalance() -> None:
    frame = table()
    frame["y"] = np.where(np.arange(ROWS) == 7, "one", np.where(np.arange(ROWS) % 60 == 0, "five", "most"))
    report = examine(frame, "y")
    assert report.classes == (("most", 294), ("five", 5), ("one", 1))
    assert {f.kind for f in report.findings} == {"rare class", "imbalance"}
    assert "one (1), five (5)" in next(f.detail for f in report.findings if f.kind == "rare class")


def test_numbers_read_as_classes() -> None:
    frame = table().assign(y=np.random.default_rng(3).integers(3, 9, ROWS))
    assert "--task-type regression" in one(frame, "task type").detail
    assert not found(frame, "task type", task_type="classification")


def test_few_rows() -> None:
    assert [f.kind for f in examine(table(rows=100), "y").findings] == ["few rows"]
    report = examine(table(rows=3, regression=True), "y", where="my.csv")
    assert "too few rows to split" in report.refused
    assert report.refused.startswith("my.csv: ")


# leaks


CLASS_LEAKS = {
    "copy": lambda y, rng: y,
    "renamed": lambda y, rng: y.map({"yes": "T", "no": "F"}),
    "number": lambda y, rng: (y == "yes").astype(int),
    "many to one": lambda y, rng: y + "-" + pd.Series(rng.integers(0, 8, len(y)).astype(str)),
    "threshold": lambda y, rng: np.where(y == "yes", 5.0, 0.0) + rng.random(len(y)),
    "missing when": lambda y, rng: pd.Series(rng.random(len(y))).where(y == "yes"),
    "copy with holes": lambda y, rng: y.where(rng.random(len(y)) > 0.3),
    "number of a sorted row": None,
}


@pytest.mark.parametrize("kind", CLASS_LEAKS)
def test_columns_that_determine_a_class_leak(kind: str) -> None:
    frame, make = table(), CLASS_LEAKS[kind]
    if make is None:
        frame = frame.sort_values("y").reset_index(drop=True)
        frame["leak"] = np.arange(ROWS)
    else:
        frame["leak"] = make(frame["y"], np.random.default_rng(4))
    finding = one(frame, "leak")
    assert (finding.column, finding.action) == ("leak", WARNED)
    assert ("equals the target" in finding.detail) == (kind in ("copy", "copy with holes"))


NUMBER_LEAKS = {
    "copy": lambda y, rng: y,
    "linear": lambda y, rng: 3 - 2 * y,
    "monotone": lambda y, rng: np.exp(2 * y),
    "rounded": lambda y, rng: (y * 100).round(),
    "with a little noise": lambda y, rng: y + 0.01 * rng.normal(size=len(y)),
    "copy with holes": lambda y, rng: y.where(rng.random(len(y)) > 0.3),
    "with one far value": lambda y, rng: 3 - 2 * y,
}


@pytest.mark.parametrize("kind", NUMBER_LEAKS)
def test_columns_that_determine_a_number_leak(kind: str) -> None:
    frame = table(regression=True)
    if kind == "with one far value":
        frame.loc[5, "y"] = 1e12
    frame["leak"] = NUMBER_LEAKS[kind](frame["y"], np.random.default_rng(4))
    finding = one(frame, "leak")
    assert (finding.column, finding.action) == ("leak", WARNED)
    assert ("equals" in finding.detail) == (kind in ("copy", "copy with holes"))


@pytest.mark.parametrize("regression", [False, True])
def test_what_tells_rows_apart_is_no_leak(regression: bool) -> None:
    rng = np.random.default_rng(5)
    frame = table(
        regression=regression, id=rng.permutation(ROWS), name=[f"n{i}" for i in range(ROWS)], noise=rng.random(ROWS)
    )
    assert not found(frame, "leak")
    twice = pd.concat([frame, frame], ignore_index=True)  # each value is seen again, with the same target
    assert not found(twice, "leak")


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_strong_honest_column_is_no_leak(share: float) -> None:
    rng = np.random.default_rng(6)
    positive = rng.random(2000) < share
    wrong = rng.random(2000) < 0.1 * share
    frame = table(rows=2000).assign(y=np.where(positive, "yes", "no"), strong=np.where(positive ^ wrong, 1, 0))
    assert not found(frame, "leak")
    linear = table(rows=2000, regression=True)
    assert not found(linear.assign(strong=linear["y"] + 0.2 * rng.normal(size=2000)), "leak")


def test_rows_on_both_sides_of_the_split() -> None:
    frame = table()
    twice = pd.concat([frame, frame.iloc[: ROWS // 2]], ignore_index=True)
    finding = one(twice, "duplicate rows")
    assert finding.action == WARNED
    assert f"target included: {ROWS // 2}" in finding.detail
    few = pd.concat([frame, frame.iloc[:5]], ignore_index=True)
    assert one(few, "duplicate rows").action == NOTED
    other = frame.iloc[:40].assign(y=frame["y"].iloc[:40].map({"yes": "no", "no": "yes"}))
    kinds = [f.kind for f in examine(pd.concat([frame, other], ignore_index=True), "y").findings]
    assert kinds == ["contradicting rows"]


def test_few_values_repeat_by_themselves() -> None:
    rng = np.random.default_rng(7)
    frame = pd.DataFrame({name: rng.integers(0, 3, 600) for name in "abcd"} | {"y": rng.choice(["u", "v"], 600)})
    assert {f.kind: f.action for f in examine(frame, "y").findings} == {
        "duplicate rows": NOTED,
        "contradicting rows": NOTED,
    }


# the whole


def test_a_search_is_told_of_its_own_rows_only() -> None:
    frame = table(rows=1000, code=np.random.default_rng(8).permutation(1000))
    frame["leak"] = (frame["y"] == "yes").astype(int)
    parts = split_dataset(make_raw("t", frame, "y"), 0)
    whole = warnings_of(parts.train, parts.validation)
    assert [(f.kind, f.column) for f in whole] == [("leak", "leak"), ("id-like", "code")]
    assert [f.kind for f in warnings_of(parts.train, parts.validation, most_cells=100)] == ["leak", "id-like"]
    clean = split_dataset(make_raw("t", table(rows=1000), "y"), 0)
    assert warnings_of(clean.train, clean.validation) == []


def test_a_wide_table_is_no_flood() -> None:
    findings = [Finding("id-like", f"c{i}", "", ENCODED) for i in range(500)] + [Finding("leak", "x", "", WARNED)]
    kept = shortened(findings)
    assert len(kept) == 7
    assert kept[5].detail == "495 more columns like these"
    assert shortened(findings[:6]) == findings[:6]


def test_a_report_is_plain_json() -> None:
    frame = table(when=DAYS, inf=np.where(np.arange(ROWS) == 3, np.inf, 1.0 * (np.arange(ROWS) % 3)))
    report = examine(frame, "y")
    read = json.loads(json.dumps(report.to_dict()))
    assert read["columns"][2] == {
        "name": "when", "dtype": str(frame["when"].dtype), "read_as": "moment", "distinct": ROWS,
        "missing": 0, "infinite": 0,
    }  # fmt: skip
    assert TableReport(**{**read, "findings": tuple(Finding(**f) for f in read["findings"])}).warnings == ()


@pytest.mark.slow
def test_a_hundred_thousand_rows_of_a_hundred_columns_take_less_than_a_minute() -> None:
    rng = np.random.default_rng(9)
    rows = 100_000
    columns: dict[str, object] = {f"n{i}": rng.normal(size=rows) for i in range(70)}
    columns |= {f"i{i}": rng.integers(0, 1000, rows) for i in range(15)}
    columns |= {f"t{i}": rng.choice([f"level {j}" for j in range(50)], rows) for i in range(12)}
    columns |= {
        "id": np.arange(rows),
        "name": [f"n{i}" for i in range(rows)],
        "day": ["2020-01-01", "2021-02-03"] * 50_000,
    }
    began = time.process_time()
    report = examine(pd.DataFrame(columns | {"y": rng.choice(["yes", "no"], rows)}), "y")
    assert time.process_time() - began < 60
    assert {(f.kind, f.column) for f in report.findings} >= {
        ("id-like", "id"),
        ("id-like", "name"),
        ("date-like", "day"),
    }


REAL_LEAKS = {"cr_361104_SGEMM_GPU_kernel_performance.parquet"}
"""Its target is the first of four timings of one kernel; the others are among its columns."""


@pytest.mark.slow
def test_real_tables_have_no_false_leaks(shared: Path) -> None:
    listed = json.loads((shared / "data" / "manifest.json").read_text("utf-8"))["datasets"]
    assert len(listed) > 50
    leaking = {}
    for entry in listed:
        frame = pd.read_parquet(shared / "data" / entry["file"])
        task = "regression" if "regression" in entry["task_type"] else "classification"
        report = examine(frame, entry["target"], task_type=task, name=entry["name"])
        assert not report.refused
        if columns := [f.column for f in report.findings if f.kind == "leak"]:
            leaking[entry["file"]] = columns
    assert leaking == {name: ["Run2", "Run3", "Run4"] for name in REAL_LEAKS}


# the job


def run(*words: str) -> int:
    return doctor.run_doctor(doctor.doctor_parser().parse_args(words))


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    path = tmp_path / "my.csv"
    table().to_csv(path, index=False)
    return path


def test_the_job_without_findings(csv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(csv), "--target", "y", "--no-dry-run") == 0
    out = capsys.readouterr().out
    assert "my: 300 rows; columns: 1 number, 1 category; target y: binary (" in out
    assert "no findings" in out


def test_the_job_with_a_leak(csv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pd.read_csv(csv).assign(leak=lambda f: f["y"]).to_csv(csv, index=False)
    assert run(str(csv), "--target", "y", "--no-dry-run", "--json", str(tmp_path / "r.json")) == 1
    shown = capsys.readouterr().out
    assert "equals the target  warned" in shown
    stored = json.loads((tmp_path / "r.json").read_text("utf-8"))
    assert [(f["kind"], f["column"]) for f in stored["findings"]] == [("leak", "leak")]
    assert run(str(csv), "--target", "y", "--no-dry-run", "--json", "-") == 1
    assert json.loads(capsys.readouterr().out)["exit_code"] == 1


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_refused_table_ends_with_the_line_of_a_search(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bishop_ray.config import StudyConfig
    from bishop_ray.data.refs import file_ref
    from bishop_ray.data.split import DATASETS_I
    from bishop_ray.search.dataset import load

    path = tmp_path / f"bad{suffix}"
    frame = table(rows=20, const=1)
    frame["y"] = ["yes"] * 2 + ["no"] * 18  # auc needs both classes in every part
    frame.to_csv(path, index=False) if suffix == ".csv" else frame.to_parquet(path)
    with pytest.raises(BadTable) as error:
        load(StudyConfig(file_ref(path, "y"), "mlp", "mlp", 1, 1, "", DATASETS_I))
    with pytest.raises(BadTable) as refused:
        run(str(path), "--target", "y", "--json", "-")
    assert str(refused.value) == str(error.value)
    stored = json.loads(capsys.readouterr().out)
    assert {f["kind"] for f in stored["findings"]} == {"refused", "constant", "rare class", "few rows"}
    assert (stored["refused"], stored["exit_code"], stored["models"]) == (str(error.value), 2, [])


def test_wrong_flags_are_one_line(csv: Path) -> None:
    for words, line in (
        ([], "expected one of TABLE, --dataset; found none"),
        ([str(csv)], "name of the target column"),
        ([str(csv), "--target", "z"], "unknown target column"),
        ([str(csv), "--dataset", "iris"], "found both"),
        (["--dataset", "iris", "--target", "y"], "--target goes with TABLE"),
        ([str(csv), "--target", "y", "--json", "/nowhere/r.json"], "--json: expected a file"),
    ):
        with pytest.raises(UserError, match=line):
            run(*words)


@pytest.mark.parametrize("task", ["binary", "regression"])
def test_models_are_tried_on_a_hundred_rows(task: str) -> None:
    from bishop_ray.config import StudyConfig
    from bishop_ray.data.refs import embedded_ref
    from bishop_ray.data.split import DATASETS_I
    from bishop_ray.search.dry_run import OK, try_model

    raw = make_raw("t", table(regression=task == "regression"), "y")
    ref = embedded_ref("iris")  # only its name is used
    tried = try_model(StudyConfig(ref, "mlp", "mlp", 1, 1, "", DATASETS_I), raw)
    assert (tried.model, tried.outcome, tried.reason) == ("mlp", OK, "")


def test_a_model_that_fails_is_told_with_its_reason(
    csv: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bishop_ray.models.mlp import MLP

    def broken(self: MLP, *inputs: object) -> None:
        raise RuntimeError("no such kernel\nsecond line")

    monkeypatch.setattr(MLP, "forward", broken)
    assert run(str(csv), "--target", "y", "--models", "mlp") == 1
    assert "mlp failed: RuntimeError: no such kernel\n" in capsys.readouterr().out
