"""Pretrained checkpoints of foundation models: found, checked, never unpickled.

A model names an environment variable that holds a checkpoint file or a folder of them; without it, the folders where
the model's own package keeps its downloads are searched. Weights are never copied (their licences differ, their size
does not shrink): a saved predictor names its checkpoint by hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from bishop_ray.errors import UserError
from bishop_ray.paths import changed_environment

SUFFIXES = (".ckpt", ".safetensors", ".pt", ".pth")
_KINDS = ("classifier", "regressor")
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says of itself.

    Attributes:
        path: The file.
        header: Everything in it but tensors: configurations.
        names: Names of its tensors.
    """

    path: Path
    header: dict[str, Any]
    names: frozenset[str]

    def setting(self, section: str, name: str, default: int) -> int:
        """A whole number of a configuration, `default` where it has none."""
        found = (self.header.get(section) or {}).get(name, default)
        return found if isinstance(found, int) else default


def find_weights(
    variable: str, folders: Sequence[Path], kind: str, unfit: Callable[[Checkpoint], str], package: str
) -> Checkpoint:
    """The checkpoint to use: the first that fits, newer versions and shorter names first.

    Args:
        variable: Environment variable that names a file or folder; it wins over `folders`.
        folders: Where the package keeps its downloads.
        kind: "classifier" or "regressor"; files of a folder whose name has the other word are left out.
        unfit: Why a checkpoint cannot do the task, or "".
        package: Name of the model's package, for messages.

    Raises:
        UserError: No weights, none that fit, or a file that is damaged or would run code when read.
    """
    given = os.environ.get(variable, "").strip()
    if given and (path := Path(given).expanduser()).is_file():
        found = [path]
    elif given:
        if not path.is_dir():
            raise UserError(f"{variable}: expected a file or folder of {package} weights; found nothing at {given!r}")
        found = _candidates([path], kind)
    else:
        found = _candidates(folders, kind)
    if not found:
        where = given or " or ".join(map(str, folders))
        raise UserError(
            f"{package} needs pretrained weights, never downloaded here: no {kind} checkpoint in {where}; "
            f"set {variable} to a file ({', '.join(SUFFIXES)}) or its folder"
        )
    reasons = []
    for path in found:
        checkpoint = read_checkpoint(path)
        if not (reason := unfit(checkpoint)):
            return checkpoint
        reasons.append(f"the weights {path} {reason}")
    raise UserError(reasons[0])


def read_checkpoint(path: Path) -> Checkpoint:
    """Header and tensor names of a file; nothing in it is executed.

    Raises:
        UserError: Missing, damaged, or a pickle of more than tensors and plain values.
    """
    try:
        return _read(path, *_identity(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error


def digest(path: Path) -> str:
    """SHA-256 of a checkpoint."""
    return _digest(path, *_identity(path))


@contextmanager
def offline() -> Iterator[None]:
    """Tells the libraries used within not to call anybody."""
    with changed_environment(_OFFLINE):
        yield


@contextmanager
def torch_threads(n_threads: int) -> Iterator[None]:
    """PyTorch on `n_threads` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _candidates(folders: Sequence[Path], kind: str) -> list[Path]:
    other = next(name for name in _KINDS if name != kind)
    files = [path for folder in folders if folder.is_dir() for path in folder.iterdir() if path.suffix in SUFFIXES]

    def rank(path: Path) -> tuple[float, bool, int, str]:
        version = re.search(r"v(\d+(?:\.\d+)?)", path.name)
        return -float(version[1] if version else 0), "default" not in path.name, len(path.name), path.name

    return sorted((path for path in files if other not in path.name), key=rank)


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=8)
def _read(path: Path, *_identity: int) -> Checkpoint:
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                header = {key: json.loads(value) for key, value in (file.metadata() or {}).items()}
                return Checkpoint(path, header, frozenset(file.keys()))
        except (SafetensorError, ValueError) as error:
            raise UserError(f"{path}: no weights, or damaged ({error})") from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # torch.load names no errors: what it raises depends on the bytes of the file
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: no weights that can be read without running code, or damaged ({reason})") from error
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise UserError(f"{path}: expected weights under 'state_dict'; found {type(content).__name__} without it")
    header = {key: value for key, value in content.items() if key != "state_dict"}
    return Checkpoint(path, header, frozenset(map(str, content["state_dict"])))


@lru_cache(maxsize=8)
def _digest(path: Path, *_identity: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
