"""``jobs/predict.py``: what it writes is what the predictor says, however the file is cut; nothing half-written."""

from __future__ import annotations

import gzip
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import make_table
from predictor_fakes import make_predictor

from bishop_ray.cli import serve
from bishop_ray.data.files import level_text
from bishop_ray.data.schema import make_raw
from bishop_ray.data.table import TaskType
from bishop_ray.errors import UserError
from bishop_ray.predictor import Predictor

ROOT = Path(__file__).resolve().parents[2]
RAW = make_table(TaskType.BINARY, rows=60, with_missing=True)
FRAME = make_table(TaskType.BINARY, rows=55, with_missing=True, with_unseen_category=True, seed=1).frame


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_predictor(RAW).save(tmp_path_factory.mktemp("saved") / "model")


def run(folder: Path, file: Path, output: Path, *flags: str) -> pd.DataFrame:
    words = [str(folder), str(file), "-o", str(output), "--folder", *flags]
    assert serve.run_predict(serve.predict_parser().parse_args(words)) == 0
    assert [path.name for path in output.parent.glob(".*")] == []
    return pd.read_parquet(output) if output.suffix == ".parquet" else pd.read_csv(output)


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".tsv", ".parquet"])
@pytest.mark.parametrize("output", ["out.csv", "out.parquet"])
@pytest.mark.parametrize("rows", ["7", "1000"])
def test_rows_in_rows_out(folder: Path, tmp_path: Path, suffix: str, output: str, rows: str) -> None:
    frame = FRAME.assign(id=[f"{i:03d}" for i in range(len(FRAME))], note="NA")[["id", *FRAME.columns[::-1], "note"]]
    file = tmp_path / f"in{suffix}"
    if suffix == ".parquet":
        frame.to_parquet(file, row_group_size=10)
    else:
        frame.to_csv(file, index=False, sep="\t" if suffix == ".tsv" else ",")
    (tmp_path / output).write_text("old")
    run(folder, file, tmp_path / output, "--batch-rows", rows, "--keep", "note", "id")
    path = tmp_path / output
    kept = {"dtype": {"id": "str", "note": "str"}, "keep_default_na": False}
    found = pd.read_parquet(path) if output.endswith("parquet") else pd.read_csv(path, **kept)
    model = Predictor.load(folder)
    assert list(found.columns) == ["note", "id", "prediction", "probability no", "probability yes"]
    assert found["id"].tolist() == frame["id"].tolist()
    assert set(found["note"]) == {"NA"}
    expected = model.predict_proba(FRAME)
    np.testing.assert_allclose(found[["probability no", "probability yes"]], expected, rtol=1e-5)
    assert found["prediction"].tolist() == model.predict(FRAME).tolist()


def test_a_column_reads_the_same_in_every_batch(tmp_path: Path) -> None:
    """What pandas makes of a batch (ints, floats, truth values, text) must not decide what a value is."""
    rng = np.random.default_rng(0)
    zip_codes = np.array(["01", "02", "A5", "1.50", "true"], dtype=object)
    frame = pd.DataFrame({"zip": rng.choice(zip_codes, 80), "n": rng.integers(0, 9, 80), "flag": rng.random(80) < 0.5})
    frame["code"] = pd.Series(rng.integers(1, 4, 80)).astype("category")
    frame["y"] = np.where((frame["zip"] == "01") ^ frame["flag"] ^ (frame["code"] == 2), "p", "q")
    model = make_predictor(make_raw("t", frame, "y"))
    folder = model.save(tmp_path / "model")
    new = frame.drop(columns="y").sort_values(["zip", "flag"]).reset_index(drop=True)  # batches of one kind
    text = new.astype(object).astype(str)
    text.loc[new["flag"], "flag"] = "TRUE"
    text["code"] = [f"{value}.0" if i % 3 else f"0{value}" for i, value in enumerate(text["code"])]
    text.loc[::2, "n"] += ".0"
    text.to_csv(tmp_path / "in.csv", index=False)
    expected = model.predict_proba(new).to_numpy()
    for rows in ("1", "5", "1000"):
        found = run(folder, tmp_path / "in.csv", tmp_path / "out.csv", "--batch-rows", rows)
        np.testing.assert_allclose(found[["probability p", "probability q"]], expected, rtol=1e-5)


def dated(rows: int = 80) -> pd.DataFrame:
    """A table of dates, numbers that are often missing, and ids that float64 cannot tell apart."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"n": rng.normal(size=rows), "id": pd.Series(2**60 + rng.integers(0, 3, rows), dtype=object)})
    frame["when"] = pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 2000, rows), "D")
    frame["day"] = frame["when"].dt.floor("D") + pd.Timedelta("3D")
    frame.loc[rng.random(rows) < 0.3, ["n", "when"]] = None
    frame.loc[: rows // 4, ["n", "when", "id"]] = None  # whole batches of nothing
    return frame.assign(y=np.where((frame["id"] == 2**60 + 1) ^ (frame["day"].dt.year > 2022), "p", "q"))


def test_dates_ids_and_whole_batches_of_nothing(tmp_path: Path) -> None:
    """Dates as texts and as Parquet's own, ids that are text to the model: each batch as the whole table at once."""
    frame = dated()
    raw = make_raw("t", frame.assign(id=frame["id"].astype("category")), "y")
    model = make_predictor(raw)
    assert dict(model.schema) == {"n": "number", "id": "category", "when": "moment", "day": "moment"}
    folder = model.save(tmp_path / "model")
    expected = model.predict_proba(raw.frame)
    text = frame.drop(columns="y").astype({"when": "str", "day": "str"})
    text["day"] = [day if i % 2 else f"{day[8:10]}.{day[5:7]}.{day[:4]}" for i, day in enumerate(text["day"])]
    text.to_csv(tmp_path / "in.csv", index=False)
    dates = pa.array(frame["day"].dt.date, pa.date32())
    ids = pa.array(frame["id"].tolist(), pa.int64())
    when = pa.array(frame["when"], pa.timestamp("ms", "Europe/Paris"))
    pq.write_table(pa.table({"id": ids, "n": frame["n"], "day": dates, "when": when}), tmp_path / "in.parquet")
    for file in ("in.csv", "in.parquet"):
        for rows in ("3", "1000"):
            found = run(folder, tmp_path / file, tmp_path / "out.csv", "--batch-rows", rows)
            np.testing.assert_allclose(found[["probability p", "probability q"]], expected, rtol=1e-5)


def test_a_text_that_is_no_date_is_named(tmp_path: Path) -> None:
    frame = dated()
    folder = make_predictor(make_raw("t", frame.assign(id=frame["id"].astype("category")), "y")).save(tmp_path / "m")
    text = frame.astype({"day": "str"})
    text.loc[50, "day"] = "soon"
    text.to_csv(tmp_path / "in.csv", index=False)
    with pytest.raises(UserError, match="rows 41-60: column 'day': expected a date or time; found 'soon'"):
        run(folder, tmp_path / "in.csv", tmp_path / "out.csv", "--batch-rows", "20")
    assert not (tmp_path / "out.csv").exists()


def test_labels_that_look_like_numbers_stay_text(tmp_path: Path) -> None:
    raw = make_table(TaskType.BINARY, rows=40)
    labels = pd.Series(np.where(raw.target == "yes", "1.0", "2.0"), dtype="str", name="y")
    folder = make_predictor(make_raw("t", raw.frame.assign(y=labels), "y")).save(tmp_path / "model")
    raw.frame.to_csv(tmp_path / "in.csv", index=False)
    found = run(folder, tmp_path / "in.csv", tmp_path / "out.parquet")
    assert list(found.columns) == ["prediction", "probability 1.0", "probability 2.0"]
    assert set(found["prediction"]) <= {"1.0", "2.0"}


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_a_full_disk_leaves_what_was_there(folder: Path, tmp_path: Path, name: str) -> None:
    pd.concat([FRAME] * 40).to_csv(tmp_path / "in.csv", index=False)
    output = tmp_path / name
    output.write_text("precious")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # no file can grow beyond: as a full disk has it
    try:
        with pytest.raises(UserError, match=f"{name}: cannot be written: .*File too large"):
            run(folder, tmp_path / "in.csv", output, "--batch-rows", "100")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert output.read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {"in.csv", name}


MEASURE = """
import sys
from pathlib import Path
from bishop_ray.cli import serve
def peak(file):
    words = [sys.argv[1], file, "-o", file + ".out.csv", "--folder", "--batch-rows", "200", "--keep", "row"]
    serve.run_predict(serve.predict_parser().parse_args(words))
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1000 for line in lines if line.startswith("VmHWM"))
print(*map(peak, sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of a process's memory from /proc")
def test_memory_does_not_grow_with_the_file(folder: Path, tmp_path: Path) -> None:
    """200 MB of text after 4 MB of it, and a Parquet file that is one row group of 200 MB, by the same process."""
    block = pd.concat([FRAME] * 10, ignore_index=True)[:100]
    block = block.assign(row=np.arange(100), cat_0=block["cat_0"].fillna("") + "x" * 40_000)
    header, rows = block.to_csv(index=False).split("\n", 1)
    (tmp_path / "small.csv").write_text(f"{header}\n{rows}")
    (tmp_path / "large.csv").write_text(f"{header}\n{rows * 50}")
    whole = pa.concat_tables([pa.Table.from_pandas(block)] * 50)
    plain = {"compression": "none", "use_dictionary": False, "row_group_size": len(whole)}
    pq.write_table(whole, tmp_path / "large.parquet", **plain)
    files = [tmp_path / name for name in ("small.csv", "large.csv", "large.parquet")]
    assert min(file.stat().st_size for file in files[1:]) > 200e6
    command = [sys.executable, "-c", MEASURE, str(folder), *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    small, *large = map(int, done.stdout.splitlines()[-1].split())
    assert max(large) < small + 100  # MB
    expected = pd.read_csv(f"{files[0]}.out.csv")
    for file in files[1:]:
        found = pd.read_csv(f"{file}.out.csv")
        assert found["row"].tolist() == list(range(100)) * 50
        np.testing.assert_allclose(found["probability yes"], expected["probability yes"].tolist() * 50, rtol=1e-5)


@pytest.mark.parametrize(
    ("text", "levels", "meant"),
    [
        ("01", ("01", "1"), "01"),
        ("01", ("1",), "1"),
        ("1e3", ("1000",), "1000"),
        ("TRUE", ("True", "False"), "True"),
        ("1_0", ("10",), "1_0"),
        ("nan", ("x", "None"), "nan"),
        ("9" * 5000, ("x",), "9" * 5000),
        ("9007199254740993", ("9007199254740993",), "9007199254740993"),
    ],
)
def test_a_text_stands_for_the_level_it_spells(text: str, levels: tuple[str, ...], meant: str) -> None:
    assert level_text(text, levels) == meant


@pytest.mark.parametrize("task", [TaskType.REGRESSION, TaskType.MULTICLASS])
def test_other_tasks_and_no_rows(task: TaskType, tmp_path: Path) -> None:
    raw = make_table(task, rows=60)
    model = make_predictor(raw)
    folder = model.save(tmp_path / "model")
    raw.frame.to_parquet(tmp_path / "in.parquet")
    raw.frame.head(0).to_csv(tmp_path / "none.csv", index=False)
    found = run(folder, tmp_path / "in.parquet", tmp_path / "out.csv")
    none = run(folder, tmp_path / "none.csv", tmp_path / "none.parquet")
    assert list(found.columns) == list(none.columns)
    assert len(none) == 0
    if task is TaskType.REGRESSION:
        assert list(found.columns) == ["prediction"]
        np.testing.assert_allclose(found["prediction"], model.predict(raw.frame), rtol=1e-5)
    else:
        assert found["prediction"].tolist() == model.predict(raw.frame).tolist()


def test_labels_keep_their_type(tmp_path: Path) -> None:
    raw = make_table(TaskType.BINARY, rows=40)
    for labels, kind in (([False, True], pa.bool_()), ([3, 70], pa.int64()), ([1.5, 2.5], pa.float64())):
        target = pd.Series([labels[i % 2] for i in range(40)], name="y")
        model = make_predictor(make_raw("t", raw.frame.assign(y=target), "y"))
        folder = model.save(tmp_path / "model")
        raw.frame.to_csv(tmp_path / "in.csv", index=False)
        run(folder, tmp_path / "in.csv", tmp_path / "out.parquet")
        table = pq.read_table(tmp_path / "out.parquet")
        assert table.schema.field("prediction").type == kind
        assert table["prediction"].to_pylist() == model.predict(raw.frame).tolist()


def spoiled(tmp_path: Path, kind: str) -> Path:
    """A file with a fault in its second batch, or as a whole."""
    file = tmp_path / "in.csv"
    frame = FRAME.copy()
    if kind == "text":
        frame["num_1"] = frame["num_1"].astype(object)
        frame.loc[30, "num_1"] = "many"
    elif kind == "truth":
        frame["num_1"] = True
    elif kind == "missing":
        frame = frame.drop(columns="cat_1")
    frame.to_csv(file, index=False)
    content = file.read_text()
    if kind == "long":
        lines = content.splitlines()
        lines[40] += ",1,2"
        file.write_text("\n".join(lines))
    elif kind == "twice":
        file.write_text(content.replace("num_1", "num_0", 1))
    elif kind == "bytes":
        file.write_bytes(content.encode() + b"\xff\xfe\n")
    elif kind == "empty":
        file.write_text("")
    elif kind == "cut":
        packed = tmp_path / "in.csv.gz"
        packed.write_bytes(gzip.compress(content.encode())[:-200])
        return packed
    elif kind == "parquet":
        bad = tmp_path / "in.parquet"
        bad.write_bytes(b"PAR1 no")
        return bad
    return file


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("text", "rows 21-40: column 'num_1': expected a number; found 'many'"),
        ("truth", "rows 1-20: column 'num_1': expected a number; found 'True'"),
        ("missing", "missing column 'cat_1'; expected the columns of the training table"),
        ("long", "cannot be read"),
        ("twice", "column 'num_0' comes 2 times"),
        ("bytes", "cannot be read"),
        ("empty", "the file is empty"),
        ("cut", "cannot be read"),
        ("parquet", "cannot be read"),
    ],
)
def test_a_bad_file_is_one_line_and_leaves_what_was_there(folder: Path, tmp_path: Path, kind: str, words: str) -> None:
    file, output = spoiled(tmp_path, kind), tmp_path / "out.csv"
    output.write_text("precious")
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(UserError) as caught:
        run(folder, file, output, "--batch-rows", "20")
    assert str(file) in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert output.read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("file", "output", "flags", "words"),
    [
        ("in.csv", "out.txt", (), "--output: expected a file ending in .csv or .parquet"),
        ("in.csv", "no/out.csv", (), "--output: expected a file in an existing folder"),
        ("in.csv", "in.csv", (), "--output: expected another file"),
        ("in.txt", "out.csv", (), "expected a file ending in .csv"),
        ("none.csv", "out.csv", (), "no such file"),
        ("in.csv", "out.csv", ("--keep", "id"), "--keep: .*missing column 'id'"),
        ("in.csv", "out.csv", ("--alias", "mlp"), "--folder: expected no --alias"),
    ],
)
def test_bad_flags(folder: Path, tmp_path: Path, file: str, output: str, flags: tuple[str, ...], words: str) -> None:
    FRAME.to_csv(tmp_path / "in.csv", index=False)
    with pytest.raises(UserError, match=words):
        run(folder, tmp_path / file, tmp_path / output, *flags)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv"]


def test_help_imports_nothing_heavy() -> None:
    for job in ("predict", "serve"):
        code = (
            "import sys, runpy\n"
            f"sys.argv = ['jobs/{job}.py', '--help']\n"
            f"try:\n    runpy.run_path('jobs/{job}.py', run_name='__main__')\n"
            "except SystemExit as end:\n    assert not end.code, end.code\n"
            "bad = {m.split('.')[0] for m in sys.modules} & {'torch', 'ray', 'mlflow', 'fastapi', 'sklearn'}\n"
            "sys.exit(f'imported {bad}' if bad else 0)"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
