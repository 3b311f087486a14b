"""The paper's nine single tables: true copies load the same from wherever, wrong ones are refused with what differs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import openml_server

from bishop_ray import cli
from bishop_ray.cli.flags import read
from bishop_ray.data.load import load_dataset, paper_dataset
from bishop_ray.data.paper_datasets import PAPER_SETS
from bishop_ray.data.paper_files import _fold, _known, clean_paper
from bishop_ray.data.refs import list_datasets, paper_ref
from bishop_ray.data.split import DATASETS_I, protocol, split_indices
from bishop_ray.data.table import TaskType
from bishop_ray.errors import BadTable, UnknownName, UserError
from bishop_ray.metrics import default_metric
from bishop_ray.paper import printed
from bishop_ray.search.options import DataOptions
from bishop_ray.search.plan import check_metric_fits, datasets

PAPER_COUNTS = {  # the paper's table "Details of Datasets": numerical, categorical, rows of its three parts
    "adult": (6, 8, 34190 + 9769 + 4884),
    "bank": (7, 9, 31648 + 9042 + 4522),
    "blastchar": (3, 16, 4923 + 1407 + 703),
    "income": (6, 8, 34189 + 9768 + 4885),
    "seismic_bumps": (14, 4, 1809 + 517 + 258),
    "shrutime": (6, 4, 7001 + 2000 + 1000),
    "spambase": (58, 0, 3221 + 920 + 461),
    "qsar_biodeg": (41, 0, 738 + 211 + 106),
    "jannis": (54, 0, 58613 + 16747 + 8373),
}
ONE_TOO_HIGH = {"adult", "bank", "blastchar", "shrutime", "spambase"}


def test_records_are_the_papers_table() -> None:
    assert tuple(PAPER_SETS) == printed.table(1).datasets
    for name, (numerical, categorical, rows) in PAPER_COUNTS.items():
        record = PAPER_SETS[name]
        assert len(record.numerical) == numerical - (name == "spambase"), name  # it counts the class
        assert len(record.categorical) == categorical, name
        assert record.rows == rows - (name in ONE_TOO_HIGH), name
        assert set(record.categorical) < set(record.columns)
        assert len({_fold(c) for c in record.columns}) == len(record.columns)
        assert set(_known(record).values()) == set(record.columns)
        assert len(set(record.classes.values())) == len(record.classes)  # labels can be told by counts


def test_they_are_listed() -> None:
    facts = {fact.name: fact for fact in list_datasets()}
    assert (facts["jannis"].task, facts["jannis"].rows, facts["jannis"].features) == ("multiclass", 83733, 54)
    assert "--data-dir" in facts["shrutime"].kind


def shared_frame(shared: Path, name: str) -> pd.DataFrame:
    return pd.read_parquet(shared / "data" / f"{name}.parquet")


@pytest.mark.parametrize("name", PAPER_SETS)
def test_true_files_load_exactly(shared: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    ref = paper_dataset(name, str(shared / "data"))
    assert (ref.key, ref.experiment) == (f"paper-{name}", "paper")
    raw, source, record = load_dataset(ref), shared_frame(shared, name), PAPER_SETS[name]
    assert list(raw.frame.columns) == list(record.columns[:-1])
    assert raw.categorical == record.categorical
    assert raw.task is (TaskType.MULTICLASS if name == "jannis" else TaskType.BINARY)
    for column in raw.frame.columns:
        kind = str if column in raw.categorical else float
        assert (raw.frame[column].to_numpy() == source[column].astype(kind).to_numpy()).all(), column
    assert (raw.target.to_numpy() == source[record.target].astype(str).to_numpy()).all()
    assert ("30145 of its 83733 rows" in caplog.text) is (name == "jannis")
    assert protocol(ref) == DATASETS_I
    assert default_metric(raw.task, suite=ref.kind == "openml") == "auc"


def test_the_split_is_70_20_10_and_stratified(shared: Path) -> None:
    raw = load_dataset(paper_dataset("seismic_bumps", str(shared / "data")))
    parts = split_indices(raw, 0)
    assert [len(parts.train), len(parts.validation), len(parts.test)] == [1809, 517, 258]  # as the paper counts
    shares = [np.mean(raw.target.to_numpy()[part] == "1") for part in (parts.train, parts.validation, parts.test)]
    assert shares == pytest.approx([170 / 2584] * 3, abs=0.003)


def original(name: str, frame: pd.DataFrame, folder: Path) -> Path:
    """The file as UCI or Kaggle hand it out, made of the true rows."""
    file = folder / f"{name}.csv"
    if name == "shrutime":
        people = {"RowNumber": range(1, 10001), "CustomerId": range(10000), "Surname": "Hill"}
        pd.DataFrame(people).join(frame).to_csv(file, index=False)
    elif name == "blastchar":
        blank = frame.iloc[:11].assign(TotalCharges=" ")
        whole = pd.concat([blank, frame.assign(TotalCharges=frame["TotalCharges"].astype(str))], ignore_index=True)
        whole.insert(0, "customerID", [f"{i}-ABCDE" for i in range(len(whole))])
        whole.to_csv(file, index=False)
    elif name in ("spambase", "adult"):
        frame.to_csv(file, index=False, header=False)  # .data of UCI
    elif name == "income":
        tested = frame["income"].astype(str) + np.where(frame.index >= 32561, ".", "")
        frame.assign(income=" " + tested, sex=" " + frame["sex"].astype(str)).to_csv(file, index=False)
    else:
        frame.to_csv(file, index=False, sep=";", header=name != "qsar_biodeg")
    return file


@pytest.mark.parametrize("name", ["shrutime", "blastchar", "spambase", "qsar_biodeg", "seismic_bumps", "income"])
def test_originals_give_the_same_table(shared: Path, tmp_path: Path, name: str) -> None:
    original(name, shared_frame(shared, name), tmp_path)
    found = load_dataset(paper_ref(name, str(tmp_path)))
    assert found.fingerprint() == load_dataset(paper_ref(name, str(shared / "data"))).fingerprint()


def spoiled(frame: pd.DataFrame) -> dict[str, tuple[pd.DataFrame, list[str]]]:
    """Wrong copies of shrutime, and what the message must say."""
    other = frame["Exited"].astype(str).replace({"0": "1", "1": "0"})
    doubled = frame.assign(EstimatedSalary=frame["EstimatedSalary"] * 2)
    text = frame["Age"].astype(str).mask(frame.index == 7, "old")
    return {
        "rows": (frame.iloc[1:], ["9,999 rows instead of 10,000"]),
        "classes": (frame.assign(Exited=other), ["'0' 2,037, '1' 7,963 rows instead of '0' 7,963, '1' 2,037"]),
        "more classes": (frame.assign(Exited=frame.index % 7), ["'0' 1,429", "'5' 1,428, ..."]),
        "values": (doubled, ["a mean EstimatedSalary of 200180 instead of 100090"]),
        "missing column": (frame.drop(columns="Age"), ["6 numerical, 4 categorical", "no 'Age'"]),
        "strange column": (frame.assign(Complain=1), ["unknown 'Complain'"]),
        "text": (frame.assign(Age=text), ["Age", "old"]),
        "gap": (frame.assign(Age=frame["Age"].where(frame.index != 3)), ["'Age'", "1 gaps"]),
        "empty": (frame.assign(Gender=frame["Gender"].astype(str).mask(frame.index < 5, "")), ["5 empty cells"]),
        "twice": (frame.assign(**{"age ": frame["Age"]}), ["a column twice"]),
    }


@pytest.mark.parametrize(
    "fault",
    ["rows", "classes", "more classes", "values", "missing column", "strange column", "text", "gap", "empty", "twice"],
)
def test_wrong_copies_are_refused(shared: Path, fault: str) -> None:
    frame, words = spoiled(shared_frame(shared, "shrutime"))[fault]
    with pytest.raises(BadTable) as refused:
        clean_paper("shrutime", frame.reset_index(drop=True), "churn.csv")
    message = str(refused.value)
    assert message.startswith("churn.csv: ")
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_another_part_of_jannis_is_refused(shared: Path) -> None:
    frame = shared_frame(shared, "jannis").iloc[:20000]
    with pytest.raises(BadTable, match=r"20,000 rows instead of 83,733; classes of"):
        clean_paper("jannis", frame, "jannis")


def test_names_and_folders_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownName, match="did you mean 'shrutime'"):
        paper_ref("shrutim")
    with pytest.raises(UserError, match=r"--data-dir: expected a folder; found .*no such path"):
        paper_ref("adult", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"shrutime\.parquet, \.csv or \.tsv.*no folder named.*kaggle"):
        paper_ref("shrutime")
    with pytest.raises(UserError, match=f"found none in {tmp_path}"):
        paper_ref("seismic_bumps", str(tmp_path))
    assert paper_ref("adult", str(tmp_path)).locator == "1590"  # no file there, but on OpenML
    (tmp_path / "adult.csv").write_text("")
    assert paper_ref("adult", str(tmp_path)).locator == str(tmp_path / "adult.csv")  # a file there wins
    with pytest.raises(BadTable, match=r"adult\.csv"):
        load_dataset(paper_ref("adult", str(tmp_path)))
    args = cli.tune_parser().parse_args(["--dataset", "iris", "adult", "iris"])
    monkeypatch.setenv("BISHOP_DATA_DIR", str(tmp_path))
    found, failures = datasets(read(DataOptions, args))
    assert [ref.key for ref in found] == ["iris", "paper-adult"]
    assert found[1].locator == str(tmp_path / "adult.csv")
    assert not failures
    with pytest.raises(UserError, match="metric 'r2' does not fit a binary task"):
        check_metric_fits("r2", found)
    with pytest.raises(UserError, match="--data-dir goes with --dataset; found --suite"):
        datasets(DataOptions(suite="CR", data_dir="x"))


def telco(frame: pd.DataFrame) -> pd.DataFrame:
    """All 7,043 customers of data id 42178: a new one's TotalCharges is a blank, so all of them are text.

    SAINT's `data_openml.py` reads it so (github.com/somepago/saint): blanks in TotalCharges, SeniorCitizen a number.
    """
    places = np.linspace(0, len(frame), 11, dtype=int)
    new = frame.iloc[:11].assign(tenure=0, TotalCharges=" ").set_axis(places - 0.5)
    texts = frame["TotalCharges"].map(lambda x: str(int(x)) if x == int(x) else str(x))
    whole = pd.concat([frame.assign(TotalCharges=texts), new]).sort_index().reset_index(drop=True)
    whole = whole.astype({"SeniorCitizen": "uint8", "tenure": "uint8"})  # as the client reads small whole numbers
    whole.insert(0, "customerID", [f"{i:04}-ABCDE" for i in range(len(whole))])
    return whole


def as_on_openml(name: str, frame: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The rows under OpenML's names and labels, and the target there."""
    if name in ("bank", "qsar_biodeg"):
        columns = [f"V{i + 1}" for i in range(frame.shape[1] - 1)] + ["Class"]
        codes = dict(zip(PAPER_SETS[name].classes, ("1", "2"), strict=True))
        target = frame.iloc[:, -1].astype(str).map(codes).astype("category")
        return pd.concat([frame.iloc[:, :-1], target], axis=1).set_axis(columns, axis=1), "Class"
    if name == "spambase":
        renamed = {f"char_freq_{c}": f"char_freq_%{ord(c):02X}" for c in ";([!$#"}
        return frame.rename(columns=renamed | {"spam": "class"}), "class"
    if name == "adult":
        renamed = {"gender": "sex", "educational-num": "education-num", "income": "class"}
        return frame.rename(columns=renamed).replace("?", None), "class"
    if name == "blastchar":
        return telco(frame), "Churn"
    return frame, PAPER_SETS[name].target


@pytest.fixture(scope="module")
def openml_copies(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A loopback OpenML server with five of the nine tables as openml.org has them, and a wrong jannis."""
    folder = tmp_path_factory.mktemp("openml")
    entries = {e["name"]: e for e in json.loads((shared / "data" / "manifest.json").read_text())["datasets"][:9]}
    served = []
    for task, name in enumerate(("adult", "bank", "spambase", "qsar_biodeg", "blastchar", "jannis"), 1):
        frame, target = as_on_openml(name, shared_frame(shared, name).head(5000 if name == "jannis" else None))
        frame.to_parquet(folder / f"{name}.parquet")
        categorical = [str(c) for c in frame.columns if frame[c].dtype == "category" and c != target]
        shape = {"rows": len(frame), "target": target, "categorical_columns": categorical}
        ids = {"suite": 1, "task": task, "dataset": PAPER_SETS[name].openml}
        served.append({**entries[name], **shape, "openml": ids})
    (folder / "manifest.json").write_text(json.dumps({"datasets": served}))
    with openml_server(folder) as address:
        yield address


@pytest.mark.parametrize("name", ["adult", "income", "bank", "blastchar", "spambase", "qsar_biodeg"])
def test_openmls_copies_give_the_same_table(shared: Path, openml_copies: str, openml_cache: Path, name: str) -> None:
    ref = paper_dataset(name, server=openml_copies)
    assert (ref.locator, ref.server) == (str(PAPER_SETS[name].openml), openml_copies)
    found = load_dataset(ref)
    assert found.fingerprint() == load_dataset(paper_ref(name, str(shared / "data"))).fingerprint()
    assert [path.name for path in openml_cache.rglob("*.parquet")] == [f"paper-{name}.parquet"]
    assert load_dataset(ref).fingerprint() == found.fingerprint()  # from the cache


def test_openmls_text_of_blastchar_gives_the_same_table(shared: Path, tmp_path: Path) -> None:
    """The ARFF file, which the client takes where a server has no Parquet file; customer numbers are left out."""
    from openml.datasets import OpenMLDataset

    frame = telco(shared_frame(shared, "blastchar")).drop(columns="customerID")
    lines, cells = ["@RELATION telco-customer-churn"], {}
    for name, column in frame.items():
        texts = column.astype(str)
        quoted = texts.map("'{}'".format)
        nominal = isinstance(column.dtype, pd.CategoricalDtype)
        kinds = "{" + ",".join(sorted(set(quoted))) + "}" if nominal else "STRING" if name == "TotalCharges" else "REAL"
        lines.append(f"@ATTRIBUTE {name} {kinds}")
        cells[name] = quoted if nominal or name == "TotalCharges" else texts
    file = tmp_path / "dataset.arff"
    file.write_text("\n".join([*lines, "@DATA", *map(",".join, zip(*cells.values(), strict=True)), ""]))
    read, *_ = OpenMLDataset("telco-customer-churn", None, data_format="arff", data_file=str(file)).get_data()
    assert len(read) == 7043
    assert read["TotalCharges"].eq(" ").sum() == 11
    found = clean_paper("blastchar", read, "dataset.arff")
    assert found.fingerprint() == load_dataset(paper_ref("blastchar", str(shared / "data"))).fingerprint()


def test_a_wrong_copy_on_a_server_is_refused(openml_copies: str, mirror: str, openml_cache: Path) -> None:
    with pytest.raises(BadTable, match=r"OpenML dataset 41168 \(jannis\): not the paper's jannis: found 5,000 rows"):
        load_dataset(paper_dataset("jannis", server=openml_copies))
    assert not list(openml_cache.rglob("*.parquet"))
    with pytest.raises(
        UserError, match=r"OpenML dataset 42178 .blastchar; --data-dir names a folder of files instead."
    ):
        load_dataset(paper_dataset("blastchar", server=mirror))
