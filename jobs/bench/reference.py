"""The authors' release (github MAGICS-LAB/BiSHop): their network, and one training step as their loop makes it.

It is brought by whoever runs a benchmark, as ``--reference PATH``; nothing of it is here.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

from bishop_ray.errors import UserError

AUTHORS_DEFAULTS: dict[str, Any] = {
    "n_class": 5000, "emb_dim": 32, "out_dim": 24, "patch_dim": 8, "factor": 10, "flip": True, "n_agg": 4,
    "actv": "entmax", "hopfield": True, "d_model": 256, "d_ff": 512, "n_heads": 4, "e_layer": 3, "d_layer": 4,
    "dropout": 0.2, "share": True, "share_div": 8, "share_add": False, "full_dropout": False, "emb_dropout": 0.1,
    "mlp_bn": False, "mlp_bn_final": False, "mlp_dropout": 0.2, "mlp_hidden": (4, 2, 1), "mlp_skip": False,
    "mlp_softmax": False,
}  # fmt: skip
"""What the command line and ``exp/exp_bishop.py`` of their release build when no flag is given."""

AUTHORS_RATE = 5e-5
"""Their learning rate."""


@dataclass(frozen=True)
class Reference:
    """The authors' release: their network, built and trained by one batch as in their loop.

    Attributes:
        path: The checkout.
        network: Their class ``BiSHop``.
    """

    path: Path
    network: type[nn.Module]

    def build(self, n_cat: int, n_num: int, n_out: int, device: torch.device, **changes: Any) -> nn.Module:
        """A fresh network of their default configuration; `changes` are further arguments of their class.

        Its ``get_bins(x_num)`` must see the training rows before the first forward pass, ``forward(x_cat, x_num)``.
        """
        make: Any = self.network
        built: nn.Module = make(
            n_cat, n_num, n_out, mlp_actv=nn.ReLU(), device=device, **{**AUTHORS_DEFAULTS, **changes}
        )
        return built.float().to(device)


def authors_step(network: nn.Module, optimizer: torch.optim.Optimizer, batch: Sequence[Tensor]) -> float:
    """The loss of one training step on ``(x_cat, x_num, y)``, with what their loop does for each batch.

    The batch is cast and moved as there; the loss of integer `y` is cross-entropy, else the squared error.
    """
    x_cat, x_num, y = batch
    device = next(network.parameters()).device
    optimizer.zero_grad()
    x_cat, x_num = x_cat.long().to(device), x_num.float().to(device)
    y = y.to(device)
    out = network(x_cat, x_num)
    loss = nn.functional.mse_loss(out, y) if y.is_floating_point() else nn.functional.cross_entropy(out, y)
    value = loss.item()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    return value


def load_reference(path: Path) -> Reference:
    """The network of a checkout of the authors' release.

    Their modules import each other as ``models.…``: while that happens, and not longer, this name stands for their
    folder, so that nothing of ours is shadowed and nothing of theirs is found by accident.

    Raises:
        UserError: No such checkout, or a package that it needs is not installed.
    """
    folder = path.expanduser().resolve() / "models"
    if not (folder / "model.py").is_file():
        raise UserError(f"--reference: expected a checkout of MAGICS-LAB/BiSHop, with models/model.py; found {path}")
    if importlib.util.find_spec("einops") is None:
        raise UserError("--reference: the authors' release needs einops, which is not installed: pip install einops")
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "models"}
    for name in hidden:
        del sys.modules[name]
    package = ModuleType("models")
    package.__path__ = [str(folder)]
    sys.modules["models"] = package
    try:
        network = getattr(importlib.import_module("models.model"), "BiSHop", None)
    except ImportError as error:
        raise UserError(f"--reference: {folder / 'model.py'} cannot be imported ({error})") from error
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "models"]:
            del sys.modules[name]
        sys.modules.update(hidden)
    if not (isinstance(network, type) and issubclass(network, nn.Module)):
        raise UserError(f"--reference: expected a class BiSHop in {folder / 'model.py'}; found none")
    return Reference(folder.parent, network)
