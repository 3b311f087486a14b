"""What RealMLP needs around its authors' package: weights as a state, losses and outputs, quiet, rows of noise."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bishop_ray.data.table import Table, TableSpec, TaskType
from bishop_ray.models.arguments import check_choice, check_rate, check_whole
from bishop_ray.models.base import Array

State = dict[str, Tensor]


@contextmanager
def quiet(threads: int, device: str, seed: int) -> Iterator[None]:
    """Own threads, seed and no words: what the package and Lightning set or say ends with the block."""
    before, logger = torch.get_num_threads(), logging.getLogger("pytorch_lightning")
    level, precision = logger.level, torch.backends.cuda.matmul.allow_tf32
    devices = list(range(torch.cuda.device_count())) if device == "cuda" else []
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        torch.set_num_threads(threads)
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            torch.set_num_threads(before)
            logger.setLevel(level)
            torch.backends.cuda.matmul.allow_tf32 = precision


def settings(**given: Any) -> dict[str, Any]:
    """The arguments of `RealMLP` as the package wants them; None is left to its defaults.

    Raises:
        ValueError: One is out of range; names it.
    """
    check_whole(1, n_epochs=given["n_epochs"], batch_size=given["batch_size"])
    check_choice(("none", "pl", "plr", "pbld"), num_emb_type=given["num_emb_type"])
    check_rate(p_drop=given["p_drop"], ls_eps=given["ls_eps"])
    if given["act"] is not None:
        check_choice(("relu", "selu", "mish"), act=given["act"])
    for name in ("lr", "plr_sigma"):
        if given[name] is not None and not given[name] > 0:
            raise ValueError(f"{name} must be > 0; found {given[name]!r}")
    if not given["wd"] >= 0:
        raise ValueError(f"wd must be >= 0; found {given['wd']!r}")
    text = given["hidden_sizes"]
    widths = str(text).split("-")
    if not all(part.isdigit() and int(part) > 0 for part in widths):
        raise ValueError(f"hidden_sizes must be widths joined by '-', as 256-256-256; found {text!r}")
    changed = {**given, "hidden_sizes": [int(part) for part in widths], "use_ls": given["ls_eps"] > 0}
    return {name: value for name, value in changed.items() if value is not None}


def noise(spec: TableSpec, rows: int = 8) -> Table:
    """Rows of the right shape and no meaning."""
    rng = np.random.default_rng(0)
    x_num = rng.normal(size=(rows, spec.n_num)).astype(np.float32)
    x_cat = np.zeros((rows, spec.n_cat), np.int64)
    if spec.task.is_classification:
        return Table(x_num, x_cat, rng.integers(0, spec.n_out, rows))
    return Table(x_num, x_cat, rng.normal(size=rows).astype(np.float32))


def state_of(module: Any) -> State:
    """A copy of the weights of the package's module and of what its preprocessing learnt."""
    parts = {"static": module.creator.static_model, "model": module.model}
    return {f"{part}.{key}": t.detach().clone() for part, net in parts.items() for key, t in net.state_dict().items()}


def set_state(module: Any, state: State) -> None:
    """Puts what `state_of` gave into a module of the same layers.

    Raises:
        RuntimeError: They are not the same.
    """
    for part, net in (("static", module.creator.static_model), ("model", module.model)):
        own = {key.removeprefix(f"{part}."): value for key, value in state.items() if key.startswith(f"{part}.")}
        net.load_state_dict(own)


def mean_loss(task: TaskType, out: Tensor, y: Tensor) -> float:
    """Mean validation loss of raw outputs (R, K); NaN is never the least."""
    wide = out.double()
    return float(F.cross_entropy(wide, y) if task.is_classification else F.mse_loss(wide[:, 0], y.double()))


def output_of(spec: TableSpec, out: Tensor) -> Array:
    """Raw outputs (B, K) as `Estimator.predict` gives them."""
    shown: Array = (out.float().softmax(-1) if spec.task.is_classification else out.float()).cpu().numpy()
    return shown
