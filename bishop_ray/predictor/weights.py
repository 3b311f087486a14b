"""What a fitted model learnt, on disk without pickle.

A network's state is a file of safetensors (https://huggingface.co/docs/safetensors); an estimator's a folder in the
safe format of its own library.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bishop_ray.errors import UserError
from bishop_ray.models.base import Estimator, Network
from bishop_ray.predictor.files import DAMAGE, MANIFEST, files, flush, hash_file, hash_folder, words

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
