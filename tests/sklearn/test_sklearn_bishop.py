"""BiSHop behind scikit-learn's conventions."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from estimator_checks import failures, names_of
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bishop_ray.data.files import write_table
from bishop_ray.data.load import load_dataset
from bishop_ray.data.refs import Roles, file_ref
from bishop_ray.search.cluster import Cluster
from bishop_ray.sklearn import TunedClassifier, TunedRegressor
from bishop_ray.sklearn.bishop import BiSHopClassifier, BiSHopRegressor
from bishop_ray.sklearn.tuned import _joined

pytest_plugins = ["study_fixtures"]
TINY: dict[str, Any] = {
    "d_embedding": 4, "stride": 4, "n_pool": 2, "n_merge": 2, "d_model": 16, "d_ff": 16, "n_heads": 2,
    "n_encoder_levels": 1, "decoder": False, "n_decoded": 4, "dropout": 0.0, "head_dropout": 0.0, "max_epochs": 30,
    "lr": 1e-2, "batch_size": 16, "precision": "fp32", "random_state": 0,
}  # fmt: skip
EXPECTED_FAILURES = {
    "check_sample_weight_equivalence_on_dense_data": "a row that is repeated may come to be trained on and validated, "
    "and to lie in other batches, than one that weighs more; that weight 0 is the same as no row is tested below"
}


def table(rows: int = 120, seed: int = 0) -> tuple[pd.DataFrame, pd.Series]:
    rng = np.random.default_rng(seed)
    color = rng.choice(["red", "green", "blue"], rows)
    size = rng.normal(size=rows)
    frame = pd.DataFrame({"size": size, "color": pd.Categorical(color), "note": rng.choice(["a", None], rows)})
    label = pd.Series(np.where((size > 0) ^ (color == "red"), "yes", "no"), name="label")
    return frame, label


@pytest.mark.slow
@pytest.mark.parametrize(
    "estimator", [BiSHopClassifier(**TINY), BiSHopRegressor(**TINY)], ids=lambda e: type(e).__name__
)
def test_estimator_checks_pass(estimator: Any) -> None:
    failed = failures(estimator, names_of(estimator))
    assert failed.keys() == EXPECTED_FAILURES.keys(), failed


@pytest.mark.parametrize("kind", [str, int, bool, "category"])
def test_labels_come_back_as_they_were(kind: Any) -> None:
    frame, label = table()
    yes = (label == "yes").to_numpy()
    y = {
        str: label,
        int: pd.Series(np.where(yes, 7, 3)),
        bool: pd.Series(yes),
        "category": label.astype("category"),
    }[kind]
    model = BiSHopClassifier(**TINY).fit(frame, y)
    predicted = model.predict(frame)
    assert np.mean(predicted == y.to_numpy()) > 0.9
    assert set(predicted) <= set(model.classes_)
    assert model.predict_proba(frame).sum(axis=1) == pytest.approx(1)
    assert list(model.classes_) == sorted(set(y))
    assert list(model.feature_names_in_) == ["size", "color", "note"]


def test_a_later_frame_may_differ_in_order_type_and_values() -> None:
    frame, label = table()
    model = BiSHopClassifier(**{**TINY, "max_epochs": 3}).fit(frame, label)
    expected = model.predict_proba(frame)
    again = frame.assign(color=frame.color.astype(str), note=frame.note.astype("string"))
    assert np.array_equal(model.predict_proba(again), expected)
    strange = frame.assign(color="violet", note=np.nan)
    assert np.isfinite(model.predict_proba(strange)).all()
    with pytest.raises(ValueError, match="size"):
        model.predict(frame.drop(columns="size"))
    with pytest.raises(ValueError, match="'size': expected a number; found 'x'"):
        model.predict(frame.assign(size="x"))


def test_same_seed_same_model_and_the_users_random_state_stays() -> None:
    import torch

    frame, label = table()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = BiSHopClassifier(**{**TINY, "max_epochs": 3}).fit(frame, label)
    assert torch.equal(torch.get_rng_state(), before)
    second = clone(first).fit(frame, label)
    assert np.array_equal(first.predict_proba(frame), second.predict_proba(frame))
    other = clone(first).set_params(random_state=1).fit(frame, label)
    assert not np.array_equal(first.predict_proba(frame), other.predict_proba(frame))
    assert np.array_equal(pickle.loads(pickle.dumps(first)).predict(frame), first.predict(frame))


def test_pipeline_cross_validation_and_grid() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3))
    y = x @ [1.0, -2.0, 0.5] + 10
    pipe = make_pipeline(StandardScaler(), BiSHopRegressor(**TINY))
    assert cross_val_score(pipe, x, y, cv=2).mean() > 0.5
    grid = GridSearchCV(BiSHopRegressor(**{**TINY, "max_epochs": 2}), {"lr": [1e-2, 1e-5]}, cv=2).fit(x, y)
    assert grid.best_params_ == {"lr": 1e-2}


def test_ctrl_c_keeps_the_best_so_far(capsys: pytest.CaptureFixture[str]) -> None:
    frame, label = table()
    model = BiSHopClassifier(**{**TINY, "max_epochs": 100_000, "patience": 100_000, "verbose": 1})
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        timer = threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        began = time.monotonic()
        model.fit(frame, label)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)
    assert 1 <= time.monotonic() - began < 60
    assert 0 < model.n_iter_ < 100_000
    assert len(model.history_) == model.n_iter_
    assert np.mean(model.predict(frame) == label) > 0.5
    assert "epoch" in capsys.readouterr().err


def test_a_rare_class_keeps_its_column() -> None:
    frame, label = table()
    label[0] = "rare"
    model = BiSHopClassifier(**{**TINY, "max_epochs": 2}).fit(frame, label)
    assert list(model.classes_) == ["no", "rare", "yes"]
    assert model.predict_proba(frame).shape == (120, 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"validation_fraction": 1.5}, "validation_fraction: expected a share between 0 and 1; found 1.5"),
        ({"d_model": -1}, "d_model"),
        ({"lr": 0.0}, "lr must be > 0"),
        ({"metric": "r2"}, "r2"),
    ],
)
def test_bad_parameters_are_named(change: dict[str, Any], words: str) -> None:
    frame, label = table()
    with pytest.raises(ValueError, match=words):
        BiSHopClassifier(**{**TINY, **change}).fit(frame, label)


@pytest.mark.slow
def test_a_search_behind_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame, label = table(300)
    search = TunedClassifier(models=["lightgbm", "random_forest"], trials=4, random_state=3, verbose=1)
    assert clone(search).get_params() == search.get_params()
    search.set_params(storage=str(tmp_path)).fit(frame, label)
    assert "trial" in capsys.readouterr().err
    assert {result.model for result in search.results_} >= {"lightgbm", "random_forest"}
    assert search.best_score_ == max(result.val_score for result in search.results_)
    assert np.mean(search.predict(frame) == label) > 0.85
    assert 0.7 < search.test_score_ <= 1
    again = clone(search).fit(frame, label)  # the same study, finished
    assert all(result.reused for result in again.results_)
    assert np.array_equal(again.predict_proba(frame), search.predict_proba(frame))
    with pytest.raises(ValueError, match="unknown model 'forest'"):
        clone(search).set_params(models="forest").fit(frame, label)
    with pytest.raises(ValueError, match="--trials"):
        clone(search).set_params(trials=0).fit(frame, label)


@pytest.mark.slow
def test_a_search_for_a_number_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_here: Cluster
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3))
    y = x @ [1.0, -2.0, 0.5] + 10
    search = TunedRegressor(models="lightgbm", time_budget="40s", metric="rmse", random_state=0)
    began = time.monotonic()
    search.fit(x, y)
    assert time.monotonic() - began < 90  # it is the budget that ends the search
    assert search.score(x, y) > 0.8
    assert search.best_score_ < 0  # larger is better
    assert set(search.best_params_)
    assert not list(tmp_path.glob("bishop-tuned-*"))


@pytest.mark.parametrize("kind", [BiSHopClassifier, BiSHopRegressor])
def test_a_row_of_weight_0_is_as_if_it_were_not_there(kind: Any) -> None:
    frame, label = table()
    y = label if kind is BiSHopClassifier else frame["size"] * 2 + 1
    weights = np.ones(len(frame))
    weights[::3] = 0
    wrong = y.where(weights > 0, np.roll(y, 1))
    few = {**TINY, "max_epochs": 3}
    kept = weights > 0
    expected = kind(**few).fit(frame[kept], y[kept], weights[kept]).predict(frame)
    assert np.array_equal(kind(**few).fit(frame, wrong, sample_weight=weights).predict(frame), expected)
    # equal weights are no weights, up to the last bits of a mean
    plain = kind(**few).fit(frame[kept], y[kept])
    assert plain.history_ == pytest.approx(kind(**few).fit(frame, y, weights * 7).history_, abs=1e-3)


def test_weights_decide_between_contradicting_rows() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 2))
    twice, y = np.vstack([x, x]), np.repeat(["a", "b"], 200)
    for heavy, weights in (("a", (5.0, 0.1)), ("b", (0.1, 5.0))):
        model = BiSHopClassifier(**{**TINY, "max_epochs": 5}).fit(twice, y, sample_weight=np.repeat(weights, 200))
        assert np.mean(model.predict(x) == heavy) > 0.9


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (-np.ones(120), "sample_weight: expected weights >= 0; found -1"),
        (np.zeros(120), "non-zero weight; found 0"),
        (np.full(120, np.nan), "sample_weight contains NaN"),
        (np.ones(119), r"sample_weight.shape == \(119,\)"),
        (np.arange(120) == 5, "non-zero weight; found 1"),
        (["heavy"] * 120, "could not convert"),
    ],
)
def test_bad_weights_are_refused(weights: Any, words: str) -> None:
    frame, label = table()
    with pytest.raises(ValueError, match=words):
        BiSHopClassifier(**TINY).fit(frame, label, sample_weight=weights)


def test_a_search_is_told_the_weights(tmp_path: Path) -> None:
    frame, label = table()
    frame = frame.rename(columns={"size": "target_"})
    weights = np.linspace(0.5, 2, len(frame))
    joined, target, name = _joined(frame, label.to_numpy(), weights)
    ref = replace(file_ref(write_table(tmp_path, joined), target, "classification"), roles=Roles(weights=name))
    raw = load_dataset(ref)
    assert raw.weights == pytest.approx(weights)
    assert list(raw.frame.columns) == list(frame.columns)
    assert _joined(frame, label.to_numpy(), None)[2] == ""


def test_one_class_of_non_zero_weight_is_too_few() -> None:
    frame, label = table()
    with pytest.raises(ValueError, match="only one class is present among rows with a weight above 0"):
        BiSHopClassifier(**TINY).fit(frame, label, sample_weight=(label == "yes").astype(float))


def test_an_infinite_target_among_objects_is_refused() -> None:
    y = np.array([np.inf, *np.arange(19.0)], dtype=object)
    with pytest.raises(ValueError, match="Input y contains NaN or infinity"):
        BiSHopRegressor(max_epochs=1).fit(np.arange(40.0).reshape(20, 2), y)
