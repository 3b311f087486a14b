"""A whole search behind scikit-learn's conventions."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from estimator_checks import failures, names_of
from mlflow.tracking import MlflowClient

from bishop_ray.data.columns import category_codes, to_numbers
from bishop_ray.data.files import write_table
from bishop_ray.data.load import load_dataset
from bishop_ray.data.refs import Roles, file_ref
from bishop_ray.search.cluster import Cluster
from bishop_ray.sklearn import TunedClassifier, TunedRegressor
from bishop_ray.sklearn.bishop import BiSHopClassifier
from bishop_ray.sklearn.tuned import TunedEstimator

pytest_plugins = ["study_fixtures"]

SMALL: dict[str, Any] = {"models": "xgboost", "trials": 1, "max_concurrent": 1, "random_state": 0}
ESTIMATORS = {"classifier": TunedClassifier(**SMALL, metric="accuracy"), "regressor": TunedRegressor(**SMALL)}
"""Of the default metric of a table of two classes, auc, scikit-learn's tables of ten rows hold too few to score it."""

EXPECTED_FAILURES = {
    "check_sample_weight_equivalence_on_dense_data": "a row of weight 2 is not the same as the row twice: the "
    "validation and test rows are drawn from those given",
}
"""Check -> why it cannot pass."""

WITH_A_SEARCH = {
    "check_classifier_data_not_an_array", "check_classifiers_classes", "check_classifiers_train",
    "check_dict_unchanged", "check_dont_overwrite_parameters", "check_dtype_object", "check_estimators_dtypes",
    "check_estimators_fit_returns_self", "check_estimators_overwrite_params", "check_estimators_pickle",
    "check_f_contiguous_array_estimator", "check_fit2d_1feature", "check_fit2d_predict1d",
    "check_fit_check_is_fitted", "check_fit_idempotent", "check_fit_score_takes_y",
    "check_methods_sample_order_invariance", "check_methods_subset_invariance", "check_n_features_in",
    "check_n_features_in_after_fitting", "check_pipeline_consistency", "check_positive_only_tag_during_fit",
    "check_readonly_memmap_input", "check_regressor_data_not_an_array", "check_regressors_int",
    "check_regressors_no_decision_function", "check_regressors_train", "check_supervised_y_2d",
    "check_sample_weight_equivalence_on_dense_data", "check_sample_weights_list", "check_sample_weights_not_an_array",
    "check_sample_weights_not_overwritten", "check_sample_weights_pandas_series", "check_sample_weights_shape",
}  # fmt: skip
KEPT = {
    "check_estimators_fit_returns_self", "check_readonly_memmap_input", "check_methods_sample_order_invariance",
    "check_methods_subset_invariance", "check_dict_unchanged", "check_fit2d_predict1d",
    "check_sample_weights_not_overwritten",
}  # fmt: skip
"""Few searches, and much of what is checked; BISHOP_ALL_CHECKS=1 runs the others too, some 40 searches."""


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_estimator_checks_that_start_no_search(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: TunedEstimator, *args: Any) -> None:
        pytest.fail("a search was started")

    monkeypatch.setattr(TunedEstimator, "_search", refuse)
    without = names_of(ESTIMATORS[kind]) - WITH_A_SEARCH
    assert len(without) > 20
    assert failures(ESTIMATORS[kind], without) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_estimator_checks_that_search(kind: str, tmp_path: Path, ray_here: Cluster) -> None:
    estimator = ESTIMATORS[kind].set_params(storage=str(tmp_path))
    everything = names_of(estimator) & WITH_A_SEARCH
    chosen = everything if os.environ.get("BISHOP_ALL_CHECKS") else everything & KEPT
    failed = failures(estimator, chosen)
    assert failed.keys() == EXPECTED_FAILURES.keys() & chosen, failed


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C means what it means to a person; a shell's background jobs ignore it."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def when(path: Path, found: str, seconds: float) -> threading.Thread:
    """Presses Ctrl-C some time after a file of this name pattern exists below `path`."""

    def press() -> None:
        end = time.monotonic() + 200
        while not any(path.glob(found)) and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.parametrize("models", ["xgboost", ["xgboost", "random_forest"]], ids=["one", "several"])
def test_ctrl_c_keeps_the_best_so_far(
    models: Any, tmp_path: Path, ray_here: Cluster, interruptible: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also case 57: no run is left open."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3))
    y = x @ [1.0, -2.0, 0.5] + 10
    search = TunedRegressor(models=models, trials=500, max_concurrent=1, storage=str(tmp_path), random_state=0)
    when(tmp_path, "studies/*/models/*/predictor/predictor.json", 1.0)
    search.fit(x, y)
    assert 0 < sum(sum(result.trials.values()) for result in search.results_) < 500
    assert search.score(x, y) > 0.8
    assert search.best_score_ == max(result.val_score for result in search.results_)
    assert search.test_score_ <= 1
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert {run.info.status for run in runs} <= {"FINISHED", "KILLED"}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_ctrl_c_before_there_is_a_best_one_ends_fit(tmp_path: Path, ray_here: Cluster, interruptible: None) -> None:
    search = TunedRegressor(models="bishop", trials=2, storage=str(tmp_path), random_state=0)
    when(tmp_path, "studies/*/optuna.journal", 0.3)
    x = np.random.default_rng(0).normal(size=(3000, 20))
    with pytest.raises(KeyboardInterrupt):
        search.fit(x, x[:, 0])
    assert not hasattr(search, "predictor_")


def test_a_class_that_no_trained_row_has_keeps_its_column() -> None:
    """Probabilities are placed by class, whichever classes the rows of the training happened to have."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=80), "b": rng.normal(size=80)})
    codes = np.where(frame["a"] > 0, 2, 0)
    model = BiSHopClassifier(
        d_embedding=4, stride=4, n_pool=2, n_merge=2, d_model=8, d_ff=8, n_heads=2, n_encoder_levels=1, decoder=False,
        n_decoded=4, max_epochs=2, lr=1e-2, batch_size=16, random_state=0,
    )  # fmt: skip
    labels = np.array(["low", "middle", "up"])
    expected = model.fit(frame, labels[codes]).predict_proba(frame)
    assert list(model.classes_) == ["low", "up"]
    model.classes_ = labels  # as where the rows of a training lack one of three
    model._fit(frame, codes)
    found = model.predict_proba(frame)
    np.testing.assert_array_equal(found[:, [0, 2]], expected)
    assert (found[:, 1] == 0).all()
    assert np.array_equal(model.predict(frame), labels[np.where(found[:, 2] > found[:, 0], 2, 0)])


def test_columns_that_parquet_cannot_hold_are_written_as_they_are_read(tmp_path: Path) -> None:
    mixed = [1, "x", 2.5] * 10
    frame = pd.DataFrame({
        "mixed": pd.Series(mixed, dtype=object), "large": [2**70 + i for i in range(30)],
        "range": pd.cut(np.arange(30.0), 4), "plain": np.arange(30.0),
    })  # fmt: skip
    table = frame.assign(target=np.arange(30) % 2, weight=np.arange(1.0, 31.0))
    ref = file_ref(write_table(tmp_path, table), "target", "classification")
    raw = load_dataset(replace(ref, roles=Roles(weights="weight")))
    assert raw.categorical == ("mixed", "range")
    for name in ("mixed", "range"):
        np.testing.assert_array_equal(category_codes(raw.frame[name])[0], category_codes(frame[name])[0])
    np.testing.assert_array_equal(to_numbers(raw.frame["large"]), to_numbers(frame["large"]))
    assert raw.weights is not None
    assert raw.weights.tolist() == list(range(1, 31))
