"""Predictor = Preprocessor + fitted model: a DataFrame in, labels or target values out. What is registered.

On disk a folder without pickle: ``predictor.json``, and ``weights.safetensors`` of a network
(https://huggingface.co/docs/safetensors) or a folder ``model`` in the safe format of an estimator's own library. It
loads on a machine without a GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import bishop_ray
from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.table import TableSpec, TaskType
from bishop_ray.errors import UserError
from bishop_ray.models import create_model
from bishop_ray.models.base import Estimator, Network

FORMAT = 2
"""Version of the folder's format; a folder of a newer one is refused, of an older one read."""

MANIFEST = "predictor.json"
WEIGHTS = "weights.safetensors"
MODEL = "model"


@dataclass(frozen=True)
class Predictor:
    """A fitted model that reads the user's own table.

    Attributes:
        preprocessor: Fitted on the training rows.
        model: The fitted model, built from ``preprocessor.spec`` and `hparams`.
        model_name: Its name in the registry of models.
        hparams: Arguments of its constructor.
        info: Anything worth keeping: dataset, seed, scores. JSON values.
    """

    preprocessor: Preprocessor
    model: Network | Estimator
    model_name: str
    hparams: dict[str, Any]
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def task(self) -> TaskType:
        """The task type."""
        return self.preprocessor.spec.task

    @property
    def schema(self) -> tuple[tuple[str, str], ...]:
        """The columns a frame must have, in training order: name and kind ("number", "moment", "category")."""
        return self.preprocessor.schema

    def predict(self, frame: pd.DataFrame) -> pd.Series:
        """The likeliest labels in the user's own type, or the target in its own units (float64).

        Args:
            frame: R rows; columns are found by name, further ones are ignored. R = 0 is allowed.

        Returns:
            (R,) with the frame's index and the target's name.

        Raises:
            UserError: A column is missing, or cannot be read as the numbers it held in training.
        """
        x_num, x_cat = self.preprocessor.transform_features(frame)
        output = self.model.predict(x_num, x_cat)
        if self.task.is_classification:
            series = self.preprocessor.labels(output)
        else:
            series = pd.Series(self.preprocessor.inverse_target(output), name=self.preprocessor.target.name)
        series.index = frame.index
        return series

    def predict_proba(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Class probabilities (R, K) with the frame's index; columns are the labels in training order.

        Raises:
            UserError: The task is a regression, or as `predict`.
        """
        if not self.task.is_classification:
            raise UserError(f"predict_proba: the target {self.preprocessor.target.name!r} is a number; use predict")
        x_num, x_cat = self.preprocessor.transform_features(frame)
        columns = pd.Index(list(self.preprocessor.classes), name=self.preprocessor.target.name)
        return pd.DataFrame(self.model.predict(x_num, x_cat), index=frame.index, columns=columns)

    def save(self, folder: Path | str) -> Path:
        """Writes the folder (replacing an earlier one) and returns it; nobody ever sees half of it."""
        folder = Path(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
        building.mkdir()
        try:
            digest = _save_model(self.model, building)
            manifest = {
                "format": FORMAT,
                "bishop_ray": bishop_ray.__version__,
                "model": self.model_name,
                "hparams": self.hparams,
                "spec": _spec_dict(self.preprocessor.spec),
                "preprocessor": self.preprocessor.to_dict(),
                "weights_sha256": digest,
                "info": self.info,
            }
            text = json.dumps(manifest, indent=1, ensure_ascii=False, default=_plain)
            _write_through(building / MANIFEST, text.encode())
            _put_in_place(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
        return folder

    @classmethod
    def load(cls, folder: Path | str) -> Predictor:
        """The predictor of a folder, on the CPU, in evaluation mode; nothing in the folder is executed.

        Raises:
            UserError: No such folder, a missing, damaged or newer file, weights that do not fit the model.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder / MANIFEST)
        try:
            name, hparams = str(manifest["model"]), dict(manifest["hparams"])
            preprocessor = Preprocessor.from_dict(manifest["preprocessor"])
            spec, digest = TableSpec(**manifest["spec"]), str(manifest["weights_sha256"])
            info = dict(manifest["info"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{folder / MANIFEST}: damaged ({type(error).__name__}: {error})") from error
        if spec != preprocessor.spec:
            raise UserError(f"{folder / MANIFEST}: damaged (spec and preprocessor describe different tables)")
        with torch.random.fork_rng(devices=[]):  # building draws initial weights: the caller's random state stays
            try:
                model = create_model(name, spec, hparams)
            except (TypeError, ValueError) as error:
                raise UserError(f"{folder / MANIFEST}: no {name} can be built from it ({error})") from error
        _load_model(model, folder, digest)
        return cls(preprocessor, model, name, hparams, info)


def fingerprint(folder: Path | str) -> str:
    """A short hash of what a saved predictor computes: model, preprocessing and weights, not its `info`."""
    manifest = _read_manifest(Path(folder) / MANIFEST)
    parts = [manifest.get(key) for key in ("model", "hparams", "preprocessor", "weights_sha256")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _save_model(model: Network | Estimator, folder: Path) -> str:
    """Writes the fitted model into the predictor's folder and returns a hash of what was written."""
    if isinstance(model, Estimator):
        (folder / MODEL).mkdir()
        model.save(folder / MODEL)
        for path in _files(folder / MODEL):
            _flush(path)
        return _hash_folder(folder / MODEL)
    # Clones: safetensors refuses tensors that share memory (tied weights).
    state = {key: value.detach().cpu().contiguous().clone() for key, value in model.state_dict().items()}
    save_file(state, folder / WEIGHTS)
    _flush(folder / WEIGHTS)
    return _sha256(folder / WEIGHTS)


def _load_model(model: Network | Estimator, folder: Path, digest: str) -> None:
    if isinstance(model, Network):
        _load_weights(model, folder / WEIGHTS, digest)
        return
    if not (folder / MODEL).is_dir():
        raise UserError(f"{folder / MODEL}: missing")
    # Before it is read: what another library makes of a changed file is its own business.
    if _hash_folder(folder / MODEL) != digest:
        raise UserError(f"{folder / MODEL}: damaged, or not the model that {MANIFEST} was written with (hash differs)")
    model.load(folder / MODEL)


def _load_weights(model: Network, path: Path, digest: str) -> None:
    try:
        found = _sha256(path)
        state = load_file(path, device="cpu")
        model.load_state_dict(state)
    except FileNotFoundError as error:
        raise UserError(f"{path}: missing") from error
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: damaged or cut off ({error})") from error
    except RuntimeError as error:
        detail = " ".join(str(error).split(":", 1)[-1].split())[:300]
        raise UserError(f"{path}: the weights do not fit the model: {detail}") from error
    if found != digest:
        raise UserError(f"{path}: not the weights that {MANIFEST} was written with (hash differs)")
    model.eval()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: missing; expected a folder that Predictor.save wrote") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: damaged or cut off ({error})") from error
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if not isinstance(version, int) or version < 1:
        raise UserError(f"{path}: expected a predictor of format {FORMAT}; found no format number")
    if version > FORMAT:
        writer = manifest.get("bishop_ray", "a newer version")
        raise UserError(
            f"{path}: format {version} needs bishop_ray {writer} or newer; this is {bishop_ray.__version__}"
        )
    return dict(manifest)


def _put_in_place(building: Path, folder: Path) -> None:
    if folder.exists():
        old = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.old")
        folder.rename(old)
        building.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        building.rename(folder)


def _write_through(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _hash_folder(folder: Path) -> str:
    """Of names and contents of all files."""
    parts = [f"{path.relative_to(folder)} {_sha256(path)}" for path in _files(folder)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _spec_dict(spec: TableSpec) -> dict[str, Any]:
    return {
        "task": spec.task.value,
        "n_num": spec.n_num,
        "cat_cardinalities": list(spec.cat_cardinalities),
        "n_out": spec.n_out,
    }


def _plain(value: Any) -> Any:
    """Scalars of numpy and torch as Python numbers."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
