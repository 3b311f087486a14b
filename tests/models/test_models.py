"""THE contract: every registered model, every task type, every mix of columns, as a trial trains it.

A model is trained at its default point for few epochs or rounds on a small table with missing values and a constant
column, and asked about rows with missing values and levels it never saw.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from fakes import make_table
from model_training import NEEDS_WEIGHTS, Report, train_default, why_not
from test_foundation import FORMATS, VARIABLE

from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.table import RawDataset, TableSpec, TaskType
from bishop_ray.metrics import default_metric, evaluate
from bishop_ray.models import MODELS, create_model, not_installed
from bishop_ray.models.base import Estimator, Network
from bishop_ray.predictor import Predictor

TASKS = list(TaskType)
MIXES = {"numeric": (4, 0), "categorical": (0, 4), "mixed": (3, 2)}
ROWS = 120
CLASSES = 5

pytestmark = pytest.mark.usefixtures("one_thread")
every_model = pytest.mark.parametrize("name", list(MODELS))
every_estimator = pytest.mark.parametrize("name", [name for name, info in MODELS.items() if info.kind == "estimator"])
every_network = pytest.mark.parametrize("name", [name for name, info in MODELS.items() if info.kind == "network"])
every_task = pytest.mark.parametrize("task", TASKS)
every_mix = pytest.mark.parametrize("mix", list(MIXES))


def table(task: TaskType, mix: str, rows: int = ROWS, seed: int = 0, missing: bool = True) -> RawDataset:
    n_num, n_cat = MIXES[mix]
    return make_table(task, n_num, n_cat, rows, with_missing=missing, seed=seed, classes=CLASSES, with_constant=True)


def request_frame(task: TaskType, mix: str) -> pd.DataFrame:
    """Rows never trained on: the first all missing, the last with unseen levels."""
    n_num, n_cat = MIXES[mix]
    made = make_table(
        task,
        n_num,
        n_cat,
        40,
        with_missing=True,
        with_unseen_category=True,
        seed=2,
        classes=CLASSES,
        with_constant=True,
    )
    return made.frame


def spec_of(task: TaskType, mix: str) -> TableSpec:
    return Preprocessor.fit(table(task, mix)).spec


def need(name: str, task: TaskType, mix: str = "mixed") -> None:
    """Skips with the reason why the model cannot be tested on such a table."""
    if reason := why_not(name, spec_of(task, mix), ROWS):
        pytest.skip(reason)


@cache
def trained(name: str, task: TaskType, mix: str) -> Predictor:
    return train_default(name, table(task, mix), table(task, mix, 60, seed=1))[0]


def output(predictor: Predictor, frame: pd.DataFrame) -> np.ndarray:
    """(R, K) float64: probabilities, or the standardised target."""
    if predictor.task.is_classification:
        return predictor.predict_proba(frame).to_numpy(np.float64)
    target = predictor.preprocessor.target
    return ((predictor.predict(frame).to_numpy(np.float64) - target.center) / target.scale)[:, None]


@pytest.fixture(scope="module", autouse=True)
def _random_weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Foundation models read tiny checkpoints of random weights: all of the contract but learning holds for them."""
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        for name in NEEDS_WEIGHTS:
            if not not_installed(name):
                torch.manual_seed(0)
                folder = tmp_path_factory.mktemp(name)
                FORMATS[name](folder)
                patch.setenv(VARIABLE[name], str(folder))
        yield


@every_model
def test_no_model_is_skipped_silently(name: str) -> None:
    if (reason := not_installed(name)) and not os.environ.get("CI"):
        pytest.skip(reason)
    reasons = {why_not(name, spec_of(task, mix), ROWS) for task in TASKS for mix in MIXES} - {""}
    assert not reasons


@every_model
@every_task
@every_mix
def test_predictions_are_finite_and_a_row_has_its_own(name: str, task: TaskType, mix: str) -> None:
    need(name, task, mix)
    predictor, frame = trained(name, task, mix), request_frame(task, mix)
    assert "constant" in predictor.preprocessor.dropped
    k = {TaskType.BINARY: 2, TaskType.MULTICLASS: CLASSES, TaskType.REGRESSION: 1}[task]
    x_num, x_cat = predictor.preprocessor.transform_features(frame)
    raw = predictor.model.predict(x_num, x_cat)
    assert raw.dtype == np.float32
    whole = output(predictor, frame)
    assert whole.shape == raw.shape == (len(frame), k)
    assert np.isfinite(whole).all()
    if task.is_classification:
        assert (whole >= 0).all()
        np.testing.assert_allclose(whole.sum(axis=1), 1, atol=1e-5)
    assert np.ptp(whole, axis=0).max() > 0, "every row has the same prediction"
    for row in (0, 17, len(frame) - 1):  # alone: all missing, an ordinary one, unseen levels
        np.testing.assert_allclose(output(predictor, frame.iloc[[row]])[0], whole[row], atol=1e-5, rtol=1e-5)
    order = np.random.default_rng(0).permutation(len(frame))
    np.testing.assert_allclose(output(predictor, frame.iloc[order]), whole[order], atol=1e-5, rtol=1e-5)
    odd = np.r_[5, 5, 39, 5, 0]  # repeated rows, others absent
    np.testing.assert_allclose(output(predictor, frame.iloc[odd]), whole[odd], atol=1e-5, rtol=1e-5)
    assert output(predictor, frame.head(0)).shape == (0, k)


@every_model
@every_task
def test_an_unseen_level_is_as_a_missing_one(name: str, task: TaskType) -> None:
    """Case 30."""
    need(name, task)
    predictor, frame = trained(name, task, "mixed"), request_frame(task, "mixed").head(5)
    unseen, absent = frame.assign(cat_0="never seen", cat_1="nor this"), frame.assign(cat_0=None, cat_1=None)
    np.testing.assert_array_equal(output(predictor, unseen), output(predictor, absent))


@every_model
@every_task
@every_mix
def test_a_saved_predictor_gives_the_same_predictions(name: str, task: TaskType, mix: str, tmp_path: Path) -> None:
    need(name, task, mix)
    predictor, frame = trained(name, task, mix), request_frame(task, mix)
    folder = predictor.save(tmp_path / "p")
    np.testing.assert_array_equal(output(Predictor.load(folder), frame), output(predictor, frame))
    again = Predictor.load(folder).save(tmp_path / "q")  # a loaded one is as good as a trained one
    np.testing.assert_array_equal(output(Predictor.load(again), frame), output(predictor, frame))


@every_model
@every_task
def test_the_same_seed_gives_the_same_model_and_nothing_is_left_behind(
    name: str, task: TaskType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    need(name, task)
    first = output(trained(name, task, "mixed"), frame := request_frame(task, "mixed"))
    capfd.readouterr()
    monkeypatch.chdir(tmp_path)
    torch.rand(7)  # another random state: only the seed counts
    np.random.rand(7)
    second, _ = train_default(name, table(task, "mixed"), table(task, "mixed", 60, seed=1))
    np.testing.assert_array_equal(output(second, frame), first)
    assert capfd.readouterr() == ("", ""), "training and predicting print nothing"
    assert not list(tmp_path.iterdir()), "training and predicting write no files"


def chance_loss(train: RawDataset, val: RawDataset) -> float:
    """Loss of the best constant prediction of the validation rows."""
    if not val.task.is_classification:
        return float(Preprocessor.fit(train).encode_target(val.target).var())
    shares = val.target.value_counts(normalize=True)
    return float(-(shares * np.log(shares)).sum())


@every_model
@every_task
def test_it_learns(name: str, task: TaskType) -> None:
    """From a table without missing values; missing ones in a request are then still answered."""
    need(name, task)
    if name in NEEDS_WEIGHTS:
        pytest.skip("random weights have learnt nothing to apply")
    train, val = table(task, "mixed", 300, missing=False), table(task, "mixed", 200, seed=1, missing=False)
    bound = 0.8 * chance_loss(train, val)

    def learnt(report: Report) -> bool:
        return report.val_loss < bound

    predictor, reports = train_default(name, train, val, max_epochs=40, on_epoch=learnt)
    assert min(report.val_loss for report in reports) < bound
    metric = default_metric(task, suite=False)
    score = evaluate(metric, task, predictor.preprocessor.encode_target(val.target), output(predictor, val.frame))
    assert score > {"auc": 0.75, "r2": 0.15}[metric]
    assert np.isfinite(output(predictor, request_frame(task, "mixed"))).all()


@every_estimator
@every_task
def test_rounds_of_an_estimator(name: str, task: TaskType, tmp_path: Path) -> None:
    """Chunks are equal and end when asked to; fewer rounds may be used afterwards, and survive saving."""
    need(name, task)
    calls: list[int] = []
    frame, parts = request_frame(task, "mixed"), (table(task, "mixed"), table(task, "mixed", 60, seed=1))

    def stop_at_third(report: Report) -> bool:
        calls.append(report.rounds)
        return len(calls) == 3

    predictor, _ = train_default(name, *parts, on_epoch=stop_at_third)
    model = predictor.model
    assert isinstance(model, Estimator)
    if model.reports > 1:
        assert len(calls) == 4, "three chunks and the end"
        assert calls[0] > 0
        assert calls[1:3] == [2 * calls[0], 3 * calls[0]]
        assert calls[3] <= calls[2], "nothing was trained after the stop"
        model.rounds = calls[2]
        third = output(predictor, frame)
        model.rounds = calls[0]
        first = output(predictor, frame)
        assert not np.array_equal(first, third), "rounds do not matter"
        loaded = Predictor.load(predictor.save(tmp_path / "p"))
        assert loaded.model.rounds == calls[0]
        np.testing.assert_array_equal(output(loaded, frame), first)
    else:
        assert len(calls) == 1, "a model without rounds reports once"
    encoded = predictor.preprocessor.transform(parts[0])
    again = create_model(name, predictor.preprocessor.spec, predictor.hparams)
    assert isinstance(again, Estimator)
    again.refit(encoded, calls[0])
    refitted = again.predict(*predictor.preprocessor.transform_features(frame))
    assert refitted.shape == (len(frame), predictor.preprocessor.spec.n_out)
    assert np.isfinite(refitted).all()


@every_network
def test_a_network_takes_an_empty_batch(name: str) -> None:
    need(name, TaskType.BINARY)
    predictor = trained(name, TaskType.BINARY, "mixed")
    network = predictor.model
    assert isinstance(network, Network)
    x_num, x_cat = predictor.preprocessor.transform_features(request_frame(TaskType.BINARY, "mixed").head(0))
    assert network.eval()(torch.tensor(x_num), torch.tensor(x_cat)).shape == (0, 2)


FRESH = """
import sys
from pathlib import Path
import numpy as np, pandas as pd, torch
torch.set_num_threads(1)
from bishop_ray.predictor import Predictor
for folder in sorted(Path(sys.argv[1]).iterdir()):
    try:
        predictor = Predictor.load(folder / "p")
        frame = pd.read_parquet(folder / "frame.parquet")
        found = predictor.predict_proba(frame) if predictor.task.is_classification else predictor.predict(frame)
        np.save(folder / "found.npy", found.to_numpy())
    except Exception as error:
        (folder / "error.txt").write_text(f"{type(error).__name__}: {error}")
bad = {m.split(".")[0] for m in sys.modules} & {"ray", "mlflow", "optuna", "openml"}
sys.exit(f"predicting imported {bad}" if bad else 0)
"""


@pytest.fixture(scope="module")
def fresh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, without GPU, that loads every predictor the selected tests ask for."""
    root = tmp_path_factory.mktemp("fresh")
    for item in request.session.items:
        if not isinstance(item, pytest.Function) or item.originalname != test_a_fresh_process_agrees.__name__:
            continue
        name, task = item.callspec.params["name"], item.callspec.params["task"]
        if why_not(name, spec_of(task, "mixed"), ROWS):
            continue
        folder = root / f"{name}-{task.value}"
        trained(name, task, "mixed").save(folder / "p")
        request_frame(task, "mixed").to_parquet(folder / "frame.parquet")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FRESH, str(root)]
    subprocess.run(command, check=True, env=environment, cwd=Path(__file__).resolve().parents[2])
    return root


@every_model
@every_task
def test_a_fresh_process_agrees(name: str, task: TaskType, fresh: Path) -> None:
    need(name, task)
    folder = fresh / f"{name}-{task.value}"
    assert not (folder / "error.txt").exists(), (folder / "error.txt").read_text()
    predictor, frame = trained(name, task, "mixed"), request_frame(task, "mixed")
    expected = predictor.predict_proba(frame) if task.is_classification else predictor.predict(frame)
    np.testing.assert_allclose(np.load(folder / "found.npy"), expected.to_numpy(), rtol=1e-6, atol=1e-7)
