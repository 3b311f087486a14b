"""What one training step costs, in time and memory: ours against the authors' code, their default configuration.

    python jobs/bench/step.py [--reference PATH] [--batch 32 256] [--precision fp32 auto] [--modes eager] [--json FILE]

The table has 8 categorical and 6 numerical columns and two classes. A step is forward, loss, backward, clipping and the
optimizer's update, and the batch's way to the network: theirs casts and moves what a DataLoader gave (the DataLoader
itself is not timed), ours gathers rows of a table on the device. The configuration is theirs on both sides, the head
unbounded; only their category tables have 5,000 rows each, ours as many as there are categories. Sides alternate; on
CUDA a timed call is the mean of several steps, which do not wait for each other where nothing in them asks for a
number. Memory is the peak of a step with all that is held, and what of it comes on top of weights and moments. Modes
beyond eager are for CUDA: the whole step as a graph, the network compiled, or both.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from harness import Row, graphed, interleave, medians, parser, peak_memory, publish, ratio, start
from reference import AUTHORS_RATE, Reference, authors_step, load_reference
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bishop_ray import cli
from bishop_ray.config import TrainConfig
from bishop_ray.data.table import Table, TableSpec, TaskType
from bishop_ray.errors import UserError
from bishop_ray.models.bishop.model import BiSHop
from bishop_ray.training.device_table import Resident
from bishop_ray.training.distributed import Ranks
from bishop_ray.training.micro_batch import Passes
from bishop_ray.training.optimizer import Stepper
from bishop_ray.training.precision import resolve_precision

AUTHORS = "authors"
N_CAT, N_NUM, LEVELS = 8, 6, 10
MODES = ("eager", "graph", "compile", "compile+graph")
PRECISIONS = ("fp32", "bf16", "auto")
DENSE_TFLOPS = {"H100 PCIe": (51.2, 756.0), "H100": (66.9, 989.4), "H200": (66.9, 989.4), "A100": (19.5, 312.0)}
"""(fp32, bf16) of the makers' data sheets, without sparsity."""


@dataclass(frozen=True)
class Data:
    """A table, and batches of its row numbers."""

    table: Table
    batches: tuple[Tensor, ...]


def make_data(batch: int) -> Data:
    """Four batches of random rows whose class depends on a number and a category."""
    rng = np.random.default_rng(0)
    rows = 4 * batch
    x_num = rng.normal(size=(rows, N_NUM)).astype(np.float32)
    x_cat = rng.integers(0, LEVELS, size=(rows, N_CAT)).astype(np.int64)
    y = (x_num[:, 0] + x_cat[:, 0] > 4.5).astype(np.int64)
    order = torch.from_numpy(rng.permutation(rows))
    return Data(Table(x_num, x_cat, y), torch.split(order, batch))


@dataclass(frozen=True)
class Variant:
    """How our step is done; "auto" is what training chooses itself."""

    precision: str
    shared: bool
    mode: str
    micro_batch: int = 0

    def __str__(self) -> str:
        words = ["ours", self.precision]
        words += ["shared start"] if self.shared else []
        words += [f"pieces of {self.micro_batch}"] if self.micro_batch else []
        return " ".join(words + ([] if self.mode == "eager" else [self.mode]))


class Ours:
    """One step of ours after the other, as the training loop makes it; `last` is the newest loss."""

    def __init__(self, variant: Variant, data: Data, device: torch.device) -> None:
        torch.manual_seed(0)
        self.network = BiSHop(TableSpec(TaskType.BINARY, N_NUM, (LEVELS,) * N_CAT, 2), head_max_width=None)
        self.network.observe(data.table)
        self.network.to(device)
        self.network.decoder.shared_start = variant.shared
        self.data = Resident(data.table, torch.int64, device)
        self.precision = resolve_precision(variant.precision, self.network, self.data, len(data.batches[0]))
        self.network.train()
        self.passes = Passes(self.network, self.precision)
        self.passes.micro_batch = variant.micro_batch
        self.stepper = Stepper(self.network, TrainConfig(), Ranks(device))
        self.optimizer = self.stepper.optimizer
        self.held = [value for value in vars(self.stepper).values() if isinstance(value, Tensor)]
        self.index = data.batches[0].to(device)
        self.last = torch.zeros((), device=device)
        self._batches = cycle([batch.to(device) for batch in data.batches])
        self._run: Callable[[], object] = self._step
        self.flops = count_flops(self)
        if variant.mode.startswith("compile"):
            self.network.compile(dynamic=False)
        if variant.mode.endswith("graph"):
            self._run = self._captured()

    def __call__(self) -> None:
        """The next step."""
        self.index.copy_(next(self._batches))
        self._run()

    def _step(self) -> None:
        self.last.copy_(self.passes.gradient(self.data, self.index))
        self.stepper.step()

    def _captured(self) -> Callable[[], object]:
        for group in self.optimizer.param_groups:
            group["capturable"] = True
        return graphed(self._step)


class Theirs:
    """One step of the authors' after the other; `last` is the newest loss."""

    def __init__(self, reference: Reference, data: Data, device: torch.device) -> None:
        torch.manual_seed(0)
        network = reference.build(N_CAT, N_NUM, 2, device)
        bins: Callable[[Tensor], None] = network.get_bins  # type: ignore[assignment]
        x_num, x_cat, y = (torch.from_numpy(column) for column in (data.table.x_num, data.table.x_cat, data.table.y))
        bins(x_num)
        optimizer = torch.optim.AdamW(network.parameters(), lr=AUTHORS_RATE)
        self.network, self.optimizer = network.train(), optimizer
        self.last, self.precision = math.nan, "fp32"
        self.held: list[Tensor] = []
        self._batches = cycle([(x_cat[rows], x_num[rows], y[rows]) for rows in data.batches])
        self.flops = count_flops(self)

    def __call__(self) -> None:
        """The next step."""
        self.last = authors_step(self.network, self.optimizer, next(self._batches))


def count_flops(step: Callable[[], object]) -> int:
    """Floating-point operations of the matrix products of a step, forward and backward."""
    counter = FlopCounterMode(display=False)
    with counter:
        step()
    return int(counter.get_total_flops())


def build(args: argparse.Namespace, reference: Reference | None, batch: int, device: torch.device) -> dict[str, Any]:
    """Name -> side, the authors' first."""
    data = make_data(batch)
    sides: dict[str, Any] = {} if reference is None else {AUTHORS: Theirs(reference, data, device)}
    for mode in args.modes:
        for precision in args.precision:
            for shared in args.shared_start:
                variant = Variant(precision, shared == "on", mode, args.micro_batch)
                sides[str(variant)] = Ours(variant, data, device)
    return sides


def measure(args: argparse.Namespace, reference: Reference | None, batch: int, device: torch.device) -> list[Row]:
    """A row per side.

    Raises:
        RuntimeError: A side's loss is not that of a step that works.
    """
    sides = build(args, reference, batch, device)
    seconds = medians(interleave(sides, args.repeats, device, inner=args.inner or (10 if device.type == "cuda" else 1)))
    memory = {
        name: peak_memory(side, side.network, side.optimizer, device, side.held)
        for name, side in sides.items()
        if not name.endswith("graph")  # a replay allocates nothing: its memory was taken at the capture
    }
    for name, side in sides.items():
        if not 0 < float(side.last) < 10:
            raise RuntimeError(f"{name}: the loss is {float(side.last):g} after {args.repeats} steps")
    return [_row(batch, name, side, seconds, memory, device) for name, side in sides.items()]


def _row(
    batch: int,
    name: str,
    side: Any,
    seconds: dict[str, float],
    memory: dict[str, tuple[int, int]],
    device: torch.device,
) -> Row:
    rate = side.flops / seconds[name] / 1e12
    peak = dense_peak(side.precision == "bf16", device)
    held, above = memory.get(name, (None, None))
    their_held, their_above = memory.get(AUTHORS, (None, None))
    return {
        "batch": batch, "side": name, "precision": side.precision,
        "ms": 1e3 * seconds[name], "rows/s": batch / seconds[name],
        "times faster": ratio(seconds.get(AUTHORS), seconds[name]),
        "peak MiB": _mib(held), "of theirs": ratio(held, their_held),
        "above weights MiB": _mib(above), "of theirs above": ratio(above, their_above),
        "GFLOP": side.flops / 1e9, "TFLOP/s": rate, "share of peak": None if peak is None else rate / peak,
    }  # fmt: skip


def _mib(size: int | None) -> float | None:
    return None if size is None else size / 2**20


def dense_peak(half: bool, device: torch.device) -> float | None:
    """TFLOP/s that the maker names for this card, None for others and CPUs."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    found = next((rates for card, rates in DENSE_TFLOPS.items() if all(word in name for word in card.split())), None)
    return None if found is None else found[half]


def main() -> int:
    """Measures every batch size and prints a table.

    Raises:
        UserError: A mode that needs CUDA, without it; ``--reference`` is no checkout.
    """
    built = parser(__doc__, repeats=7, reference=True)
    built.add_argument("--batch", type=cli.positive_int, nargs="+", default=[32], metavar="N", help="rows (32)")
    built.add_argument(
        "--precision", choices=PRECISIONS, nargs="+", default=["fp32", "auto"], help="of ours (fp32 auto)"
    )
    built.add_argument("--shared-start", choices=("off", "on"), nargs="+", default=["off", "on"], help="of ours (both)")
    built.add_argument("--modes", choices=MODES, nargs="+", default=["eager"], help="of ours (eager)")
    built.add_argument(
        "--micro-batch",
        type=cli.positive_int,
        default=0,
        metavar="N",
        help="of ours: rows of a pass (all of the batch)",
    )
    built.add_argument("--inner", type=cli.positive_int, metavar="N", help="steps within a timed call (CPU 1, CUDA 10)")
    args = built.parse_args()
    reference = None if args.reference is None else load_reference(args.reference)
    device = start(args)
    if device.type != "cuda" and any(mode.endswith("graph") for mode in args.modes):
        raise UserError(f"--modes: expected eager or compile on a CPU; found {' '.join(args.modes)}")
    publish([row for batch in args.batch for row in measure(args, reference, batch, device)], args, device)
    return 0


if __name__ == "__main__":
    cli.run(main)
