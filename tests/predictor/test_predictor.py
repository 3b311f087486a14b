"""Save, load, predict: the same answers, the user's own labels, no pickle, one clear line for a bad folder."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from fakes import LEVELS, UNSEEN, make_table
from predictor_fakes import HPARAMS, Bomb, copy_of, make_predictor

from bishop_ray.data.table import RawDataset, TaskType
from bishop_ray.errors import UserError
from bishop_ray.predictor import FORMAT, MANIFEST, WEIGHTS, Predictor, fingerprint


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Predictor, Path, RawDataset]:
    raw = make_table(TaskType.BINARY, rows=60, with_missing=True)
    predictor = make_predictor(raw)
    return predictor, predictor.save(tmp_path_factory.mktemp("saved") / "predictor"), raw


@pytest.mark.parametrize("task", list(TaskType))
def test_a_loaded_predictor_gives_the_same_predictions(task: TaskType, tmp_path: Path) -> None:
    raw = make_table(task, rows=60, with_missing=True)
    predictor = make_predictor(raw)
    loaded = Predictor.load(predictor.save(tmp_path / "p"))
    frame = make_table(task, rows=40, with_missing=True, with_unseen_category=True, seed=1).frame
    pd.testing.assert_series_equal(loaded.predict(frame), predictor.predict(frame))
    assert loaded.task is task
    assert (loaded.model_name, loaded.hparams, loaded.info) == ("bishop", HPARAMS, {"dataset": "fake", "seed": 0})
    assert loaded.schema == predictor.schema
    assert not loaded.model.training
    if task.is_classification:
        pd.testing.assert_frame_equal(loaded.predict_proba(frame), predictor.predict_proba(frame))
    else:
        assert abs(float(loaded.predict(frame).mean()) - float(raw.target.mean())) < 5 * float(raw.target.std())


@pytest.mark.parametrize(
    "labels", [["no", "yes"], [False, True], [3, 70], [1.5, 2.5], pd.Categorical(["low", "high"], ["low", "high"])]
)
def test_labels_come_back_in_the_users_type(labels: object, tmp_path: Path) -> None:
    """Case 11."""
    raw = make_table(TaskType.BINARY, rows=40)
    target = pd.Series(labels).take([0, 1] * 20).reset_index(drop=True).rename("y")
    raw = RawDataset(raw.name, raw.frame, target, raw.task, raw.categorical)
    predictor = Predictor.load(make_predictor(raw).save(tmp_path / "p"))
    found = predictor.predict(raw.frame)
    assert found.dtype == target.dtype
    assert found.name == "y"
    assert set(found) <= set(target)
    proba = predictor.predict_proba(raw.frame)
    assert [type(c) for c in proba.columns] == [type(c) for c in target.drop_duplicates().tolist()]
    best = [proba.columns[i] for i in proba.to_numpy().argmax(1)]
    assert found.tolist() == best


def test_order_index_and_extra_columns_do_not_matter(saved: tuple[Predictor, Path, RawDataset]) -> None:
    predictor, _, raw = saved
    expected = predictor.predict_proba(raw.frame)
    frame = raw.frame[raw.frame.columns[::-1]].assign(extra="x", y="target")
    frame.index = pd.Index([f"row {i}" for i in range(len(frame))], name="key")
    found = predictor.predict_proba(frame)
    assert found.index.equals(frame.index)
    assert predictor.predict(frame).index.equals(frame.index)
    np.testing.assert_array_equal(found.to_numpy(), expected.to_numpy())
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows: int, saved: tuple[Predictor, Path, RawDataset]) -> None:
    predictor, _, raw = saved
    assert len(predictor.predict(raw.frame.head(rows))) == rows
    proba = predictor.predict_proba(raw.frame.head(rows))
    assert proba.shape == (rows, 2)
    np.testing.assert_allclose(proba, predictor.predict_proba(raw.frame).head(rows), atol=1e-6)


def test_an_unseen_category_is_as_a_missing_one(saved: tuple[Predictor, Path, RawDataset]) -> None:
    predictor, _, raw = saved
    frame = raw.frame.head(3)
    one, two = frame.assign(cat_0=UNSEEN), frame.assign(cat_0=None)
    pd.testing.assert_frame_equal(predictor.predict_proba(one), predictor.predict_proba(two))
    assert not predictor.predict_proba(one).equals(predictor.predict_proba(frame.assign(cat_0=LEVELS[0])))


def test_a_missing_column_is_named(saved: tuple[Predictor, Path, RawDataset]) -> None:
    predictor, _, raw = saved
    with pytest.raises(UserError, match="cat_1") as caught:
        predictor.predict(raw.frame.drop(columns="cat_1"))
    assert "\n" not in str(caught.value)


def test_no_probabilities_of_a_number() -> None:
    raw = make_table(TaskType.REGRESSION, rows=30)
    with pytest.raises(UserError, match="use predict"):
        make_predictor(raw).predict_proba(raw.frame)


def test_saving_again_replaces_and_a_failed_save_changes_nothing(
    saved: tuple[Predictor, Path, RawDataset], tmp_path: Path
) -> None:
    first, _, raw = saved
    folder = first.save(tmp_path / "p")
    second = make_predictor(raw, seed=1)
    assert second.save(folder) == folder
    np.testing.assert_array_equal(Predictor.load(folder).predict_proba(raw.frame), second.predict_proba(raw.frame))
    bad = Predictor(first.preprocessor, first.model, "bishop", HPARAMS, {"not": object()})
    with pytest.raises(TypeError):
        bad.save(folder)
    np.testing.assert_array_equal(Predictor.load(folder).predict_proba(raw.frame), second.predict_proba(raw.frame))
    assert [p.name for p in tmp_path.iterdir()] == ["p"]
    assert sorted(p.name for p in folder.iterdir()) == [MANIFEST, WEIGHTS]


def test_the_fingerprint_tells_models_apart_and_ignores_info(
    saved: tuple[Predictor, Path, RawDataset], tmp_path: Path
) -> None:
    predictor, folder, raw = saved
    same = Predictor(predictor.preprocessor, predictor.model, "bishop", HPARAMS, {"other": 1}).save(tmp_path / "same")
    other = make_predictor(raw, seed=1).save(tmp_path / "other")
    assert fingerprint(folder) == fingerprint(same) != fingerprint(other)


def test_loading_leaves_the_random_state(saved: tuple[Predictor, Path, RawDataset]) -> None:
    before = torch.get_rng_state()
    Predictor.load(saved[1])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("file", [MANIFEST, WEIGHTS])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "pickle", "torch pickle"])
def test_a_damaged_folder_is_one_clear_line(
    file: str, damage: str, saved: tuple[Predictor, Path, RawDataset], tmp_path: Path
) -> None:
    path = copy_of(saved[1], tmp_path / "p") / file
    trap = tmp_path / "executed"
    if damage == "missing":
        path.unlink()
    elif damage == "pickle":  # case 85: nothing of it runs
        path.write_bytes(pickle.dumps(Bomb(trap)))
    elif damage == "torch pickle":
        torch.save({"weight": Bomb(trap)}, path)
    else:
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"")
    with pytest.raises(UserError, match=file) as caught:
        Predictor.load(path.parent)
    assert "\n" not in str(caught.value)
    assert not trap.exists()


def changed(folder: Path, target: Path, **values: object) -> Path:
    copy_of(folder, target)
    manifest = json.loads((target / MANIFEST).read_text())
    (target / MANIFEST).write_text(json.dumps({**manifest, **values}))
    return target


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format": FORMAT + 1, "bishop_ray": "9.9.9"}, "needs bishop_ray 9.9.9"),
        ({"format": None}, "no format number"),
        ({"model": "nonesuch"}, "unknown model"),
        ({"hparams": {**HPARAMS, "wings": 2}}, "wings"),
        ({"hparams": {**HPARAMS, "d_model": 32}}, "do not fit"),
        ({"preprocessor": {}}, "damaged"),
        ({"weights_sha256": "0"}, "hash differs"),
        ({"spec": {"task": "binary", "n_num": 1, "cat_cardinalities": [], "n_out": 2}}, "different tables"),
    ],
)
def test_a_manifest_that_does_not_fit_is_one_clear_line(
    values: dict[str, object], message: str, saved: tuple[Predictor, Path, RawDataset], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Predictor.load(changed(saved[1], tmp_path / "p", **values))
    assert "\n" not in str(caught.value)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"predictor\.json: missing"):
        Predictor.load(tmp_path / "nowhere")


def test_prediction_needs_no_training_library(saved: tuple[Predictor, Path, RawDataset], tmp_path: Path) -> None:
    _, folder, raw = saved
    raw.frame.head(4).to_csv(tmp_path / "rows.csv", index=False)
    code = f"""
import sys
import pandas as pd
from bishop_ray.predictor import Predictor
print(len(Predictor.load({str(folder)!r}).predict(pd.read_csv({str(tmp_path / "rows.csv")!r}))))
heavy = {{"ray", "mlflow", "optuna", "openml", "sklearn", "pyarrow.dataset", "filelock", "yaml", "entmax"}}
print(sorted(heavy & set(sys.modules)))
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["4", "[]"]
