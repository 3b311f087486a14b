"""Wall time to the validation score of the authors' code, and the final scores of both sides.

    python jobs/bench/quality.py --data DIR --reference PATH [--datasets qsar_biodeg,seismic_bumps] [--seeds 3]
        [--epochs 15] [--threads N] [--batch-size N] [--lr X] [--time-share X]
        [--cpu-clock] [--json FILE]

DIR holds table files and a manifest.json that names each one's target. The tables are binary classification. Each is
split 70/20/10 by the seed and encoded by our Preprocessor; both sides train on the very same rows, with a network of
d_model 64 and everything else at each side's defaults, which are the same sizes but for our head: its hidden widths
end at 1024. Ours has `shared_start`.

The authors' side is their network in their loop: batches of 32 from a DataLoader, AdamW at 5e-5, gradients clipped at
1, a validation pass after each epoch, no passes over the test rows. Ours is `fit_network` with settings of our own,
until a share of their total time has passed (all of it by default) or patience runs out. Both clocks start before the
first look at the data and stand still while scores are taken that the training itself does not need. The sides follow
each other; seeds are the outer loop.

Columns: best validation AUC of their epochs, its seconds, test AUC of that epoch; seconds until ours is as good on the
validation rows, test AUC there, ratio of seconds; ours after as many epochs and in all its time, test AUC then.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import Row, publish, ratio, start  # isort: skip
from reference import AUTHORS_RATE, Reference, authors_step, load_reference  # isort: skip
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bishop_ray import cli
from bishop_ray.config import TrainConfig
from bishop_ray.data import Preprocessor, Split, Table, TableSpec, TaskType, file_ref, load_dataset, split_dataset
from bishop_ray.errors import BadTable, UnknownName, UserError
from bishop_ray.metrics import evaluate
from bishop_ray.models.bishop.model import BiSHop
from bishop_ray.training.loop import best_device, fit_network
from bishop_ray.training.results import EpochResult

D_MODEL = 64
AUTHORS_BATCH = 32
OURS: dict[str, Any] = {"d_model": D_MODEL, "shared_start": True}
"""Beside these our defaults are the authors' sizes, but for the bound of the head's width."""
NUMBERS = (
    "their val", "their s", "their test", "our s to it", "our test there", "ratio", "our val same epochs", "our val",
    "our s", "our test", "epoch s theirs", "epoch s ours",
)  # fmt: skip


class Clock:
    """Wall time of a training, without what is only done to measure it.

    Args:
        cpu: Processor time of this process in place of wall time: the same with one thread on a free core, and not
            disturbed where others work on the machine.
    """

    def __init__(self, cpu: bool = False) -> None:
        self._now = time.process_time if cpu else time.perf_counter
        self._mark = self._now()

    @contextmanager
    def paused(self) -> Iterator[float]:
        """Seconds since the start, earlier pauses left out; they stand still in this context."""
        seconds = self._now() - self._mark
        yield seconds
        self._mark = self._now() - seconds


@dataclass
class Run:
    """One training, by epoch: seconds since its start and AUC of the validation rows.

    The test rows are scored only where the validation score is a new best one: the epochs that could be chosen.
    """

    seconds: list[float] = field(default_factory=list)
    val: list[float] = field(default_factory=list)
    test: list[float] = field(default_factory=list)

    def note(self, seconds: float, val: float, test: Callable[[], float]) -> None:
        """Takes in an epoch; `test` gives the score of the test rows, if it is asked."""
        best = not self.val or val > max(self.val)
        self.seconds.append(seconds)
        self.val.append(val)
        self.test.append(test() if best else self.test[-1])

    def best(self, epochs: int | None = None) -> int:
        """Position of the first epoch with the best validation score, among the first `epochs`."""
        val = self.val[:epochs]
        return val.index(max(val))

    def reached(self, score: float) -> int | None:
        """Position of the first epoch at least as good as `score`, None if there is none."""
        return next((i for i, val in enumerate(self.val) if val >= score), None)


def load_table(folder: Path, name: str, seed: int) -> tuple[Split[Table], TableSpec]:
    """The encoded parts of a table, and what the networks may know of it.

    Raises:
        UserError: No manifest, no such table in it, or a task that is not binary classification.
    """
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        raise BadTable(f"--data: expected {manifest} with files and targets; found no such file")
    entries = {Path(entry["file"]).stem: entry for entry in json.loads(manifest.read_text("utf-8"))["datasets"]}
    if name not in entries:
        raise UnknownName("table of the manifest", name, entries)
    raw = load_dataset(file_ref(folder / entries[name]["file"], entries[name]["target"], "classification"))
    if raw.task is not TaskType.BINARY:
        raise UserError(f"--datasets: expected tables with two classes; found {raw.task.value} in {name}")
    parts = split_dataset(raw, seed)
    preprocessor = Preprocessor.fit(parts.train, BiSHop.numeric)
    return parts.map(preprocessor.transform), preprocessor.spec


def authors_auc(table: Table, logits: Tensor) -> float:
    """AUC of logits (R, 2), with the metric that our loop selects by."""
    return evaluate("auc", TaskType.BINARY, table.y, logits.softmax(-1).numpy())


def train_authors(
    reference: Reference, parts: Split[Table], spec: TableSpec, seed: int, epochs: int, cpu: bool = False
) -> Run:
    """Their network in their loop (``exp/exp_bishop.py:train``), test passes left out."""
    torch.manual_seed(seed)
    network = reference.build(spec.n_cat, spec.n_num, spec.n_out, best_device(), d_model=D_MODEL)
    run, clock = Run(), Clock(cpu)
    loaders = parts.map(lambda t: TensorDataset(*(torch.tensor(x) for x in (t.x_cat, t.x_num, t.y))))
    batches = DataLoader(loaders.train, batch_size=AUTHORS_BATCH, shuffle=True)
    validation, test = (DataLoader(rows, batch_size=AUTHORS_BATCH) for rows in (loaders.validation, loaders.test))
    if spec.n_num:
        network.get_bins(torch.tensor(parts.train.x_num))  # type: ignore[operator]
    optimizer = torch.optim.AdamW(network.parameters(), lr=AUTHORS_RATE)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, eps=1e-6)
    for _ in range(epochs):
        network.train()
        for batch in batches:
            authors_step(network, optimizer, batch)
        loss, logits = authors_pass(network, validation)
        scheduler.step(loss)
        with clock.paused() as seconds:
            score = authors_auc(parts.validation, logits)
            run.note(seconds, score, lambda: authors_auc(parts.test, authors_pass(network, test)[1]))
    return run


@torch.no_grad()
def authors_pass(network: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> tuple[float, Tensor]:
    """Mean of the batches' losses, as their ``vali`` takes it, and the logits (R, 2) on the way."""
    network.eval()
    device = next(network.parameters()).device
    losses, outputs = [], []
    for x_cat, x_num, y in loader:
        out = network(x_cat.long().to(device), x_num.float().to(device)).cpu()
        losses.append(nn.functional.cross_entropy(out, y).item())
        outputs.append(out)
    return statistics.fmean(losses), torch.cat(outputs)


def train_ours(parts: Split[Table], spec: TableSpec, config: TrainConfig, limit: float, cpu: bool = False) -> Run:
    """Our network in our loop until `limit` seconds have passed, patience runs out, or the last epoch."""
    torch.manual_seed(config.seed)
    network = BiSHop(spec, **OURS)
    run, clock = Run(), Clock(cpu)

    def score() -> float:
        output = network.predict(parts.test.x_num, parts.test.x_cat)
        return evaluate("auc", spec.task, parts.test.y, output)

    def on_epoch(result: EpochResult) -> bool:
        with clock.paused() as seconds:
            if seconds <= limit:
                run.note(seconds, result.val_score, score)
        return seconds >= limit

    fit_network(network, parts.train, parts.validation, config, on_epoch)
    return run


def compare(theirs: Run, ours: Run) -> Row:
    """The columns of `NUMBERS`; None where ours had no epoch that answers."""
    goal = theirs.best()
    row: Row = {
        "their val": theirs.val[goal], "their s": theirs.seconds[goal], "their test": theirs.test[goal],
        "epoch s theirs": theirs.seconds[-1] / len(theirs.val),
    }  # fmt: skip
    if ours.val:
        reached, best, same = ours.reached(theirs.val[goal]), ours.best(), ours.best(len(theirs.val))
        row |= {
            "our val same epochs": ours.val[same], "our val": ours.val[best], "our s": ours.seconds[best],
            "our test": ours.test[best], "epoch s ours": ours.seconds[-1] / len(ours.val),
        }  # fmt: skip
        if reached is not None:
            row |= {"our s to it": ours.seconds[reached], "our test there": ours.test[reached]}
    return row | {"ratio": ratio(row["their s"], row.get("our s to it"))}


def summary(rows: list[Row], name: str) -> Row:
    """Medians over a table's seeds; a seed that never came to the authors' score counts as the worst."""
    own = [row for row in rows if row["dataset"] == name]
    line: Row = {"dataset": name, "seed": f"median of {len(own)}"}
    for column in NUMBERS:
        worst = 0.0 if column == "ratio" else math.inf
        value = statistics.median(worst if row[column] is None else row[column] for row in own)
        line[column] = None if value == worst else value
    return line


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="table files and their manifest.json")
    parser.add_argument("--reference", type=Path, required=True, metavar="PATH", help="a checkout of their release")
    parser.add_argument("--datasets", default="qsar_biodeg,seismic_bumps", metavar="NAMES", help="comma-separated")
    parser.add_argument("--seeds", type=cli.positive_int, default=3, metavar="N", help="of split and training (3)")
    parser.add_argument("--epochs", type=cli.positive_int, default=15, metavar="N", help="of the authors' side (15)")
    parser.add_argument("--threads", type=cli.positive_int, metavar="N", help="CPU threads of PyTorch (its default)")
    parser.add_argument("--batch-size", type=cli.positive_int, default=32, metavar="N", help="ours (32)")
    parser.add_argument("--lr", type=cli.positive_float, default=5e-4, metavar="X", help="ours (5e-4)")
    parser.add_argument(
        "--time-share", type=cli.positive_float, default=1.0, metavar="X", help="of their time, for ours (1)"
    )
    parser.add_argument("--cpu-clock", action="store_true", help="processor time, not wall time (one thread only)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write command, machine, versions and rows here")
    parser.set_defaults(device="auto")
    return parser


def main() -> int:
    """Trains both sides on every table and seed, and prints a row for each, then the medians."""
    args = flags().parse_args()
    if args.cpu_clock and args.threads != 1:
        raise UserError(f"--cpu-clock: expected --threads 1; found {args.threads or 'the default'}")
    names = args.datasets.split(",")
    reference = load_reference(args.reference)
    for name in names:
        load_table(args.data, name, 0)
    device = start(args)
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # the first optimizer imports for seconds; neither side pays
    rows: list[Row] = []
    for seed in range(args.seeds):
        for name in names:
            parts, spec = load_table(args.data, name, seed)
            config = TrainConfig(batch_size=args.batch_size, lr=args.lr, metric="auc", seed=seed)
            theirs = train_authors(reference, parts, spec, seed, args.epochs, args.cpu_clock)
            ours = train_ours(parts, spec, config, args.time_share * theirs.seconds[-1], args.cpu_clock)
            rows.append({"dataset": name, "seed": seed} | {k: compare(theirs, ours).get(k) for k in NUMBERS})
            print(json.dumps(rows[-1]), flush=True)
    publish(rows + [summary(rows, name) for name in names], args, device)
    return 0


if __name__ == "__main__":
    cli.run(main)
