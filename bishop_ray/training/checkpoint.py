"""The state of a training in one file, from which it goes on as if nothing had happened.

``last.safetensors`` holds tensors ``weights/NAME``, ``best/NAME``, ``exp_avg/NAME``, ``exp_avg_sq/NAME``,
``step/NAME``, and one JSON text in its header (identity, learning rates, scheduler, progress). One file, because only
a file can be replaced atomically: a reader sees the previous checkpoint or the next one, never a mixture. No pickle.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from bishop_ray.errors import UserError
from bishop_ray.paths import flush
from bishop_ray.predictor.storage import DAMAGE, words
from bishop_ray.training.optimizer import Stepper
from bishop_ray.training.system import is_full

logger = logging.getLogger(__name__)
FILE = "last.safetensors"
FORMAT = 1
ABANDONED_SECONDS = 60.0
"""Nobody takes so long to write a checkpoint."""
SHARE = 20
"""A save is due when training lasted this many times as long as the save before: about 5 % of the time."""


class Saver:
    """Decides when a checkpoint is due: always for the first and the last epoch, else by `SHARE`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._duration = 0.0
        self._ended = -float("inf")

    def due(self) -> bool:
        """Whether enough time went by since the last save."""
        return time.perf_counter() - self._ended >= SHARE * self._duration

    def save(self, *state: Any) -> None:
        """Calls `save_state` with the folder and `state`, and remembers how long it took."""
        started = time.perf_counter()
        try:
            save_state(self.folder, *state)
        except Exception as error:
            if not is_full(error):
                raise
            # Only a resume would need it, and that has the checkpoint before.
            logger.warning("no space left for a checkpoint in %s; training goes on", self.folder)
        self._ended = time.perf_counter()
        self._duration = self._ended - started


def has_state(folder: Path) -> bool:
    """Whether `folder` holds a checkpoint."""
    return (folder / FILE).is_file()


def save_state(
    folder: Path,
    network: nn.Module,
    stepper: Stepper,
    scheduler: ReduceLROnPlateau,
    best: Mapping[str, Tensor],
    progress: Mapping[str, Any],
    identity: Mapping[str, Any],
) -> None:
    """Writes a checkpoint, atomically: whole and on the disk, or not at all.

    Args:
        folder: Made when missing; one training per folder.
        network: Its state dict is written.
        stepper: Of the network's parameters.
        scheduler: The learning-rate scheduler.
        best: State dict of the best epoch so far.
        progress: JSON values: epoch and early-stopping state.
        identity: JSON values that must be the same on loading.
    """
    tensors = {f"weights/{name}": tensor for name, tensor in network.state_dict().items()}
    tensors |= {f"best/{name}": tensor for name, tensor in best.items()}
    tensors |= stepper.moments()
    header = {
        "format": FORMAT,
        "identity": identity,
        "lr": [float(group["lr"]) for group in stepper.optimizer.param_groups],
        "scheduler": scheduler.state_dict(),
        "progress": progress,
    }
    folder.mkdir(parents=True, exist_ok=True)
    # Of this process: one that was left behind by a killed driver may still be writing its last.
    new = folder / f"{FILE}.{socket.gethostname()}-{os.getpid()}.new"
    try:
        # Cloned: safetensors refuses tensors that share memory, as tied weights do.
        copies = {key: t.detach().cpu().clone() for key, t in tensors.items()}
        save_file(copies, new, {"state": json.dumps(header, default=float)})
        flush(new)
        os.replace(new, folder / FILE)
    finally:
        new.unlink(missing_ok=True)
    for left in folder.glob(f"{FILE}.*new"):  # of processes that were killed while they wrote
        with suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > ABANDONED_SECONDS:
                left.unlink()
    flush(folder)


def load_state(
    folder: Path,
    network: nn.Module,
    stepper: Stepper,
    scheduler: ReduceLROnPlateau,
    identity: Mapping[str, Any],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Puts a checkpoint into network, stepper and scheduler, all on the network's device.

    Returns:
        The best state dict and the progress, as they were saved.

    Raises:
        UserError: No checkpoint, a damaged one, one of a newer format, or one of another training.
    """
    path = folder / FILE
    header, tensors = _read(path)
    if header.get("format") != FORMAT:
        raise UserError(f"checkpoint {path}: expected format {FORMAT}; found {str(header.get('format'))[:40]}")
    try:
        _check_identity(path, header["identity"], identity)
        return _put(header, tensors, network, stepper, scheduler)
    except UserError:
        raise
    except DAMAGE as error:
        raise UserError(f"checkpoint {path} does not fit the network: {words(error)}") from error


def _put(
    header: dict[str, Any], tensors: dict[str, Tensor], network: nn.Module, stepper: Stepper, scheduler: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What was read into network, stepper and scheduler; the best state dict and the progress."""
    device = next(network.parameters()).device
    # Copied: what was read is a mapping of the file, which the next save replaces.
    moved = {key: tensor.to(device, copy=True) for key, tensor in tensors.items()}
    best = {key.removeprefix("best/"): tensor for key, tensor in moved.items() if key.startswith("best/")}
    weights = {key.removeprefix("weights/"): tensor for key, tensor in moved.items() if key.startswith("weights/")}
    network.load_state_dict(weights)
    _check_moments(moved, network)
    stepper.load_moments(moved)
    for group, rate in zip(stepper.optimizer.param_groups, header["lr"], strict=True):
        group["lr"] = float(rate)
    # A scheduler takes whatever it is given as its attributes, methods among them.
    own, found = scheduler.state_dict(), dict(header["scheduler"])
    if found.keys() != own.keys() or not all(_alike(found[key], own[key]) for key in own):
        raise ValueError("the scheduler's state is of another kind")
    scheduler.load_state_dict(found)
    return best, dict(header["progress"])


def _check_moments(tensors: Mapping[str, Tensor], network: nn.Module) -> None:
    """ValueError for moments of other sizes than the parameters': the optimizer's fused kernel would not notice."""
    for name, parameter in network.named_parameters():
        shapes = {"exp_avg": parameter.shape, "exp_avg_sq": parameter.shape, "step": ()}
        for key, shape in ((f"{kind}/{name}", shape) for kind, shape in shapes.items()):
            if (found := tensors.get(key)) is None:
                if parameter.requires_grad:
                    raise KeyError(key)
            elif found.shape != shape or not found.is_floating_point():
                raise ValueError(f"{key}: expected {tuple(shape)}, found {tuple(found.shape)} of {found.dtype}")


def _alike(found: Any, own: Any) -> bool:
    """Whether a value from JSON is of the kind of ours: a number, a text, or as many of them."""
    if isinstance(own, list):
        return isinstance(found, list) and len(found) == len(own) and all(map(_alike, found, own))
    return isinstance(found, int | float if isinstance(own, int | float) else type(own))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a checkpoint file."""
    if not path.is_file():
        raise UserError(f"no checkpoint at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(json.loads(file.metadata()["state"]))
            return header, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no iterator
    except (SafetensorError, OSError, *DAMAGE) as error:
        raise UserError(f"checkpoint {path} is damaged or no checkpoint: {words(error)}") from error


def _check_identity(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    wanted = json.loads(json.dumps(expected))
    for key in sorted({*found, *wanted}):
        if found.get(key) != wanted.get(key):
            raise UserError(
                f"checkpoint {path} belongs to another training: "
                f"{key} is {found.get(key)!r}, expected {wanted.get(key)!r}"
            )
