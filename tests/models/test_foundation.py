"""TabPFN and TabICL through their packages, with tiny randomly initialised weights in the packages' own formats."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bishop_ray.data.table import Table, TableSpec, TaskType
from bishop_ray.errors import TrainingFailed, UserError
from bishop_ray.models import model_class, not_installed
from bishop_ray.models.foundation import MANIFEST, InContextModel, context_rows

ROOT = Path(__file__).resolve().parents[2]
TASKS = {TaskType.BINARY: 2, TaskType.MULTICLASS: 5, TaskType.REGRESSION: 1}
VARIABLE = {"tabpfn": "BISHOP_TABPFN_WEIGHTS", "tabicl": "BISHOP_TABICL_WEIGHTS"}

every_model = pytest.mark.parametrize("name", ["tabpfn", "tabicl"])
every_task = pytest.mark.parametrize("task", list(TASKS))


def shaken(network: torch.nn.Module) -> torch.nn.Module:
    """Random weights also where the initialisation has zeros, which would hide the context."""
    with torch.no_grad():
        for parameter in network.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.5)
    return network


def tabpfn_v2(folder: Path) -> None:
    """One file per task, as the second version has them."""
    from tabpfn.architectures import ARCHITECTURES
    from tabpfn.model_loading import FullSupportBarDistribution

    for kind, heads in (("classifier", (10, 0)), ("regressor", (0, 50))):
        sizes = {"max_num_classes": heads[0], "num_buckets": heads[1], "emsize": 16, "nlayers": 2, "nhead": 2}
        config, _ = ARCHITECTURES["tabpfn_v2"].parse_config(sizes)
        state = dict(shaken(ARCHITECTURES["tabpfn_v2"].get_architecture(config)).state_dict())
        if kind == "regressor":
            bars = FullSupportBarDistribution(torch.linspace(-5, 5, 51))
            state |= {f"criterion.{key}": value for key, value in bars.state_dict().items()}
        content = {"state_dict": state, "config": dataclasses.asdict(config)}
        torch.save(content, folder / f"tabpfn-v2-{kind}.ckpt")


def tabpfn_v35(folder: Path) -> None:
    """One safetensors file with both heads, as the version 3.5 has it."""
    from tabpfn.architectures import ARCHITECTURES
    from tabpfn.checkpoint import save_as_safetensors
    from tabpfn.constants import ModelVersion
    from tabpfn.inference_config import InferenceConfig

    sizes = {"max_num_classes": 10, "num_buckets": 100, "embed_dim": 16, "nlayers": 2, "icl_num_heads": 2}
    sizes |= {"dist_embed_num_blocks": 1, "dist_embed_num_heads": 2, "dist_embed_num_inducing_points": 4}
    sizes |= {"feat_agg_num_blocks": 1, "feat_agg_num_heads": 2, "feat_agg_num_cls_tokens": 2}
    sizes |= {"decoder_head_dim": 8, "decoder_num_heads": 2}
    config, _ = ARCHITECTURES["tabpfn_v3_5"].parse_config(sizes)
    content = {
        "state_dict": shaken(ARCHITECTURES["tabpfn_v3_5"].get_architecture(config)).state_dict(),
        "config": dataclasses.asdict(config),
        "architecture_name": "tabpfn_v3_5",
        "inference_config": dataclasses.asdict(InferenceConfig.get_default("multiclass", ModelVersion.V2_5)),
    }
    save_as_safetensors(content, folder / "tabpfn-v3.5-random.safetensors")


def tabicl_v2(folder: Path) -> None:
    from tabicl._model.tabicl import TabICL

    for kind, classes in (("classifier", 10), ("regressor", 0)):
        sizes = {"max_classes": classes, "num_quantiles": 19, "embed_dim": 16, "col_num_blocks": 1, "col_nhead": 2}
        sizes |= {"col_num_inds": 4, "row_num_blocks": 1, "row_nhead": 2, "row_num_cls": 2}
        sizes |= {"icl_num_blocks": 2, "icl_nhead": 2}
        content = {"config": sizes, "state_dict": shaken(TabICL(**sizes)).state_dict()}
        torch.save(content, folder / f"tabicl-{kind}-v2.ckpt")


FORMATS = {"tabpfn": tabpfn_v2, "tabpfn-v3.5": tabpfn_v35, "tabicl": tabicl_v2}
every_format = pytest.mark.parametrize("kind", list(FORMATS))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of weights by format."""
    folders = {}
    with torch.random.fork_rng(devices=[]):
        for kind, write in FORMATS.items():
            if reason := not_installed(kind.partition("-")[0]):
                pytest.skip(reason)
            folders[kind] = tmp_path_factory.mktemp(kind)
            torch.manual_seed(0)
            write(folders[kind])
    return folders


def spec_of(task: TaskType) -> TableSpec:
    return TableSpec(task, 3, (5, 4), TASKS[task])


def rows_of(name: str, task: TaskType, rows: int = 150, seed: int = 0) -> Table:
    rng = np.random.default_rng(seed)
    x_num = rng.normal(size=(rows, 3)).astype(np.float32)
    if name == "tabpfn":
        x_num[rng.random(x_num.shape) < 0.1] = np.nan
    x_cat = np.stack([rng.integers(0, 5, rows), rng.integers(0, 4, rows)], axis=1)
    y = np.nan_to_num(x_num[:, 0]) if task is TaskType.REGRESSION else np.arange(rows) % TASKS[task]
    return Table(x_num, x_cat, y)


def fitted(name: str, task: TaskType, seed: int = 0, **hparams: Any) -> InContextModel:
    build: Any = model_class(name)
    model: InContextModel = build(spec_of(task), **({"n_context": 100, "n_estimators": 2} | hparams))
    model.seed = seed
    train = rows_of(name, task)
    model.fit(train, train, lambda rounds, prediction: pytest.fail("reports without rounds"))
    return model


@every_format
@every_task
def test_it_predicts_rows_alone_and_survives_saving(
    kind: str, task: TaskType, weights: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = kind.partition("-")[0]
    monkeypatch.setenv(VARIABLE[name], str(weights[kind]))
    assert model_class(name).cannot(spec_of(task), 150) == ""
    model, asked = fitted(name, task), rows_of(name, task, 40, seed=1)
    whole = model.predict(asked.x_num, asked.x_cat)
    assert whole.shape == (40, TASKS[task])
    assert whole.dtype == np.float32
    assert np.isfinite(whole).all()
    assert np.ptp(whole, axis=0).max() > 0
    if task.is_classification:
        np.testing.assert_allclose(whole.sum(axis=1), 1, atol=1e-5)
    order = np.random.default_rng(0).permutation(40)
    np.testing.assert_allclose(model.predict(asked.x_num[order], asked.x_cat[order]), whole[order], atol=1e-5)
    for row in range(3):
        alone = model.predict(asked.x_num[[row]], asked.x_cat[[row]])
        np.testing.assert_allclose(alone[0], whole[row], atol=1e-5)
    assert model.predict(asked.x_num[:0], asked.x_cat[:0]).shape == (0, TASKS[task])
    np.testing.assert_array_equal(fitted(name, task).predict(asked.x_num, asked.x_cat), whole)
    assert not np.array_equal(fitted(name, task, seed=1).predict(asked.x_num, asked.x_cat), whole)
    model.save(tmp_path)
    build: Any = model_class(name)
    loaded: InContextModel = build(spec_of(task), n_context=100, n_estimators=2)
    loaded.load(tmp_path)
    np.testing.assert_array_equal(loaded.predict(asked.x_num, asked.x_cat), whole)


@every_model
def test_a_row_of_missing_values_keeps_to_itself(
    name: str, weights: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TabICL drops columns that are missing in all rows of a request; hence no row may hand over a missing value."""
    monkeypatch.setenv(VARIABLE[name], str(weights[name]))
    model, asked = fitted(name, TaskType.BINARY), rows_of(name, TaskType.BINARY, 10, seed=1)
    asked.x_cat[0] = 0
    if name == "tabpfn":
        asked.x_num[0] = np.nan
    assert np.isfinite(model.inputs(asked.x_num, asked.x_cat)).all() == (name == "tabicl")
    alone = model.predict(asked.x_num[:1], asked.x_cat[:1])
    np.testing.assert_allclose(alone[0], model.predict(asked.x_num, asked.x_cat)[0], atol=1e-5)


def test_a_kept_context_predicts_the_same(weights: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE["tabpfn"], str(weights["tabpfn-v3.5"]))
    asked = rows_of("tabpfn", TaskType.MULTICLASS, 20, seed=1)
    kept = fitted("tabpfn", TaskType.MULTICLASS, keep_context=True).predict(asked.x_num, asked.x_cat)
    plain = fitted("tabpfn", TaskType.MULTICLASS).predict(asked.x_num, asked.x_cat)
    np.testing.assert_allclose(kept, plain, atol=1e-5)


@every_model
def test_absent_or_unfit_weights_are_a_reason(
    name: str, weights: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable, cls, spec = VARIABLE[name], model_class(name), spec_of(TaskType.REGRESSION)
    monkeypatch.delenv(variable, raising=False)
    for cache in ("TABPFN_MODEL_CACHE_DIR", "HF_HUB_CACHE"):
        monkeypatch.setenv(cache, str(tmp_path / "nothing"))
    reason = cls.cannot(spec, 10)
    assert "weights" in reason
    assert variable in reason
    assert "\n" not in reason
    monkeypatch.setenv(variable, str(tmp_path / "gone"))
    assert "found nothing at" in cls.cannot(spec, 10)
    classifier = next(weights[name].glob("*classifier*"))
    monkeypatch.setenv(variable, str(classifier))
    assert "cannot predict numbers" in cls.cannot(spec, 10)
    regressor = next(weights[name].glob("*regressor*"))
    monkeypatch.setenv(variable, str(regressor))
    assert "cannot predict classes" in cls.cannot(spec_of(TaskType.BINARY), 10)


def test_too_many_classes_are_a_reason(weights: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    eleven = TableSpec(TaskType.MULTICLASS, 3, (), 11)
    monkeypatch.setenv(VARIABLE["tabpfn"], str(weights["tabpfn"]))
    assert "at most 10 classes; the table has 11" in model_class("tabpfn").cannot(eleven, 100)
    monkeypatch.setenv(VARIABLE["tabicl"], str(weights["tabicl"]))
    assert model_class("tabicl").cannot(eleven, 100) == ""


@every_model
def test_the_package_s_own_downloads_are_found(
    name: str, weights: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE[name], raising=False)
    if name == "tabpfn":
        monkeypatch.setenv("TABPFN_MODEL_CACHE_DIR", str(weights[name]))
    else:
        folder = tmp_path / "models--jingang--TabICL" / "snapshots"
        folder.mkdir(parents=True)
        (folder / "abc").symlink_to(weights[name])
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert model_class(name).cannot(spec_of(TaskType.REGRESSION), 10) == ""


class _Trap:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["TRAP"],)


@every_model
def test_a_checkpoint_that_runs_code_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := not_installed(name):
        pytest.skip(reason)
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    path = tmp_path / "weights.ckpt"
    torch.save({"config": {}, "state_dict": {"a": _Trap()}}, path)
    monkeypatch.setenv(VARIABLE[name], str(path))
    # the switch that makes torch.load unsafe by default
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    assert "without running code" in model_class(name).cannot(spec_of(TaskType.BINARY), 10)
    path.write_bytes(pickle.dumps(_Trap()))
    assert "without running code" in model_class(name).cannot(spec_of(TaskType.BINARY), 10)
    assert not (tmp_path / "sprung").exists()


@every_model
def test_a_saved_model_wants_its_own_weights(
    name: str, weights: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable, build = VARIABLE[name], model_class(name)
    fresh: Any = build(spec_of(TaskType.BINARY), n_context=100, n_estimators=2)  # type: ignore[arg-type]
    monkeypatch.setenv(variable, str(weights[name]))
    folder, other = tmp_path / "m", tmp_path / "w"
    folder.mkdir()
    other.mkdir()
    fitted(name, TaskType.BINARY).save(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        FORMATS[name](other)
    monkeypatch.setenv(variable, str(other))
    with pytest.raises(UserError, match=f"other weights .* set {variable}"):
        fresh.load(folder)
    monkeypatch.setenv(variable, str(tmp_path / "gone"))
    with pytest.raises(UserError, match=variable):
        fresh.load(folder)
    monkeypatch.setenv(variable, str(weights[name]))
    (folder / MANIFEST).write_text("{}", "utf-8")
    with pytest.raises(UserError, match="damaged"):
        fresh.load(folder)


ALONE = """
import os, socket, sys
attempts = []
def refuse(self, address, *rest):
    attempts.append(address)
    raise OSError("no route")
socket.socket.connect = socket.socket.connect_ex = refuse
def lookup(host, *rest, **more):
    attempts.append(host)
    raise OSError("no resolver")
socket.getaddrinfo = lookup
sys.path[:0] = ["tests", "tests/models"]
from test_foundation import TaskType, fitted, rows_of
name = sys.argv[1]
for task in (TaskType.BINARY, TaskType.REGRESSION):
    asked = rows_of(name, task, 5, seed=1)
    fitted(name, task).predict(asked.x_num, asked.x_cat)
print("attempts:", attempts)
"""


@every_model
def test_nobody_is_called_and_nothing_printed(name: str, weights: dict[str, Path], tmp_path: Path) -> None:
    """Case 88."""
    environment = {**os.environ, VARIABLE[name]: str(weights[name]), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment.pop("XDG_CACHE_HOME", None)
    command = [sys.executable, "-c", ALONE, name]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["attempts: []", ""]
    assert done.stderr == ""
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and "matplotlib" not in str(path)]


def test_the_context_keeps_the_shares_of_classes() -> None:
    y = np.repeat([0, 1, 2, 3], [6000, 3000, 997, 3])
    rows = context_rows(y, 100, True, 0)
    assert len(rows) == 100
    assert len(set(rows.tolist())) == 100
    assert np.bincount(y[rows]).tolist() == [59, 30, 10, 1]
    assert not np.array_equal(context_rows(y, 100, True, 1), rows)
    np.testing.assert_array_equal(context_rows(y, 100, True, 0), rows)
    numbers = context_rows(np.random.default_rng(0).normal(size=500), 100, False, 0)
    assert len(set(numbers.tolist())) == 100
    np.testing.assert_array_equal(context_rows(y[:50], 100, True, 0), np.arange(50))


@every_model
def test_a_class_without_rows_is_refused(name: str, weights: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE[name], str(weights[name]))
    build: Any = model_class(name)
    table = rows_of(name, TaskType.BINARY)
    with pytest.raises(TrainingFailed, match="found 2 of 5 classes"):
        build(spec_of(TaskType.MULTICLASS)).refit(table, 1)
