"""Our figures beside the paper's: what is compared with what, and the whole job on a real table."""

from __future__ import annotations

import argparse
import csv
import json
import math
import shutil
from pathlib import Path

import pandas as pd
import pytest
from conftest import SHARED, openml_server

from bishop_ray.cli import report as report_cli
from bishop_ray.cli import reproduce
from bishop_ray.config import StudyResult
from bishop_ray.data.refs import DatasetRef, embedded_ref
from bishop_ray.errors import SourceUnavailable, UnknownName, UserError
from bishop_ray.paper import comparison
from bishop_ray.paper import printed as paper
from bishop_ray.search.plan import obtained

DATA = SHARED / "data"


def result(model: str, test: float, val: float = 0.9, std: float = 0.01, trials: int = 4) -> StudyResult:
    return StudyResult(
        dataset="d", model=model, metric="auc", trials={"complete": trials - 1, "pruned": 1}, best_trial=0,
        val_score=val, test_mean=test, test_std=std, test_scores=[test], linear=0.8, mean=0.5, registered="d",
        version="1", seconds=1800.0, rows=[7, 2, 1], params={}, parent_run="r",
    )  # fmt: skip


def test_splits_are_averaged_and_the_paper_stands_beside() -> None:
    table = paper.table(1)
    rows = comparison.compare(
        table, {"adult": [result("bishop", 0.90), result("xgboost", 0.92), result("bishop", 0.92)]}
    )
    own, tree = rows
    assert (own.test, own.splits, own.trials, own.hours) == (pytest.approx(91.0), 2, 8, 1.0)
    assert own.std == pytest.approx(100 * math.sqrt(2) * 0.01)
    assert tree.std == pytest.approx(1.0), "one split: the deviation over its seeds"
    printed = table.score("adult", "bishop")
    assert printed is not None
    assert own.paper == printed.mean
    assert own.difference == pytest.approx(91.0 - printed.mean)
    assert own.optimism == pytest.approx(-1.0)
    assert comparison.distances(rows) == {"adult": pytest.approx(-1.0)}


def test_the_interval_is_students() -> None:
    # Mean 2, deviation 1, n = 3; t(0.975, 2) = 4.302653 (any table of the distribution).
    low, high = comparison.interval([1.0, 2.0, 3.0])
    assert (low, high) == (pytest.approx(2 - 4.302653 / math.sqrt(3)), pytest.approx(2 + 4.302653 / math.sqrt(3)))
    assert comparison.interval([1.0]) == (-math.inf, math.inf)
    with pytest.raises(ValueError, match="no values"):
        comparison.interval([])


def test_models_the_paper_lacks_have_no_difference() -> None:
    (row,) = comparison.compare(paper.table(1), {"adult": [result("realmlp", 0.9)]})
    assert row.paper is row.difference is None
    assert comparison.distances([row]) == {}
    assert "realmlp" in comparison.render([row])
    assert next(csv.DictReader(comparison.to_csv([row]).splitlines()))["paper"] == ""
    assert comparison.conclusions([]) == []


def test_what_has_failed_has_a_line() -> None:
    rows = comparison.compare(paper.table(1), {"adult": [result("bishop", 0.9)]})
    failed = [("adult", "adult", "bishop"), ("361094", "soil", "mlp"), ("bank", "bank", "all models")]
    whole, lines = comparison.render(rows).splitlines(), comparison.render(rows, failed).splitlines()
    assert [line.split() for line in lines[: len(whole)]] == [line.split() for line in whole]
    assert [line.split() for line in lines[len(whole) :]] == [
        ["361094", "soil", "mlp", "failed"],
        ["bank", "all", "models", "failed"],
    ]


def parsed(*flags: str) -> argparse.Namespace:
    return reproduce.reproduce_parser().parse_args(["--paper-table", *flags])


def test_a_task_that_cannot_be_had_leaves_the_others(shared: Path, tmp_path: Path, openml_cache: Path) -> None:
    entries = json.loads((shared / "data" / "manifest.json").read_text("utf-8"))["datasets"]
    only = [entry for entry in entries if entry.get("openml", {}).get("task") == 361288]
    (tmp_path / "manifest.json").write_text(json.dumps({"datasets": only}))
    shutil.copy(shared / "data" / only[0]["file"], tmp_path)
    with openml_server(tmp_path) as server:
        args, table = parsed("2", "--openml-server", server), paper.table(2)
        found, missing = obtained(["361093", "361288"], lambda name: reproduce._ref(table, name, args))
        assert {name: ref.key for name, ref in found.items()} == {"361288": "paper-table-2-CR-abalone"}
        assert [(f.dataset, f.model) for f in missing] == [("361093", "all models")]
        assert missing[0].reason == f"OpenML task 361093: {server} answers 'Unknown task'"
        with pytest.raises(UserError, match="OpenML task 361093"):
            obtained(["361093"], lambda name: reproduce._ref(table, name, args))


def test_a_dead_server_is_told_while_it_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    def find(name: str) -> DatasetRef:
        if name == "iris":
            return embedded_ref(name)
        raise SourceUnavailable(f"no answer for {name} from http://me:pass@host")

    found, missing = obtained(["1", "iris", "2"], find, "task ")
    assert list(found) == ["iris"]
    assert [(f.dataset, f.reason) for f in missing] == [
        (f"task {n}", f"no answer for {n} from http://***@host") for n in (1, 2)
    ]
    assert caplog.messages == [f"{f.dataset}: {f.reason}" for f in missing]
    with pytest.raises(SourceUnavailable, match="no answer for 2"):
        obtained(["2", "1"], find)


def test_datasets_by_name_and_by_task() -> None:
    second = paper.table(2)
    assert reproduce.chosen_datasets(paper.table(1), None) == list(paper.table(1).datasets)
    assert reproduce.chosen_datasets(second, ["361288,361093", "361288"]) == ["361288", "361093"]
    names = [second.name(d) for d in second.datasets]
    twice = next(name for name in names if names.count(name) > 1)
    with pytest.raises(UserError, match=rf"{twice} is the name of tasks \d+ and \d+"):
        reproduce.chosen_datasets(second, [twice])
    once = next(name for name in names if names.count(name) == 1)
    assert second.name(reproduce.chosen_datasets(second, [once])[0]) == once
    with pytest.raises(UnknownName, match="unknown dataset of the paper's table 'adlt'"):
        reproduce.chosen_datasets(paper.table(1), ["adlt"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--paper-table", "1", "--defaults-only", "--trials", "3"], "--trials goes with a search"),
        (["--paper-table", "1", "--models", "bishup"], "unknown model 'bishup'"),
        (["--paper-table", "1", "--dataset", "abalone"], "unknown dataset of the paper's table 'abalone'"),
        (["--paper-table", "1", "--dataset", "adult", "abalone"], "unknown dataset of the paper's table 'abalone'"),
        (["--paper-table", "1", "--dataset", ","], "--dataset: expected at least one of adult, .*; found ','"),
        (["--paper-table", "1", "--data-dir", "nowhere"], "--data-dir: expected a folder; found 'nowhere'"),
        (["--paper-table", "1", "--dataset", "shrutime", "seismic_bumps"], "--dataset shrutime: OpenML has no whole"),
    ],
)
def test_bad_input_is_one_line(flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BISHOP_RAY_HOME", str(tmp_path / "home"))
    with pytest.raises(UserError, match=message):
        reproduce.run_reproduce(reproduce.reproduce_parser().parse_args(flags))
    assert not (tmp_path / "home").exists()


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="needs the shared data beside the clone")
def test_a_table_is_reproduced_and_found_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import ray

    from bishop_ray.tracking import runs_frame

    flags = [
        "--paper-table", "1", "--dataset", "qsar_biodeg", "--models", "xgboost", "lightgbm", "--trials", "2",
        "--splits", "2", "--seeds", "1", "--data-dir", str(DATA), "--storage", str(tmp_path), "--tracking-uri",
        f"sqlite:///{tmp_path}/mlflow.db", "--output", str(tmp_path / "out.csv"),
    ]  # fmt: skip
    try:
        assert reproduce.run_reproduce(reproduce.reproduce_parser().parse_args(flags)) == 0
        rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
        assert [(row["model"], row["splits"], row["trials"]) for row in rows] == [
            ("xgboost", "2", "4"),
            ("lightgbm", "2", "4"),
        ]
        for row in rows:
            assert 85 < float(row["test"]) < 99
            printed = paper.table(1).score("qsar_biodeg", row["model"])
            assert printed is not None
            assert float(row["paper"]) == printed.mean
        runs = runs_frame(f"sqlite:///{tmp_path}/mlflow.db", "paper-table-1")
        parents = runs[runs["trial"] == -1]
        assert len(parents) == 4
        assert set(parents["tags.test_openings"]) == {"1"}, "once per model and split"
        assert len(runs) == 4 + 8
        capsys.readouterr()
        assert reproduce.run_reproduce(reproduce.reproduce_parser().parse_args(flags)) == 0
        assert " started" not in capsys.readouterr().out, "nothing is trained again"
        assert list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines())) == rows
        report = ["--paper-table", "1", "--storage", str(tmp_path), "--tracking-uri", f"sqlite:///{tmp_path}/mlflow.db"]
        assert report_cli.run_report(report_cli.report_parser().parse_args(report)) == 0
        results = pd.read_csv(tmp_path / "reports" / "paper-table-1" / "results.csv").set_index("model")
        assert set(results.dataset) == {"qsar_biodeg"}
        for row in rows:
            assert results.ours[row["model"]] == pytest.approx(float(row["test"]))
            assert results.paper[row["model"]] == float(row["paper"])
            assert results.splits[row["model"]] == 2
    finally:
        ray.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="needs the shared data beside the clone")
def test_defaults_only_trains_the_default_configuration_of_what_can_be_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import ray

    from bishop_ray.tracking import runs_frame

    tables = tmp_path / "tables"
    tables.mkdir()
    shutil.copy(DATA / "qsar_biodeg.parquet", tables)
    (tables / "adult.csv").write_text("age,income\n1,<=50K\n2,>50K\n")
    flags = [
        "--paper-table", "1", "--dataset", "adult", "qsar_biodeg", "shrutime", "--models", "lightgbm",
        "--defaults-only", "--seeds", "1", "--data-dir", str(tables), "--storage", str(tmp_path), "--tracking-uri", f"sqlite:///{tmp_path}/mlflow.db",
    ]  # fmt: skip
    try:
        assert reproduce.run_reproduce(reproduce.reproduce_parser().parse_args(flags)) == 1
    finally:
        ray.shutdown()
    begun, _, ended = capsys.readouterr().out.partition("trial 0 started")
    for word, reason in (("adult", "adult.csv: expected 6 numerical"), ("shrutime", "shrutime.parquet, .csv or .tsv")):
        (line,) = [line for line in begun.splitlines() if line.startswith(f"cannot be had: {word}: ")]
        assert reason in line
        assert f"failed: {word} (all models): {line.removeprefix(f'cannot be had: {word}: ')}\n" in ended
        assert [word, "all", "models", "failed"] in [line.split() for line in ended.splitlines()]
    assert "qsar_biodeg  lightgbm" in ended
    runs = runs_frame(f"sqlite:///{tmp_path}/mlflow.db", "paper-table-1-defaults")
    (trial,) = runs[runs["trial"] == 0].to_dict("records")
    from bishop_ray.search.space import load_space

    (point, _), *_ = load_space("lightgbm", "lightgbm").queue()
    for name, value in point.items():
        assert float(trial[f"params.{name}"]) == pytest.approx(float(value)), name
