"""Files of a saved predictor: manifest, weights, checks on loading; no pickle.

A network's state is a file of safetensors (https://huggingface.co/docs/safetensors); an estimator's a folder in the
safe format of its own library.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import bishop_ray
from bishop_ray.errors import UserError
from bishop_ray.models.base import Estimator, Network
from bishop_ray.paths import flush

WEIGHTS = "weights.safetensors"
MODEL = "model"


def save_model(model: Network | Estimator, folder: Path) -> str:
    """Writes the fitted model into the predictor's folder and returns a hash of what was written."""
    if isinstance(model, Estimator):
        (folder / MODEL).mkdir()
        model.save(folder / MODEL)
        for path in files(folder / MODEL):
            flush(path)
        return hash_folder(folder / MODEL)
    # Clones: safetensors refuses tensors that share memory (tied weights).
    state = {key: value.detach().cpu().contiguous().clone() for key, value in model.state_dict().items()}
    save_file(state, folder / WEIGHTS)
    flush(folder / WEIGHTS)
    return hash_file(folder / WEIGHTS)


def load_model(model: Network | Estimator, folder: Path, digest: str) -> None:
    """Reads what `save_model` wrote into a model built with the same arguments.

    Raises:
        UserError: A missing or damaged file, or one with another hash than `digest`.
    """
    if isinstance(model, Network):
        _load_weights(model, folder / WEIGHTS, digest)
        return
    if not (folder / MODEL).is_dir():
        raise UserError(f"{folder / MODEL}: missing")
    # Before it is read: what another library makes of a changed file is its own business.
    if hash_folder(folder / MODEL) != digest:
        raise UserError(f"{folder / MODEL}: damaged, or not the model that {MANIFEST} was written with (hash differs)")
    try:
        model.load(folder / MODEL)
    except (OSError, *DAMAGE) as error:
        raise UserError(f"{folder / MODEL}: damaged ({words(error)})") from error


def _load_weights(model: Network, path: Path, digest: str) -> None:
    try:
        found = hash_file(path)
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


FORMAT = 3
"""Version of the folder's format; a folder of a newer one is refused, of an older one read."""
MANIFEST = "predictor.json"
DAMAGE = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    AssertionError,
    MemoryError,
)
"""What reading a file can raise that anybody may have written: wrong types, sizes without end, endless nesting."""


def fingerprint(folder: Path | str) -> str:
    """A short hash of what a saved predictor computes: model, preprocessing and weights, not its `info`."""
    manifest = read_manifest(Path(folder) / MANIFEST)
    parts = [manifest.get(key) for key in ("model", "hparams", "preprocessor", "weights_sha256")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `folder` at the end; nobody ever sees half of it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    building.mkdir()
    try:
        yield building
        _put_in_place(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def write_manifest(folder: Path, **values: Any) -> None:
    """Writes the manifest with the format number, the version of this package and `values`."""
    manifest = {"format": FORMAT, "bishop_ray": bishop_ray.__version__, **values}
    text = json.dumps(manifest, indent=1, ensure_ascii=False, default=_plain)
    with (folder / MANIFEST).open("wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest at `path`.

    Raises:
        UserError: It is missing, damaged or of a newer format.
    """
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: missing; expected a folder that Predictor.save wrote") from error
    except (OSError, *DAMAGE) as error:
        raise UserError(f"{path}: damaged or cut off ({words(error)})") from error
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if not isinstance(version, int) or version < 1:
        raise UserError(f"{path}: expected a predictor of format {FORMAT}; found no format number")
    if version > FORMAT:
        writer = manifest.get("bishop_ray", "a newer version")
        raise UserError(
            f"{path}: format {version} needs bishop_ray {writer} or newer; this is {bishop_ray.__version__}"
        )
    return dict(manifest)


def words(error: BaseException) -> str:
    """An error's kind and its message, on one line."""
    message = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def files(folder: Path) -> list[Path]:
    """All files below a folder, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def hash_folder(folder: Path) -> str:
    """Of names and contents of all files."""
    parts = [f"{path.relative_to(folder)} {hash_file(path)}" for path in files(folder)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def hash_file(path: Path) -> str:
    """SHA-256 of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _put_in_place(building: Path, folder: Path) -> None:
    if folder.exists():
        old = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.old")
        folder.rename(old)
        building.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        building.rename(folder)


def _plain(value: Any) -> Any:
    """Scalars of numpy and torch as Python numbers."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
