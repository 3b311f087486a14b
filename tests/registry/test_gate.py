"""The gate before an alias: the stored sample, the fresh process, and what happens to a model that does not pass."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fakes import make_table
from predictor_fakes import make_predictor

from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.schema import make_raw
from bishop_ray.data.table import TaskType
from bishop_ray.metrics.bootstrap import Scored, paired_bootstrap
from bishop_ray.predictor import Predictor
from bishop_ray.registry import gate
from bishop_ray.registry.compare import score_file
from bishop_ray.registry.gate_cases import (
    AS_TRAINED,
    FOLDER,
    OUTPUTS,
    ROWS,
    Evidence,
    Validation,
    read_cases,
    read_validation,
    seconds_of,
    write_sample,
)
from bishop_ray.registry.gate_server import check

RAW = make_table(TaskType.BINARY, rows=100, with_missing=True)


def stored(folder: Path, predictor: Predictor, evidence: Evidence) -> Path:
    """What a version's artifacts hold."""
    predictor.save(folder / "predictor")
    write_sample(folder / FOLDER, predictor, evidence)
    return folder


@pytest.fixture
def version(tmp_path: Path) -> Path:
    predictor = make_predictor(RAW)
    return stored(tmp_path / "artifacts", predictor, Evidence(RAW.frame, predictor.output(RAW.frame)))


def test_the_sample_holds_every_case(version: Path) -> None:
    predictor = make_predictor(RAW)
    cases = {case.name: (case.frame(version / FOLDER), outputs) for case, outputs in read_cases(version / FOLDER)}
    names = [name for name, _ in predictor.schema]
    whole, _ = cases["as they are"]
    assert list(whole.columns) == names
    assert len(whole) == ROWS
    shuffled, _ = cases["columns shuffled"]
    assert list(shuffled.columns) != names
    pd.testing.assert_frame_equal(shuffled[names], whole)
    assert [len(cases[name][0]) for name in ("one row", "no rows")] == [1, 0]
    missing, _ = cases["a missing value in each column"]
    assert (missing.isna().sum() >= whole.isna().sum()).all()
    assert [bool(missing[name].isna()[j]) for j, name in enumerate(names)] == [True] * len(names)
    unseen, _ = cases["an unseen category in each category column"]
    for name, levels in predictor.levels.items():
        assert not set(unseen[name].dropna()) <= set(levels), name
    assert AS_TRAINED in cases
    for frame, outputs in cases.values():
        assert outputs is not None
        np.testing.assert_allclose(predictor.output(frame), outputs, atol=1e-6)
    assert check(version) | {"worst": 0} == {"failure": "", "cases": 7, "worst": 0}


def test_columns_of_mixed_types_pass_too(tmp_path: Path) -> None:
    day = datetime.date(2024, 1, 31)
    frame = pd.DataFrame(
        {
            "mixed": [1, "1", 2.5, None, True, "x"] * 10,
            "numbers": [1, "2", 3.5, None, 4, "5"] * 10,
            "flag": [True, False, True, True, False, False] * 10,
            "day": [day, day.replace(month=3), None, day, day, day] * 10,
            "coded": pd.Categorical([1, 2, 3, 1, 2, 3] * 10),
            "whole": pd.array([1, 2, None, 4, 5, 6] * 10, dtype="Int64"),
            "text": pd.array(["a", "b", None, 'ü,"', "", "b"] * 10, dtype="string"),
            "y": ["no", "yes", "no", "no", "yes", "yes"] * 10,
        }
    )
    raw = make_raw("odd", frame, "y")
    kinds = dict(Preprocessor.fit(raw).schema)
    assert (kinds["mixed"], kinds["numbers"], kinds["day"]) == ("category", "number", "moment")
    found = check(stored(tmp_path / "a", make_predictor(raw), Evidence(raw.frame)))
    assert (found["failure"], found["cases"]) == ("", 6)


def test_files_in_order_pass_in_a_fresh_process_and_spoiled_ones_do_not(version: Path, tmp_path: Path) -> None:
    found = gate.check_files(version)
    assert (found.failure, found.cases) == ("", 7)
    assert found.worst < 1e-6

    def spoiled(name: str) -> Path:
        return Path(shutil.copytree(version, tmp_path / name))

    tampered = spoiled("tampered")
    with np.load(tampered / FOLDER / OUTPUTS) as outputs:
        changed = dict(outputs)
    changed["1"][5] = changed["1"][5][::-1]
    np.savez(tampered / FOLDER / OUTPUTS, **changed)
    failure = gate.check_files(tampered).failure
    assert failure.startswith("columns shuffled: other predictions than stored in 1 of 64 rows, by up to")

    weights = spoiled("weights")
    (weights / "predictor" / "weights.safetensors").write_bytes(b"x" * 100)
    assert "weights.safetensors: damaged" in gate.check_files(weights).failure
    assert str(tmp_path) not in gate.check_files(weights).failure

    bare = spoiled("bare")
    shutil.rmtree(bare / FOLDER)
    assert gate.check_files(bare).failure == "it has no stored sample to be checked with"
    newer = spoiled("newer")
    facts = json.loads((newer / FOLDER / "gate.json").read_text())
    (newer / FOLDER / "gate.json").write_text(json.dumps(facts | {"format": 99}))
    assert "format 99" in gate.check_files(newer).failure


@pytest.mark.slow
def test_no_answer_and_a_dead_process_end_one_check_only(version: Path) -> None:
    assert gate.check_files(version, seconds=0.0).failure == "no answer within 0 s"
    gate.get_ready()
    os.kill(gate._server[0]._process.pid, signal.SIGKILL)
    assert gate.check_files(version).failure == ""


def test_the_process_sees_no_gpu_and_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "s3cret")
    monkeypatch.setenv("PYTHONPATH", "lib")
    found = gate._environment()
    assert found["CUDA_VISIBLE_DEVICES"] == ""
    assert "s3cret" not in found.values()
    assert found["PYTHONPATH"].split(os.pathsep)[1] == str(Path("lib").absolute())


def test_a_model_that_cannot_predict_a_case_is_told(version: Path, tmp_path: Path) -> None:
    """Of its own library anything may come: here a network that gives NaN."""
    predictor = make_predictor(RAW)
    predictor.model.load_state_dict({key: value * np.nan for key, value in predictor.model.state_dict().items()})
    found = check(stored(tmp_path / "nan", predictor, Evidence(RAW.frame)))
    assert found["failure"] == "as they are: the stored predictions are not finite"
    facts = json.loads((version / FOLDER / "gate.json").read_text())
    facts["cases"][4]["error"] = "ValueError: no"
    (version / FOLDER / "gate.json").write_text(json.dumps(facts))
    assert check(version)["failure"].endswith("could not predict it where it was trained: ValueError: no")


@pytest.mark.parametrize("metric", ["rmse", "neg_mean_absolute_percentage_error"])
def test_metrics_that_count_from_zero_survive_storing_and_a_holdout_file(metric: str, tmp_path: Path) -> None:
    raw = make_table(TaskType.REGRESSION, rows=80)
    predictor = make_predictor(raw)
    y, output = predictor.target.encode(raw.target), predictor.output(raw.frame)
    ours = Scored(y, output, predictor.target.units)
    folder = tmp_path / FOLDER
    write_sample(folder, predictor, Evidence(raw.frame, validation=Validation("rows", ours)))
    found = read_validation(folder)
    assert found is not None
    raw.frame.assign(y=raw.target).to_csv(tmp_path / "march.csv", index=False)
    for theirs in (found.scored, score_file(predictor, tmp_path / "march.csv")):
        difference = paired_bootstrap(metric, TaskType.REGRESSION, ours, theirs, resamples=20)
        assert difference.second == pytest.approx(difference.first, rel=1e-4)


def test_a_model_that_is_slow_here_may_be_slow_there(version: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = json.loads((version / FOLDER / "gate.json").read_text())
    assert 0 < facts["seconds"] == seconds_of(version / FOLDER) < 60
    monkeypatch.setattr(gate, "SECONDS", 0.0)
    for told, found in ((0, 0.0), (float("nan"), 0.0), ("x", 0.0), (1e9, 1800.0)):
        (version / FOLDER / "gate.json").write_text(json.dumps(facts | {"seconds": told}))
        assert seconds_of(version / FOLDER) == found
    assert gate.check_files(version).failure == "", "half an hour of its own would be time enough"
    (version / FOLDER / "gate.json").write_text(json.dumps(facts | {"seconds": 0}))
    assert gate.check_files(version).failure == "no answer within 0 s"


def test_an_interrupted_check_leaves_no_answer_to_the_next_one(version: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(server: gate._Server, until: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gate._Server, "_answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            gate.check_files(version / "none")
    assert gate.check_files(version).failure == ""


def test_a_process_with_many_open_files_is_answered(version: Path) -> None:
    gate.get_ready()
    process = gate._server[0]._process
    assert process.stdout is not None
    try:
        high = fcntl.fcntl(process.stdout.fileno(), fcntl.F_DUPFD, 1100)
    except OSError:
        pytest.skip("a process may have 1,024 open files at most here")
    process.stdout.close()
    process.stdout = os.fdopen(high, "rb", buffering=0)
    assert gate.check_files(version).failure == ""
