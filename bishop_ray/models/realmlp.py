"""What RealMLP needs around its authors' package: weights as a state, losses and outputs, quiet, rows of noise."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from bishop_ray.data.table import Table, TableSpec, TaskType
from bishop_ray.errors import TrainingFailed, UserError
from bishop_ray.models.base import Array, Estimator, NumericKind
from bishop_ray.models.validation import check_choice, check_rate, check_whole

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


FILE = "weights.safetensors"
EVAL_ROWS = 1024


class RealMLP(Estimator):
    """RealMLP-TD (Holzmüller et al. 2024, "Better by Default: Strong Pre-Tuned MLPs and Boosted Trees").

    The network, its preprocessing (robust scaling and smooth clipping of numbers, one-hot or embedded categories), its
    initialisation and its schedules are those of ``pytabkit``; its scikit-learn classes, which can only be pickled, are
    not used. Numbers come standardised, which its own scaling undoes, and with indicators of missing values, which it
    has none of; code 0 (missing or unseen) is what its encoders know as that. Rounds are epochs. Deviation: the best
    epoch is the one of least validation loss for classification too, where the paper takes the classification error.

    Args:
        spec: The table.
        hidden_sizes: Widths of the hidden layers, joined by "-".
        num_emb_type: Embeddings of numbers: "none", "pl", "plr" or "pbld".
        plr_sigma: Standard deviation of their initial frequencies.
        add_front_scale: A learned scale of every input.
        act: "relu", "selu" or "mish"; None for selu in classification and mish in regression.
        p_drop: Dropout rate, until its schedule lowers it.
        lr: Learning rate; None for 0.04 in classification and 0.2 in regression.
        wd: Weight decay.
        ls_eps: Label smoothing; regression has none.
        n_epochs: Epochs of a full training.
        batch_size: Rows of a step.

    Raises:
        ValueError: An argument out of range; the message names it.
    """

    numeric: ClassVar[NumericKind] = "normal"
    reports: ClassVar[int] = 8

    def __init__(
        self,
        spec: TableSpec,
        *,
        hidden_sizes: str = "256-256-256",
        num_emb_type: str = "pbld",
        plr_sigma: float = 0.1,
        add_front_scale: bool = True,
        act: str | None = None,
        p_drop: float = 0.15,
        lr: float | None = None,
        wd: float = 2e-2,
        ls_eps: float = 0.1,
        n_epochs: int = 256,
        batch_size: int = 256,
    ) -> None:
        self.spec, self.n_epochs = spec, n_epochs
        self._changes = settings(
            hidden_sizes=hidden_sizes,
            num_emb_type=num_emb_type,
            plr_sigma=plr_sigma,
            add_front_scale=add_front_scale,
            act=act,
            p_drop=p_drop,
            lr=lr,
            wd=wd,
            ls_eps=ls_eps,
            n_epochs=n_epochs,
            batch_size=batch_size,
        )
        self._module: Any = None
        self._states: dict[int, State] = {}
        self._shown = 0

    def fit(self, train: Table, val: Table, on_round: Callable[[int, Array], bool]) -> None:
        """Trains; see `Estimator.fit`. A call of `on_round` every ``n_epochs / reports`` epochs, rounded up.

        Raises:
            TrainingFailed: No epoch had a finite validation loss.
        """
        best, least = 0, float("inf")
        chunk = -(-self.n_epochs // self.reports)
        ends = {chunk * part for part in range(1, self.reports) if chunk * part < self.n_epochs}
        truth = torch.as_tensor(val.y)

        def after(epoch: int, out: Tensor) -> bool:
            nonlocal best, least
            loss = mean_loss(self.spec.task, out, truth)
            if loss < least:
                self._states.pop(best if best not in ends else -1, None)
                best, least = epoch, loss
                self._states[epoch] = state_of(self._module)
            if epoch not in ends:
                return False
            self._states[epoch] = state_of(self._module)
            return on_round(epoch, output_of(self.spec, out))

        self._states = {}
        with self._quiet():
            self._train(train, val, after)
        if not best:
            raise TrainingFailed("the validation loss of RealMLP was never finite")
        self.rounds = best

    def refit(self, train: Table, rounds: int) -> None:
        """Trains for `rounds` epochs of the schedule of a full training; see `Estimator.refit`."""
        with self._quiet():
            self._train(train, None, lambda epoch, _out: epoch >= rounds)
            self.rounds = rounds
            self._states = {rounds: state_of(self._module)}

    def _train(self, train: Table, val: Table | None, after: Callable[[int, Tensor], bool]) -> None:
        """Runs the package's training; `after` hears every epoch and the raw outputs of `val`, and may end it."""
        from pytabkit.models.training.lightning_modules import pl

        self._module = self._build(train, val)
        trainer = pl.Trainer(
            max_epochs=self.n_epochs,
            callbacks=[*self._module.create_callbacks(), _watch(after)],
            logger=pl.loggers.logger.DummyLogger(),
            num_sanity_val_steps=0,
            accelerator="gpu" if self.device == "cuda" else "cpu",
            devices=1,
            **dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        )
        trainer.fit(self._module, train_dataloaders=self._module.train_dl, val_dataloaders=self._module.val_dl)
        self._module.to(self.device)
        self._shown = 0

    def _build(self, train: Table, val: Table | None) -> Any:
        """The package's module, set up for these rows but not trained."""
        from pytabkit.models.alg_interfaces.base import InterfaceResources, SplitIdxs
        from pytabkit.models.sklearn.default_params import DefaultParams
        from pytabkit.models.training.lightning_modules import TabNNModule

        classes = self.spec.task.is_classification
        defaults = DefaultParams.RealMLP_TD_CLASS if classes else DefaultParams.RealMLP_TD_REG
        # Which epoch is kept is decided here, so the package keeps none and its metric does not matter.
        config = {**defaults, **self._changes, "use_best_epoch": False, "verbosity": 0}
        tables = [train] if val is None else [train, val]
        rows = torch.arange(sum(len(table) for table in tables))[None].tensor_split([len(train)], dim=1)
        split = SplitIdxs(rows[0], None if val is None else rows[1], None, self.seed, [self.seed], 0)
        module = TabNNModule(**config)
        devices = ["cuda:0"] if self.device == "cuda" else []
        data = _dataset(self.spec, tables).to(self.device)
        module.compile_model(data, [split], InterfaceResources(self.n_threads, devices))
        return module

    def predict(self, x_num: Array, x_cat: NDArray[np.int64]) -> Array:
        """(R, N), (R, C) -> (R, K); see `Estimator.predict`.

        Raises:
            RuntimeError: No model, or no state of the epoch `rounds`: the ends of chunks and the best epoch are kept.
        """
        self._show()
        parts = [np.zeros((0, self.spec.n_out), np.float32)]
        with self._quiet(), torch.no_grad():
            self._module.model.eval()
            for start in range(0, len(x_num), EVAL_ROWS):
                rows = slice(start, start + EVAL_ROWS)
                cat = torch.tensor(x_cat[rows], dtype=torch.int64, device=self.device)
                tensors = {"x_cont": torch.tensor(x_num[rows], dtype=torch.float32, device=self.device), "x_cat": cat}
                tensors = self._module.creator.static_model.forward_tensors(tensors)
                out = self._module.model({name: tensor[None] for name, tensor in tensors.items()})["x_cont"]
                parts.append(output_of(self.spec, out[0]))
        return np.concatenate(parts)

    def _quiet(self) -> AbstractContextManager[None]:
        import pytabkit.models.training.lightning_modules  # noqa: F401 - first: importing it sets a level of logging

        return quiet(self.n_threads, self.device, self.seed)

    def _show(self) -> None:
        """Puts the weights of epoch `rounds` in place."""
        if self.rounds not in self._states:
            raise RuntimeError(f"RealMLP has weights of epochs {sorted(self._states)}; found rounds {self.rounds}")
        if self._shown != self.rounds:
            set_state(self._module, self._states[self.rounds])
            self._shown = self.rounds

    def save(self, folder: Path) -> None:
        """Writes the weights of epoch `rounds`, preprocessing included, as safetensors."""
        self._show()
        state = {name: tensor.cpu() for name, tensor in state_of(self._module).items()}
        save_file(state, folder / FILE, {"rounds": str(self.rounds)})

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote; see `Estimator.load`."""
        path = folder / FILE
        self.device = "cpu"
        try:
            with safe_open(path, "pt") as file:
                self.rounds = int(file.metadata()["rounds"])
            self._states = {self.rounds: load_file(path)}
            with self._quiet():
                # The layers follow from the spec and the arguments: rows of noise stand in for the fitted ones.
                self._module = self._build(noise(self.spec), None)
            self._shown = 0
            self._show()
        except FileNotFoundError as error:
            raise UserError(f"{path}: missing") from error
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"{path}: damaged, or not of this model ({' '.join(str(error).split())[:200]})") from error


def _watch(after: Callable[[int, Tensor], bool]) -> Any:
    """A Lightning callback that hears every epoch."""
    from pytabkit.models.training.lightning_modules import pl

    class Watch(pl.Callback):  # type: ignore[misc]
        epoch = 0

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            # Lightning validates before this; without validation rows there is nothing to show.
            self.epoch += 1
            out = torch.cat(module.val_preds, dim=-2)[0].cpu() if module.val_preds else torch.empty(0)
            if after(self.epoch, out):
                trainer.should_stop = True

    return Watch()


def _dataset(spec: TableSpec, tables: list[Table]) -> Any:
    """The package's own kind of table; its code 0 too stands for missing or unknown."""
    from pytabkit.models.data.data import DictDataset, TensorInfo

    y = torch.as_tensor(np.concatenate([table.y for table in tables]))[:, None]
    tensors = {
        "x_cont": torch.as_tensor(np.concatenate([table.x_num for table in tables])),
        "x_cat": torch.as_tensor(np.concatenate([table.x_cat for table in tables])),
        "y": y.long() if spec.task.is_classification else y.float(),
    }
    classes = {"cat_sizes": [spec.n_out]} if spec.task.is_classification else {"feat_shape": [1]}
    sizes = TensorInfo(cat_sizes=torch.tensor(spec.cat_cardinalities, dtype=torch.long))
    return DictDataset(tensors, {"x_cont": TensorInfo([spec.n_num]), "x_cat": sizes, "y": TensorInfo(**classes)})
