"""Selection of ensembles against slow references; the ensemble as a predictor like any other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from fakes import make_table
from hypothesis import given, settings
from hypothesis import strategies as st
from mlflow.tracking import MlflowClient
from numpy.typing import NDArray
from predictor_fakes import make_predictor

from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.table import RawDataset, TaskType
from bishop_ray.errors import BadTable, UserError
from bishop_ray.metrics import METRICS, evaluate
from bishop_ray.models import create_model, model_class
from bishop_ray.models.base import Estimator
from bishop_ray.predictor import MANIFEST, EnsembleMember, EnsemblePredictor, Predictor, fingerprint
from bishop_ray.predictor.ensemble_predictor import combine
from bishop_ray.registry import load_best, register_best
from bishop_ray.registry.artifact import requirements
from bishop_ray.search.ensemble_selection import Member, cross_fitted, fold_of_rows, running_score, select
from bishop_ray.tracking import StudyTracker

pytest_plugins = ("tracking_fixtures",)
CASES = [(metric, task) for metric, row in METRICS.items() for task in sorted(row.tasks, key=lambda t: t.value)]


def made_up(
    task: TaskType, rows: int = 90, count: int = 7, seed: int = 0
) -> tuple[NDArray[np.generic], list[NDArray[np.float32]]]:
    """A target and the predictions of models of different quality."""
    rng = np.random.default_rng(seed)
    if task is TaskType.REGRESSION:
        y = rng.normal(size=rows).astype(np.float32)
        return y, [
            (y + rng.normal(size=rows) * rng.uniform(0.5, 1.5)).astype(np.float32)[:, None] for _ in range(count)
        ]
    k = 2 if task is TaskType.BINARY else 4
    y = rng.integers(0, k, rows)
    predictions = []
    for _ in range(count):
        logits = rng.normal(size=(rows, k)) * rng.uniform(0.5, 2) + np.eye(k)[y]
        predictions.append((np.exp(logits) / np.exp(logits).sum(1, keepdims=True)).astype(np.float32))
    return y, predictions


def members_of(
    metric: str, task: TaskType, y: NDArray[np.generic], predictions: list[NDArray[np.float32]], families: int = 2
) -> list[Member]:
    return [Member(f"f{i % families}", str(i), evaluate(metric, task, y, p)) for i, p in enumerate(predictions)]


def slowly(
    members: list[Member], predictions: list[NDArray[np.float32]], y: NDArray[np.generic], metric: str,
    task: TaskType, top_k: int, steps: int,
) -> dict[int, float]:  # fmt: skip
    """Selection as its definition reads, through `evaluate` and full sums."""
    scores = [evaluate(metric, task, y, p) for p in predictions]
    candidates = []
    for family in dict.fromkeys(member.family for member in members):
        own = [i for i, member in enumerate(members) if member.family == family]
        candidates += sorted(own, key=lambda i: -scores[i])[:top_k]
    chosen: list[int] = []
    prefixes = []
    for _ in range(steps):
        ranked = []
        for i in candidates:
            mean = np.mean([predictions[j].astype(np.float64) for j in [*chosen, i]], axis=0)
            ranked.append((evaluate(metric, task, y, mean), i in chosen, -i))
        score, _, negative = max(ranked)
        chosen.append(-negative)
        prefixes.append((score, -len(set(chosen)), -len(chosen)))
    length = -max(prefixes)[2]
    return {i: chosen[:length].count(i) / length for i in sorted(set(chosen[:length]))}


@pytest.mark.parametrize(("metric", "task"), CASES)
def test_running_scores_are_those_of_evaluate(metric: str, task: TaskType) -> None:
    y, predictions = made_up(task, rows=200)
    scale = 3.5 if task is TaskType.REGRESSION else 1.0
    scorer = running_score(metric, task, y, scale)
    for digits in (1, 7):  # few digits: many ties
        rounded = [np.round(p, digits) + np.float32(0.01) for p in predictions]
        for n in (1, 5):
            total = np.sum([scorer.part(p) for p in rounded[:n]], axis=0)
            mean = np.mean(np.asarray(rounded[:n], np.float64), axis=0)
            assert scorer.score(total, n) == pytest.approx(evaluate(metric, task, y, mean, scale=scale), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 1e-30, 0.25, 0.5, 1.0])), min_size=2, max_size=12))
def test_the_area_under_the_curve_counts_ties_half(rows: list[tuple[bool, float]]) -> None:
    y = np.array([label for label, _ in rows]).astype(np.int64)
    p = np.array([value for _, value in rows], np.float32)
    if len(set(y.tolist())) < 2:
        with pytest.raises(BadTable, match="two classes"):
            running_score("auc", TaskType.BINARY, y)
        return
    wins = [(a > b) + (a == b) / 2 for a in p[y == 1] for b in p[y == 0]]
    scorer = running_score("auc", TaskType.BINARY, y)
    assert scorer.score(scorer.part(np.stack([1 - p, p], axis=1)), 1) == pytest.approx(np.mean(wins), abs=1e-15)


@pytest.mark.parametrize(("metric", "task"), CASES)
def test_selection_is_the_slow_one(metric: str, task: TaskType) -> None:
    y, predictions = made_up(task)
    members = members_of(metric, task, y, predictions)
    found = select(members, predictions, y, metric, task, top_k=2, steps=8)
    assert found == pytest.approx(slowly(members, predictions, y, metric, task, top_k=2, steps=8))
    assert sum(found.values()) == pytest.approx(1)
    assert max(sum(members[i].family == f for i in found) for f in ("f0", "f1")) <= 2
    best = max(member.score for member in members)
    mean = combine([predictions[i] for i in found], list(found.values()), task.is_classification)
    assert evaluate(metric, task, y, mean) >= best - 1e-12


@pytest.mark.parametrize(("metric", "task"), CASES)
def test_the_cross_fitted_score_is_that_of_a_direct_recomputation(metric: str, task: TaskType) -> None:
    y, predictions = made_up(task, rows=83)
    order = np.random.default_rng(5).permutation(len(y))  # case 6: rows in any order
    y, predictions = y[order], [p[order] for p in predictions]
    members = members_of(metric, task, y, predictions)
    fold = fold_of_rows(y, task, 5, seed=3)
    pooled = np.zeros(predictions[0].shape)
    for number in range(5):
        seen = [p[fold != number] for p in predictions]
        weights = slowly(members, seen, y[fold != number], metric, task, top_k=2, steps=6)
        for row in np.flatnonzero(fold == number):
            pooled[row] = sum(weight * predictions[i][row].astype(np.float64) for i, weight in weights.items())
            pooled[row] /= pooled[row].sum() if task.is_classification else 1.0
    found = cross_fitted(members, predictions, y, metric, task, top_k=2, steps=6, seed=3)
    expected = evaluate(metric, task, y, pooled)
    if metric == "auc":  # ranks of different ensembles do not compare
        parts = [evaluate(metric, task, y[fold == k], pooled[fold == k]) * np.sum(fold == k) for k in range(5)]
        expected = sum(parts) / len(y)
    assert found.score == pytest.approx(expected, abs=1e-12)
    np.testing.assert_allclose(found.pooled, pooled, atol=1e-12)


def test_folds_are_even_in_every_class() -> None:
    y = np.array([0] * 41 + [1] * 13 + [2])
    fold = fold_of_rows(y, TaskType.MULTICLASS, 5, seed=0)
    assert sorted(np.bincount(fold).tolist()) == [11] * 5
    for k, fewest, most in ((0, 8, 9), (1, 2, 3), (2, 0, 1)):
        assert set(np.bincount(fold[y == k], minlength=5).tolist()) <= {fewest, most}
    assert (fold == fold_of_rows(y, TaskType.MULTICLASS, 5, seed=0)).all()
    assert (fold != fold_of_rows(y, TaskType.MULTICLASS, 5, seed=1)).any()


def test_weights_of_noise_do_not_win_cross_fitted() -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 120)
    noise = [rng.dirichlet([1, 1], 120).astype(np.float32) for _ in range(40)]
    members = [Member(f"f{i}", "", evaluate("auc", TaskType.BINARY, y, p)) for i, p in enumerate(noise)]
    weights = select(members, noise, y, "auc", TaskType.BINARY)
    fitted = combine([noise[i] for i in weights], list(weights.values()), True)
    assert evaluate("auc", TaskType.BINARY, y, fitted) > 0.75
    assert cross_fitted(members, noise, y, "auc", TaskType.BINARY).score < 0.65


def test_ties_go_to_fewer_and_earlier_members() -> None:
    y, predictions = made_up(TaskType.BINARY, count=1)
    copies = [predictions[0], predictions[0].copy(), predictions[0].copy()]
    members = [Member("f", str(i), 0.5) for i in range(3)]
    assert select(members, copies, y, "log_loss", TaskType.BINARY) == {0: 1.0}
    assert select(members, copies, y, "log_loss", TaskType.BINARY, top_k=1) == {0: 1.0}


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_members_that_are_not_finite_take_no_part(bad: float) -> None:
    y, predictions = made_up(TaskType.REGRESSION)  # case 13
    members = members_of("r2", TaskType.REGRESSION, y, predictions)
    best = int(np.argmax([member.score for member in members]))
    predictions[best][3] = bad
    found = select(members, predictions, y, "r2", TaskType.REGRESSION)
    assert found
    assert best not in found
    assert np.isfinite(cross_fitted(members, predictions, y, "r2", TaskType.REGRESSION).score)
    lost = [replace(member, score=float("nan")) for member in members]
    with pytest.raises(UserError, match="none of 7 members"):
        select(lost, predictions, y, "r2", TaskType.REGRESSION)


def test_a_class_of_one_row_is_scored_all_the_same() -> None:
    y = np.array([0] * 19 + [1])  # case 8: four folds of five hold it, one does not
    rng = np.random.default_rng(0)
    predictions = [rng.dirichlet([1, 1], 20).astype(np.float32) for _ in range(3)]
    members = members_of("auc", TaskType.BINARY, y, predictions)
    assert 0 <= cross_fitted(members, predictions, y, "auc", TaskType.BINARY).score <= 1


def test_wrong_arguments_are_told() -> None:
    y, predictions = made_up(TaskType.BINARY)
    members = members_of("auc", TaskType.BINARY, y, predictions)
    with pytest.raises(UserError, match="'r2' does not fit a binary task"):
        select(members, predictions, y, "r2", TaskType.BINARY)
    with pytest.raises(ValueError, match="at least 1"):
        select(members, predictions, y, "auc", TaskType.BINARY, steps=0)
    with pytest.raises(ValueError, match="7 for 6 members"):
        select(members[1:], predictions, y, "auc", TaskType.BINARY)
    with pytest.raises(ValueError, match="one shape"):
        select(members, [predictions[0][:5], *predictions[1:]], y, "auc", TaskType.BINARY)
    with pytest.raises(BadTable, match="two validation rows"):
        cross_fitted(members, [p[:1] for p in predictions], y[:1], "accuracy", TaskType.BINARY)


def forest_predictor(raw: RawDataset) -> Predictor:
    preprocessor = Preprocessor.fit(raw, model_class("random_forest").numeric)
    forest = create_model("random_forest", preprocessor.spec, {"n_trees": 8})
    assert isinstance(forest, Estimator)
    table = preprocessor.transform(raw)
    forest.fit(table, table, lambda _rounds, _prediction: False)
    return Predictor(preprocessor, forest, "random_forest", {"n_trees": 8}, {"dataset": raw.name})


def make_ensemble(raw: RawDataset) -> EnsemblePredictor:
    """Two networks, which read a table alike, and a forest, which does not."""
    torch.set_num_threads(1)
    made = [make_predictor(raw, 0), forest_predictor(raw), make_predictor(raw, 1)]
    weights = (0.2, 0.5, 0.3)
    members = tuple(EnsembleMember(str(i), w, p) for i, (w, p) in enumerate(zip(weights, made, strict=True)))
    return EnsemblePredictor(members=members, info={"steps": 10})


BINARY = make_table(TaskType.BINARY, rows=60, with_missing=True)


@pytest.fixture(scope="module")
def ensemble() -> EnsemblePredictor:
    return make_ensemble(BINARY)


@pytest.mark.parametrize("task", list(TaskType))
def test_an_ensemble_predicts_the_weighted_mean_and_loads_again(task: TaskType, tmp_path: Path) -> None:
    raw = make_table(task, rows=60, with_missing=True)
    made = make_ensemble(raw)
    assert (made.task, made.model_name, made.model_names) == (task, "ensemble", ("bishop", "random_forest"))
    frame = make_table(task, rows=40, with_missing=True, with_unseen_category=True, seed=1).frame
    if task.is_classification:
        parts = [m.weight * m.predictor.predict_proba(frame).astype(np.float64) for m in made.members]
        found = made.predict_proba(frame)
        np.testing.assert_allclose(found, sum(parts), atol=1e-6)
        np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-12)
        assert made.predict(frame).tolist() == found.columns[found.to_numpy().argmax(1)].tolist()
    else:
        parts = [m.weight * m.predictor.predict(frame) for m in made.members]
        np.testing.assert_allclose(made.predict(frame), sum(parts), rtol=1e-6)
        with pytest.raises(UserError, match="use predict"):
            made.predict_proba(frame)
    loaded = Predictor.load(made.save(tmp_path / "e"))
    assert isinstance(loaded, EnsemblePredictor)
    pd.testing.assert_series_equal(loaded.predict(frame), made.predict(frame))
    assert (loaded.hparams, loaded.info, loaded.schema) == (made.hparams, {"steps": 10}, made.schema)
    assert loaded.hparams["member_01"] == {"model": "random_forest", "key": "1", "weight": 0.5}
    assert loaded.schema == made.members[0].predictor.schema
    assert len(loaded.predict(frame.head(0))) == 0


def test_equal_preprocessors_read_a_frame_once(ensemble: EnsemblePredictor, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    transform = Preprocessor.transform_features

    def counted(self: Preprocessor, frame: pd.DataFrame) -> object:
        seen.append(self.numeric)
        return transform(self, frame)

    monkeypatch.setattr(Preprocessor, "transform_features", counted)
    ensemble.predict(BINARY.frame)
    assert sorted(seen) == ["normal", "raw"]


def test_the_schema_joins_the_columns_of_all_members(ensemble: EnsemblePredictor) -> None:
    order = [name for name, _ in ensemble.schema]
    assert len(order) == 5
    members = []
    for dropped in (order[1], order[4]):
        raw = replace(BINARY, frame=BINARY.frame.drop(columns=dropped))
        raw = replace(raw, categorical=tuple(c for c in raw.categorical if c != dropped))
        members.append(EnsembleMember(dropped, 0.5, make_predictor(raw)))
    joined = [name for name, _ in EnsemblePredictor(members=tuple(members)).schema]
    assert sorted(joined) == sorted(order)
    for member in members:
        places = [joined.index(name) for name, _ in member.predictor.schema]
        assert all(a < b for a, b in pairwise(places))


def broken(ensemble: EnsemblePredictor, bad: tuple[int, ...]) -> EnsemblePredictor:
    """With a network of infinite weights in place of the members at `bad`."""
    members = list(ensemble.members)
    for i in bad:
        predictor = make_predictor(BINARY, i)
        for tensor in predictor.model.parameters():
            tensor.data.fill_(np.inf)
        members[i] = replace(members[i], predictor=predictor)
    return EnsemblePredictor(members=tuple(members))


def test_a_member_that_is_not_finite_is_left_out_by_name(
    ensemble: EnsemblePredictor, caplog: pytest.LogCaptureFixture
) -> None:
    found = broken(ensemble, (0,)).predict_proba(BINARY.frame)
    parts = [ensemble.members[i].predictor.predict_proba(BINARY.frame).to_numpy(np.float64) for i in (1, 2)]
    np.testing.assert_allclose(found, (0.5 * parts[0] + 0.3 * parts[1]) / 0.8, atol=1e-6)
    assert "bishop 0 left out of 60 rows" in caplog.text
    with pytest.raises(UserError, match="no member has a finite prediction for 60 of 60 rows"):
        broken(ensemble, (0, 1, 2)).predict(BINARY.frame)


def test_a_row_without_a_finite_member_changes_no_other_row() -> None:
    outputs = [np.array([[0.25], [np.inf], [np.nan]]), np.array([[1.0], [2.0], [np.nan]])]
    assert np.array_equal(combine(outputs, [0.5, 0.5], False), [[0.625], [2.0], [np.nan]], equal_nan=True)
    assert combine([np.array([[0.2, 0.6]])], [1.0], True) == pytest.approx(np.array([[0.25, 0.75]]))


def test_members_must_fit_together(ensemble: EnsemblePredictor) -> None:
    first = ensemble.members[0]
    other = EnsembleMember("x", 0.5, make_predictor(make_table(TaskType.REGRESSION, rows=30)))
    with pytest.raises(ValueError, match="another target"):
        EnsemblePredictor(members=(replace(first, weight=0.5), other))
    with pytest.raises(ValueError, match="sum 1"):
        EnsemblePredictor(members=(first,))
    with pytest.raises(ValueError, match="sum 1"):
        EnsemblePredictor(members=())
    with pytest.raises(ValueError, match="cannot be an ensemble"):
        EnsemblePredictor(members=(EnsembleMember("", 1.0, ensemble),))


def test_fingerprints_tell_weights_and_members_apart(ensemble: EnsemblePredictor, tmp_path: Path) -> None:
    one = fingerprint(ensemble.save(tmp_path / "one"))
    assert one == fingerprint(replace(ensemble, info={}).save(tmp_path / "same"))
    a, b, c = ensemble.members
    weighted = replace(ensemble, members=(replace(a, weight=0.3), b, replace(c, weight=0.2)))
    swapped = replace(ensemble, members=(replace(a, predictor=c.predictor), b, replace(c, predictor=a.predictor)))
    assert len({one, *(fingerprint(e.save(tmp_path / str(i))) for i, e in enumerate((weighted, swapped)))}) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hparams": {}}, "without members"),
        ({"hparams": {"member_00": {"key": "a"}}}, "damaged"),
        ({"weights_sha256": "0"}, "hash differs"),
        ({"info": 3}, "damaged"),
        ("weights", "damaged|sum 1"),
        ("member gone", r"members/01/predictor\.json: missing"),
        ("member's weights", r"hash differs|damaged"),
    ],
)
def test_a_damaged_folder_is_one_clear_line(
    change: object, message: str, ensemble: EnsemblePredictor, tmp_path: Path
) -> None:
    folder = ensemble.save(tmp_path / "e")
    manifest = json.loads((folder / MANIFEST).read_text())
    if change == "weights":
        manifest["hparams"]["member_00"]["weight"] = 7
    elif change == "member gone":
        (folder / "members" / "01" / MANIFEST).unlink()
    elif change == "member's weights":
        file = next((folder / "members" / "00").glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
    else:
        assert isinstance(change, dict)
        manifest |= change
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=message) as caught:
        Predictor.load(folder)
    assert "\n" not in str(caught.value)


def test_an_ensemble_is_registered_with_members_and_weights(
    ensemble: EnsemblePredictor, uri: str, tracker_of: Callable[..., StudyTracker], tmp_path: Path
) -> None:
    run_id = tracker_of(uri).parent_run_id()
    made = register_best(
        ensemble, "CC-wine", alias="ensemble", val_score=0.9, example=BINARY.frame.head(3), run_id=run_id, uri=uri
    )
    assert made.champion
    client = MlflowClient(uri)
    version = client.get_model_version("CC-wine", "1")
    assert version.tags["bishop.model"] == "ensemble"
    (logged,) = client.search_logged_models([client.get_run(run_id).info.experiment_id])
    assert "'weight': 0.5" in logged.params["member_01"]
    expected = ensemble.predict_proba(BINARY.frame)
    pd.testing.assert_frame_equal(load_best("CC-wine", "ensemble", uri=uri).predict_proba(BINARY.frame), expected)
    local = Path(str(logged.artifact_location).removeprefix("file://"))
    listed = {row.partition("==")[0] for row in (local / "requirements.txt").read_text().split()}
    assert {"scikit-learn", "torch", "entmax"} <= listed
    code = (
        "import sys, mlflow, pandas as pd\n"
        f"mlflow.set_tracking_uri({uri!r})\n"
        "model = mlflow.pyfunc.load_model('models:/CC-wine@ensemble')\n"
        "frame = pd.read_json(sys.argv[1], orient='split', dtype=False)\n"
        "print('found', model.predict(frame).tolist())\n"
    )
    BINARY.frame.to_json(tmp_path / "rows.json", orient="split")
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "rows.json")],
        cwd=tmp_path / "empty", capture_output=True, text=True, check=True,
    )  # fmt: skip
    line = next(line for line in done.stdout.splitlines() if line.startswith("found"))
    assert yaml.safe_load(line.removeprefix("found ")) == ensemble.predict(BINARY.frame).tolist()


def test_requirements_follow_from_the_imports() -> None:
    def names(*models: str) -> set[str]:
        return {row.partition("==")[0].lower().replace("_", "-") for row in requirements(models)}

    common = {"numpy", "pandas", "safetensors", "scipy", "torch"}
    assert names("bishop") == common | {"entmax"}
    assert names("random_forest") == common | {"scikit-learn"}
    assert names("bishop", "xgboost") >= common | {"entmax", "xgboost"}
    assert not names("xgboost") & {"mlflow", "ray", "optuna", "openml", "lightgbm"}
    assert all(row.count("==") == 1 and "+" not in row for row in requirements(["bishop", "xgboost"]))
