"""The report: its tables against numbers done by hand, its pages, its errors; from a real MLflow store."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from report_tools import HOSTILE, TRIALS, predictions, record, write_study

from bishop_ray.cli import report
from bishop_ray.data.table import TaskType
from bishop_ray.data.target import TargetCoder
from bishop_ray.errors import UnknownName, UserError
from bishop_ray.paper.printed import table
from bishop_ray.report.ablation_section import (
    ablation_figures,
    ablation_table,
    collect_ablations,
    read_ablations,
)
from bishop_ray.report.build import Written, make_report
from bishop_ray.report.collect import Selection
from bishop_ray.report.figures import best_over_trials, survival
from bishop_ray.report.outcome_figures import reliability
from bishop_ray.report.paper_section import differences, paper_dataset, paper_score
from bishop_ray.report.study_records import AblationRecords, Predictions
from bishop_ray.report.tables import cost_table, interval, optimism_table, ranks_table, results_table
from bishop_ray.search.evaluate import predictions_csv
from bishop_ray.tracking import runs_frame
from bishop_ray.tracking.ablation import AblationRuns, EndedRun
from bishop_ray.tracking.query import MetricPoint, Reader

pytest_plugins = ("tracking_fixtures",)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def report_store(new_database: tuple[Path, object], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and address of a store with a study of enough trials for importance, and one of too few."""
    folder = tmp_path_factory.mktemp("report")
    shutil.copy(new_database[0], folder / "mlflow.db")
    uri = f"sqlite:///{folder}/mlflow.db"
    write_study(folder, uri, "qsar_biodeg-bishop-s0", "bishop", TRIALS)
    write_study(folder, uri, "qsar_biodeg-lightgbm-s0", "lightgbm", 3)
    return folder, uri


def test_result_beside_the_papers_figure() -> None:
    row = results_table([record()]).frame.iloc[0]
    assert row["paper"] == pytest.approx(96.14)  # table 1, Qsar, BiSHop
    assert row["ours"] == pytest.approx(85.0)
    assert row["difference"] == pytest.approx(85.0 - 96.14)
    assert row["±"] == pytest.approx(100 * np.std([0.9, 0.8], ddof=1))


def test_split_seeds_are_averaged_before_anything_is_compared() -> None:
    studies = [record(scores="[0.9, 0.8]"), record(scores="[0.7]", name="other")]
    row = results_table(studies).frame.iloc[0]
    assert row["ours"] == pytest.approx(100 * (0.85 + 0.7) / 2)
    assert row["splits"] == 2
    assert row["trainings"] == 3
    assert row["±"] == pytest.approx(100 * np.std([0.85, 0.7], ddof=1))


def test_scores_that_do_not_compare_are_kept_apart() -> None:
    studies = [record(), record(metric="accuracy", name="other", tags={"test_scores": "[0.1]", "data_hash": "x"})]
    found = results_table(studies).frame
    assert list(found["dataset"]) == ["qsar_biodeg, auc", "qsar_biodeg, accuracy"]
    assert list(found["ours"]) == pytest.approx([85.0, 10.0])
    changed = record(name="other", tags={"test_scores": "[0.1]", "data_hash": "x"})
    assert any("do not compare" in note for note in results_table([record(), changed]).notes)


def test_no_figure_of_the_paper_for_another_metric_or_dataset() -> None:
    assert paper_score(record(metric="accuracy")) is None
    assert paper_score(record(dataset="iris")) is None
    assert paper_score(record(model="realmlp")) is None
    notes = results_table([record(dataset="iris")]).notes
    assert not any("paper" in note for note in notes)
    assert any("Split: 70" in note for note in results_table([record()]).notes)


def test_rows_with_roles_are_not_the_papers_protocol() -> None:
    plain, timed = record(), record(tags={"roles": "time 'day'"})
    assert not any("rows with" in note for note in differences([plain]))
    assert [note for note in differences([plain, timed]) if "rows with time 'day', which the paper's protocol" in note]


def test_datasets_of_the_papers_tables() -> None:
    assert paper_dataset(table(1), "adult") == paper_dataset(table(1), "paper-adult") == "adult"
    assert paper_dataset(table(2), "CR-abalone") == "361288"
    assert paper_dataset(table(2), "NR-abalone") == paper_dataset(table(2), "361280-abalone") == "361280"
    assert paper_dataset(table(1), "paper-table-1-adult") == "adult"  # as jobs/reproduce.py calls them
    assert paper_dataset(table(1), "paper-table-1-defaults-qsar_biodeg") == "qsar_biodeg"
    assert paper_dataset(table(2), "paper-table-2-NR-abalone") == "361280"
    assert paper_dataset(table(2), "abalone") == paper_dataset(table(1), "abalone") == ""


def test_an_unfinished_study_is_named_and_not_scored() -> None:
    found = results_table([record(), record(model="lightgbm", scores="")])
    assert list(found.frame["model"]) == ["bishop"]
    assert any("qsar_biodeg-lightgbm-s0" in note for note in found.notes)


def test_ranks_share_ties_and_leave_out_what_cannot_be_compared() -> None:
    studies = [
        record("adult", "bishop", "[0.9]"), record("adult", "lightgbm", "[0.9]"), record("adult", "xgboost", "[0.8]"),
        record("bank", "bishop", "[0.7]"), record("bank", "lightgbm", "[0.8]"), record("bank", "xgboost", "[0.6]"),
        record("jannis", "bishop", "[0.5]"), record("iris", "tabm", "[0.5]"),
    ]  # fmt: skip
    found = ranks_table(studies)
    assert found is not None
    ranks = found.frame.set_index("model")
    assert ranks.loc["lightgbm", ["mean", "median", "min", "max"]].tolist() == [1.25, 1.25, 1.0, 1.5]
    assert ranks.loc["bishop", ["mean", "min", "max"]].tolist() == [1.75, 1.5, 2.0]
    assert ranks.loc["xgboost", "mean"] == 3.0
    # adult: bishop 92.97, lightgbm 92.9, xgboost 92.8; bank: 93.95, 93.39, 92.96
    assert ranks["mean rank of the paper's figures"].to_dict() == {"bishop": 1.0, "lightgbm": 2.0, "xgboost": 3.0}
    assert any("tabm" in note for note in found.notes)
    assert any("iris, jannis" in note for note in found.notes)
    assert ranks_table([record()]) is None


def test_cost_counts_what_trials_asked_for() -> None:
    row = cost_table([record()]).frame.iloc[0]
    assert row["CPU hours"] == pytest.approx(3 * 60 * 2 * 3 / 3600)
    assert row["GPU hours"] == pytest.approx(3 * 60 * 2 * 0.5 / 3600)
    assert row["wall hours"] == 1.0
    assert math.isnan(row["peak memory MB"])  # not recorded: not a zero
    assert (row["complete"], row["stopped early"], row["failed"]) == (1, 1, 1)


def test_optimism_in_the_metrics_own_sign() -> None:
    found = optimism_table([record(test=predictions(0))], 50)
    assert found is not None
    row = found.frame.iloc[0]
    assert row["optimism"] == pytest.approx(100 * (0.9 - 0.85))
    assert row["95 % from"] < row["to"] <= 100
    y = np.linspace(0, 1, 30)
    kept = Predictions(y, (y + np.random.default_rng(0).normal(0, 0.3, 30))[:, None])
    losses = {"best_val_score": -0.2}
    found = optimism_table([record(metric="rmse", scores="[-0.3]", metrics=losses, test=kept)], 50)
    assert found is not None
    row = found.frame.iloc[0]
    assert row["validation"] == 0.2
    assert row["test"] == 0.3
    assert row["optimism"] == pytest.approx(0.1)  # a smaller error on validation is optimistic
    assert 0 < row["95 % from"] < row["to"]


def test_interval_covers_the_score_and_shrinks_with_rows() -> None:
    few, many = (interval(record(test=predictions(3, rows)), 100) for rows in (40, 400))
    assert few[1] - few[0] > many[1] - many[0] > 0
    assert many[2] == 400
    one_class = Predictions(np.zeros(5), np.full((5, 2), 0.5))
    assert math.isnan(interval(record(test=one_class), 5)[0])


def test_calibration_of_known_probabilities() -> None:
    confidence = np.repeat([0.2, 0.8], 50)
    right = np.concatenate([np.arange(50) < 10, np.arange(50) < 40]).astype(float)
    part = Predictions(right, np.column_stack([1 - confidence, confidence]))
    mean, share, error = reliability(part)
    assert mean == pytest.approx([0.2, 0.8])
    assert share == pytest.approx([0.2, 0.8])
    assert error == pytest.approx(0.0, abs=1e-12)
    assert reliability(Predictions(1 - right, part.output))[2] == pytest.approx(0.6)
    same = Predictions(np.array([0.0, 1.0, 2.0]), np.full((3, 3), 1 / 3))
    assert reliability(same)[1] == pytest.approx([1 / 3])


def test_survival_and_best_so_far() -> None:
    figure = survival("d", [record()])
    assert figure is not None
    assert list(figure.plot.data[0].y) == [1.0, 1.0, 0.5, 0.5]  # the failed trial is not among them
    line, own, stopped, _ = best_over_trials("d", [record()]).plot.data
    assert list(line.y)[:2] == [90.0, 90.0]
    assert list(own.y) == [90.0]
    assert list(stopped.y) == [70.0]
    assert survival("d", [record(trials=record().trials[:1])]) is None


def test_predictions_are_kept_in_the_targets_units_and_sampled_when_many() -> None:
    coder = TargetCoder("y", TaskType.REGRESSION, center=10.0, scale=2.0)
    y = np.array([0.5, -1.0], np.float32)
    frame = pd.read_csv(pd.io.common.StringIO(predictions_csv(coder, (y, y[:, None]), (y, 2 * y[:, None]))))
    assert frame[frame.part == "test"]["target"].tolist() == [11.0, 8.0]
    assert frame[frame.part == "test"]["prediction"].tolist() == [12.0, 6.0]
    many = np.arange(250_000, dtype=np.float32)
    text = predictions_csv(coder, (y, y[:, None]), (many, many[:, None]))
    kept = pd.read_csv(pd.io.common.StringIO(text))
    kept = kept[kept.part == "test"]
    assert len(kept) == 200_000
    assert np.allclose(kept["target"], kept["row"] * 2.0 + 10.0)


def ablations(name: str, settings: dict[str, float], base: str = "full", metric: str = "auc") -> list[AblationRecords]:
    return [
        AblationRecords(name, "qsar_biodeg", "bishop", setting, metric, str(seed), value, value + 0.01 * seed, base,
                 {"epoch/val_score": [MetricPoint(1, 0, value), MetricPoint(2, 0, value)]})
        for setting, value in settings.items()
        for seed in (0, 1)
    ]  # fmt: skip


def test_ablations_beside_the_paper() -> None:
    found = ablation_table(ablations("components", {"no_decoder": 0.8, "full": 0.9}))
    assert found is not None
    rows = found.frame.set_index("setting")
    assert list(rows.index) == ["full", "no_decoder"]
    assert rows.loc["full", "paper"] == pytest.approx(92.85)
    assert rows.loc["no_decoder", "paper"] == pytest.approx(93.04)
    assert rows.loc["no_decoder", "difference"] == pytest.approx(-10.0)
    assert rows.loc["full", "±"] == pytest.approx(100 * np.std([0.9, 0.91], ddof=1))
    assert any("The paper's figures" in note for note in found.notes)
    assert ablation_table([]) is None


def test_every_ablation_has_the_base_that_its_runs_name() -> None:
    runs = ablations("depth", {"3": 0.8, "2": 0.9, "1": 0.7}, base="2")
    runs = [replace(run, validation=math.nan, test=math.nan) if run.key[4:] == ("3", "0") else run for run in runs]
    found = ablation_table([*runs, *ablations("depth", {"2": 5.0, "1": 4.0}, base="1", metric="rmse")])
    assert found is not None
    rows = found.frame.set_index(["metric", "setting"])
    assert list(rows.index) == [("auc", "1"), ("auc", "2"), ("auc", "3"), ("rmse", "1"), ("rmse", "2")]
    assert list(rows["base"]) == ["2", "2", "2", "1", "1"]
    assert rows.loc[("auc", "1"), "difference"] == pytest.approx(-20.0)
    assert rows.loc[("auc", "3"), "difference"] == pytest.approx(-10.0)  # to the base of the seed that did not fail
    assert (rows.loc[("auc", "3"), "runs"], rows.loc[("auc", "3"), "failed"]) == (1, 1)
    assert math.isnan(rows.loc[("auc", "2"), "difference"])
    assert rows.loc[("rmse", "2"), "difference"] == pytest.approx(1.0)
    unnamed = ablation_table(ablations("depth", {"1": 0.7, "2": 0.8}, base=""))
    assert unnamed is not None
    assert unnamed.frame["difference"].isna().all()
    other = ablation_table(ablations("sparsity", {"all": 0.7}, base="all"))
    assert other is not None
    assert not any("paper" in note for note in other.notes)
    pictures = ablation_figures([*runs, *ablations("depth", {"1": 4.0}, metric="rmse")])
    assert [figure.name for figure in pictures] == [
        "ablation-depth-qsar-biodeg-auc", "ablation-depth-qsar-biodeg-rmse",
    ]  # fmt: skip
    assert list(pictures[0].plot.data[0].y) == pytest.approx([70.5, 90.5, 81.0])


def ended(setting: str, seed: int, width: int, started: int, metric: str = "auc") -> EndedRun:
    params = {"ablation": "depth", "setting": setting, "model": "bishop", "seed": seed, "train.seed": seed,
              "model.d_model": width}  # fmt: skip
    scores = {"validation": 0.8, "test": 0.7 + 0.001 * seed}
    return EndedRun("a run", f"{setting}/{seed}", "FINISHED", params, scores, {"model": "bishop", "base_setting": "2"},
                    {1: {"epoch/val_score": 0.8}}, started, started + 5)  # fmt: skip


def test_runs_of_other_configurations_are_not_mixed(uri: str) -> None:
    tags = {"dataset": "iris", "metric": "auc", "data_hash": "x", "rows": "7/2/1"}

    def write(identity: str, runs: list[EndedRun], **more: str) -> None:
        AblationRuns(uri, "ablation-depth", identity, tags | more).send(runs)

    write("narrow", [ended("2", seed, 8, 1000) for seed in (1, 2, 3)])
    write("other split", [ended(setting, 1001, 16, 1500) for setting in "12"])
    write("wide", [ended(setting, seed, 16, 2000) for setting in "12" for seed in (1, 2)])
    write("other rows", [ended("2", 2001, 16, 1800)], data_hash="y")
    write("other metric", [ended("2", 1, 8, 900)], metric="accuracy")
    runs, others = collect_ablations(Reader(uri), "ablation-depth", set())
    assert sorted(run.key[3:] for run in runs) == [
        ("accuracy", "2", "1"),
        *[("auc", setting, seed) for setting in "12" for seed in ("1", "1001", "2")],
    ]
    assert others == 4
    assert {run.base for run in runs} == {"2"}
    assert collect_ablations(Reader(uri), "", {"wine"}) == ([], 0)


def test_ablation_figures() -> None:
    sparsity = ablations("sparsity", {"all": 0.9, "random_50": 0.8, "increasing_50": 0.85, "random_90": 0.6})
    lines = {trace.name: trace for trace in ablation_figures(sparsity)[0].plot.data}
    assert list(lines["bishop, random"].x) == [0.0, 50.0, 90.0]
    assert list(lines["bishop, increasing"].x) == [0.0, 50.0]
    assert lines["bishop, random"].y[0] == pytest.approx(90.5)
    depth = ablation_figures(ablations("depth", {"1": 0.8, "2": 0.9}))[0].plot.data[0]
    assert list(depth.x) == [1.0, 2.0]
    curve = ablation_figures(ablations("convergence", {"gsh": 0.8, "hopfield": 0.7}))
    assert len(curve) == 1  # no loss was recorded
    assert list(curve[0].plot.data[0].x) == [1, 2]
    losses = [
        replace(
            run,
            courses={
                "epoch/val_loss": [MetricPoint(1, 0, float(run.seed))],
                "epoch/val_score": [MetricPoint(1, 0, -4.0)],
            },
        )
        for run in ablations("convergence", {"gsh": 3.0}, metric="rmse")
    ]
    loss, score = ablation_figures(losses)
    assert (loss.plot.layout.yaxis.title.text, score.plot.layout.yaxis.title.text) == (
        "validation loss", "validation rmse",
    )  # fmt: skip
    assert list(score.plot.data[0].y) == [4.0]  # in the metric's own sign
    mean, spread = 0.5, np.std([0, 1], ddof=1)
    assert list(loss.plot.data[1].y) == pytest.approx([mean + spread, mean - spread])


@pytest.fixture(scope="module")
def written(report_store: tuple[Path, str]) -> Written:
    folder, uri = report_store
    return make_report(Selection(experiment="exp"), storage=folder, uri=uri)


def test_files_and_what_mlflow_has(written: Written, report_store: tuple[Path, str]) -> None:
    names = {path.name for path in written.folder.iterdir()}
    assert names >= {"report.html", "report.md", "results.csv", "ranks.csv", "cost.csv", "optimism.csv",
                     "importance-bishop.csv"}  # fmt: skip
    reader = Reader(report_store[1])
    assert reader.text(written.run_id, "report/results.csv") == ""  # in a folder, not at the top
    runs = runs_frame(report_store[1], "exp")
    assert list(runs[runs.kind == "report"]["run_id"]) == [written.run_id]
    results = pd.read_csv(written.folder / "results.csv")
    assert results.set_index("model").loc["bishop", "ours"] == pytest.approx(80.0)
    cost = pd.read_csv(written.folder / "cost.csv").set_index("study")
    assert cost.loc["qsar_biodeg-bishop-s0", "peak memory MB"] == 500 + TRIALS - 1
    assert cost.loc["qsar_biodeg-bishop-s0", "trials"] == TRIALS


def test_importance_finds_what_matters_and_needs_trials(written: Written) -> None:
    shares = pd.read_csv(written.folder / "importance-bishop.csv").set_index("parameter")
    assert shares["qsar_biodeg, forest"].idxmax() == shares["qsar_biodeg, fANOVA"].idxmax() == "train.lr"
    assert shares["qsar_biodeg, forest"].sum() == pytest.approx(1.0)
    assert shares.loc["train.lr", "paper, forest"] == 0.17
    text = (written.folder / "report.md").read_text("utf-8")
    assert "too few trials with a score: 3, at least 20 are needed" in text


def test_page_holds_everything_and_names_stay_text(written: Written) -> None:
    page = (written.folder / "report.html").read_text("utf-8")
    own = page[page.index("</head>") :]
    assert own.count('class="plot"') == own.count('class="figure"') == written.figures > 10
    assert "alert(1)" in own
    assert "<script>alert" not in own
    assert not re.search(r'(src|href)="(?!#|data:)', own)
    assert HOSTILE not in (written.folder / "report.md").read_text("utf-8")


@pytest.mark.slow
def test_a_repeated_report_replaces_the_first(written: Written, report_store: tuple[Path, str]) -> None:
    folder, uri = report_store
    again = make_report(Selection(experiment="exp"), storage=folder, uri=uri)
    assert again.run_id == written.run_id
    one = make_report(Selection(("qsar_biodeg-lightgbm-s0",)), storage=folder, uri=uri, output=folder / "one")
    frame = runs_frame(uri, "exp").set_index("run_id")
    assert frame.loc[one.run_id, "kind"] == "study"  # a single study's report lies beside it
    assert (folder / "one" / "report.html").is_file()


@pytest.mark.slow
def test_report_of_a_paper_table_says_what_is_missing(report_store: tuple[Path, str], tmp_path: Path) -> None:
    place = ["--tracking-uri", report_store[1], "--storage", str(tmp_path)]
    assert run("--paper-table", "1", *place) == 0
    text = (tmp_path / "reports" / "paper-table-1" / "report.md").read_text("utf-8")
    assert "1 of the table's 9 datasets; none of: adult, bank, blastchar, income, seismic" in text
    assert "jannis" in text


def run(*words: str) -> int:
    return report.run_report(report.report_parser().parse_args(words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected names of studies, or --experiment or --paper-table; found none of them"),
        (["a", "--experiment", "b"], "found both"),
        (["--paper-table", "3"], "paper-table"),
        (["--experiment", "nope"], "unknown experiment 'nope'"),
        (["qsar_biodeg-bishop-s1"], "did you mean 'qsar_biodeg-bishop-s0'"),
        (["--paper-table", "2"], "--paper-table 2: expected studies or ablations; found none in sqlite"),
        (["--experiment", "exp", "--ablations", "missing.csv"], "--ablations: expected a CSV file"),
        (["--experiment", "exp", "--study-db", "sqlite:///no.db"], "--study-db: expected the database of studies"),
    ],
)
def test_mistakes_are_one_line(report_store: tuple[Path, str], tmp_path: Path, words: list[str], message: str) -> None:
    place = ["--tracking-uri", report_store[1], "--storage", str(tmp_path / "s"), "--output", str(tmp_path / "out")]
    with pytest.raises(UserError) as error:
        run(*words, *place)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="found no file"):
        run("x", "--tracking-uri", f"sqlite:///{tmp_path}/none.db")
    assert not (tmp_path / "none.db").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="--output: expected a folder"):
        run("x", "--output", str(tmp_path / "file"))


def test_a_file_of_ablations_without_a_column(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("ablation,dataset\ncomponents,iris\n")
    with pytest.raises(UserError, match="found none named 'model'"):
        read_ablations(path)
    path.write_text(
        "ablation,dataset,model,setting,metric,seed,validation,test,status\n"
        "depth,iris,bishop,1,auc,0,0.9,0.8,complete\ndepth,iris,bishop,2,auc,0,,,failed\n"
    )
    first, second = read_ablations(path)
    assert (first.setting, first.test, first.base, first.failed) == ("1", 0.8, "", False)
    assert (second.setting, second.failed) == ("2", True)
    path.write_text(
        "ablation,dataset,model,setting,metric,seed,validation,test,base_setting\ndepth,iris,bishop,1,auc,0,0.9,0.8,2\n"
    )
    assert [(a.setting, a.base) for a in read_ablations(path)] == [("1", "2")]


def test_unknown_study_is_told_by_name(report_store: tuple[Path, str]) -> None:
    with pytest.raises(UnknownName, match="known: qsar_biodeg-bishop-s0, qsar_biodeg-lightgbm-s0"):
        make_report(Selection(("zzz",)), storage=report_store[0], uri=report_store[1])


def test_the_job_answers_at_once_and_in_one_line(tmp_path: Path) -> None:
    code = (
        "import sys, runpy\n"
        "sys.argv = ['jobs/report.py', '--help']\n"
        "try:\n    runpy.run_path('jobs/report.py', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "bad = {m.split('.')[0] for m in sys.modules} & {'torch', 'ray', 'mlflow', 'optuna', 'plotly', 'sklearn'}\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    helped = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert helped.returncode == 0, helped.stderr
    assert "--paper-table" in helped.stdout
    wrong = subprocess.run([sys.executable, "jobs/report.py", "--nope"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1
    assert wrong.stderr.startswith("error: ")
