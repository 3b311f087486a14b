"""How the epoch time of BiSHop grows with rows and with features: table, fitted exponents, plot.

    python jobs/bench/growth.py [--plot FILE] [--repeats 3] [--threads N] [--networks small,medium] [--max-rows 100000]
        [--max-features 300] [--json FILE]

Random tables, a quarter of their columns categorical; an epoch is one of `fit_network`: all training rows, then
validation on a quarter as many. "small" is the first point of its CPU search space, batch 64; "medium" is twice as
wide with three encoder levels, batch 128, and sees at most 3,000 rows. Where epochs are short, the first one of a
training warms up and the median of the next ones counts; a first epoch of more than 10 seconds counts itself. The
exponent is the slope of a line through the logarithms: 1 is proportional.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Row, parser, publish, start  # isort: skip
import numpy as np
import torch

from bishop_ray import cli
from bishop_ray.config import TrainConfig
from bishop_ray.data import Table, TableSpec, TaskType
from bishop_ray.errors import UnknownName, UserError
from bishop_ray.models.bishop.model import BiSHop
from bishop_ray.training.loop import fit_network
from bishop_ray.training.results import EpochResult

ROWS = (1000, 3000, 10_000, 30_000, 100_000)
FEATURES = (10, 30, 100, 300)
FIXED_FEATURES = 20
CODES = 8
"""Of a categorical column."""
LONG = 10.0
"""Seconds from which on an epoch is measured once."""
TARGETS = {"rows": 1.0, "features": 1.2}
"""The exponents that are asked for."""


@dataclass(frozen=True)
class Setting:
    """A network and its training.

    Attributes:
        model: Arguments of `BiSHop`.
        batch_size: Rows of a step.
        max_rows: Largest table that it is tried on.
        fixed_rows: Training rows while features grow.
    """

    model: dict[str, Any]
    batch_size: int
    max_rows: int
    fixed_rows: int


SETTINGS = {
    "small": Setting(
        {
            "d_embedding": 16, "stride": 8, "n_pool": 5, "n_merge": 2, "d_model": 32, "d_ff": 64, "n_heads": 2,
            "n_encoder_levels": 2, "n_decoded": 8, "dropout": 0.0, "head_dropout": 0.0,
        },
        64, 100_000, 1024,
    ),
    "medium": Setting(
        {
            "d_embedding": 32, "stride": 8, "n_pool": 10, "n_merge": 4, "d_model": 64, "d_ff": 128, "n_heads": 4,
            "n_encoder_levels": 3, "n_decoded": 24, "dropout": 0.2,
        },
        128, 3000, 256,
    ),
}  # fmt: skip


def make_table(rows: int, features: int, seed: int) -> tuple[Table, TableSpec]:
    """Normal numbers and uniform codes, a quarter of the columns; two classes that a few columns decide."""
    random = np.random.default_rng([seed, rows, features])
    n_cat = features // 4
    x_num = random.standard_normal((rows, features - n_cat), dtype=np.float32)
    x_cat = random.integers(1, CODES, (rows, n_cat))
    y = (x_num[:, :3].sum(1) + (x_cat[:, 0] > CODES // 2 if n_cat else 0) > 0).astype(np.int64)
    return Table(x_num, x_cat, y), TableSpec(TaskType.BINARY, features - n_cat, (CODES,) * n_cat, 2)


def epoch_seconds(setting: Setting, rows: int, features: int, repeats: int) -> list[float]:
    """Wall seconds of the epochs that count."""
    train, spec = make_table(rows, features, 0)
    val, _ = make_table(rows // 4, features, 1)
    torch.manual_seed(0)
    found: list[float] = []

    def on_epoch(result: EpochResult) -> bool:
        found.append(result.seconds)
        return result.seconds > LONG

    config = TrainConfig(max_epochs=repeats + 1, patience=repeats + 1, batch_size=setting.batch_size, lr=1e-3)
    fit_network(BiSHop(spec, **setting.model), train, val, config, on_epoch)
    return found[1:] or found


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """Slope of the least-squares line through the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def series(name: str, axis: str, args: argparse.Namespace) -> list[Row]:
    """One row per size of `axis` ("rows" or "features"), the exponent in the last one."""
    setting = SETTINGS[name]
    limit = min(args.max_rows, setting.max_rows) if axis == "rows" else args.max_features
    sizes = [size for size in (ROWS if axis == "rows" else FEATURES) if size <= limit]
    found: list[Row] = []
    for size in sizes:
        rows, features = (size, FIXED_FEATURES) if axis == "rows" else (setting.fixed_rows, size)
        times = epoch_seconds(setting, rows, features, args.repeats)
        found.append({
            "network": name, "axis": axis, "rows": rows, "features": features, "epochs": len(times),
            "seconds": statistics.median(times), "us per row": 1e6 * statistics.median(times) / rows,
            "exponent": None, "target": None,
        })  # fmt: skip
        print(f"{name}: {rows} rows, {features} features: {found[-1]['seconds']:.3f} s", flush=True)
    if len(found) > 1:
        found[-1] |= {"exponent": exponent(sizes, [row["seconds"] for row in found]), "target": TARGETS[axis]}
    return found


def draw(rows: list[Row], file: Path) -> None:
    """Both growths on logarithmic axes, with a line of slope 1 from each first point."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for panel, axis in zip(panels, TARGETS, strict=True):
        for name in dict.fromkeys(row["network"] for row in rows):
            own = [row for row in rows if (row["network"], row["axis"]) == (name, axis)]
            x, y = [row[axis] for row in own], [row["seconds"] for row in own]
            slope = own[-1]["exponent"] if own else None
            (line,) = panel.plot(x, y, "o-", label=name if slope is None else f"{name}, exponent {slope:.2f}")
            if own:
                panel.plot(x, [y[0] * size / x[0] for size in x], ":", color=line.get_color())
        panel.set(xscale="log", yscale="log", xlabel=axis)
        panel.legend()
    panels[0].set_ylabel("seconds per epoch")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def main() -> int:
    """Measures every network and axis; prints a table, and draws it if asked for."""
    built = parser(__doc__, repeats=3)
    built.add_argument("--networks", default="small,medium", metavar="NAMES", help="comma-separated (small,medium)")
    built.add_argument(
        "--max-rows", type=cli.positive_int, default=ROWS[-1], metavar="N", help=f"largest table ({ROWS[-1]})"
    )
    built.add_argument(
        "--max-features",
        type=cli.positive_int,
        default=FEATURES[-1],
        metavar="N",
        help=f"widest table ({FEATURES[-1]})",
    )
    built.add_argument("--plot", type=Path, metavar="FILE", help="a .png, .svg or .pdf")
    args = built.parse_args()
    names = args.networks.split(",")
    for name in names:
        if name not in SETTINGS:
            raise UnknownName("network", name, SETTINGS)
    if args.plot is not None and (args.plot.suffix not in (".png", ".svg", ".pdf") or not args.plot.parent.is_dir()):
        raise UserError(f"--plot: expected a .png, .svg or .pdf file in an existing folder; found {args.plot}")
    device = start(args)
    rows = [row for name in names for axis in TARGETS for row in series(name, axis, args)]
    publish(rows, args, device)
    if args.plot is not None:
        draw(rows, args.plot)
        print(f"plot: {args.plot}")
    return 0


if __name__ == "__main__":
    cli.run(main)
