"""What predicting one row costs: our forward pass and predictions after loading, against the authors' forward pass.

    python jobs/bench/inference.py [--reference PATH] [--repeats 300] [--threads N] [--device cpu] [--json FILE]

The authors' default configuration on both sides (head unbounded), 8 categorical and 6 numerical columns, two classes.
`network` is the forward pass in evaluation mode without gradients, as theirs; `Network.predict` takes and gives numpy
arrays; `Predictor.predict` takes a DataFrame of one row in the user's own columns and gives a label, and is saved and
loaded before, as a registered model is. Every call is timed alone and waited for; the sides alternate. The Predictor is
left out on CUDA and where pandas is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from harness import Row, interleave, parser, publish, ratio, start
from reference import Reference, load_reference

from bishop_ray import cli
from bishop_ray.data.table import Table, TableSpec, TaskType
from bishop_ray.models.bishop.model import BiSHop

if TYPE_CHECKING:
    import pandas as pd

    from bishop_ray.predictor import Predictor

N_CAT, N_NUM, LEVELS, ROWS = 8, 6, 10, 500
AUTHORS = "authors' network"


def make_table() -> Table:
    """Rows as a Preprocessor encodes them."""
    rng = np.random.default_rng(0)
    x_num = rng.normal(size=(ROWS, N_NUM)).astype(np.float32)
    x_cat = rng.integers(1, LEVELS, size=(ROWS, N_CAT)).astype(np.int64)
    return Table(x_num, x_cat, (x_num[:, 0] + x_cat[:, 0] > 4.5).astype(np.int64))


def make_frame(table: Table) -> pd.DataFrame:
    """The same rows as a user's table: numbers and words."""
    import pandas as pd

    numbers = {f"number {i}": table.x_num[:, i].astype(np.float64) for i in range(N_NUM)}
    words = {f"word {i}": np.char.add("level ", table.x_cat[:, i].astype("U2")) for i in range(N_CAT)}
    return pd.DataFrame(numbers | words)


def loaded_predictor(table: Table, frame: pd.DataFrame) -> Predictor:
    """A predictor with fresh weights, saved and loaded again."""
    import pandas as pd

    from bishop_ray.data.preprocess import Preprocessor
    from bishop_ray.data.table import RawDataset
    from bishop_ray.models import create_model
    from bishop_ray.models.base import Network
    from bishop_ray.predictor import Predictor

    words = tuple(f"word {i}" for i in range(N_CAT))
    target = pd.Series(np.where(table.y == 1, "yes", "no"), name="class")
    raw = RawDataset("rows", frame, target, TaskType.BINARY, words)
    preprocessor = Preprocessor.fit(raw)
    model = create_model("bishop", preprocessor.spec, {"head_max_width": None})
    assert isinstance(model, Network)
    model.observe(preprocessor.transform(raw))
    with tempfile.TemporaryDirectory() as folder:
        Predictor(preprocessor, model, "bishop", {"head_max_width": None}).save(f"{folder}/predictor")
        return Predictor.load(f"{folder}/predictor")


def our_sides(table: Table, device: torch.device) -> dict[str, Callable[[], object]]:
    """Name -> a prediction of the first row."""
    torch.manual_seed(0)
    network = BiSHop(TableSpec(TaskType.BINARY, N_NUM, (LEVELS,) * N_CAT, 2), head_max_width=None)
    network.observe(table)
    network.to(device).eval()
    x_num, x_cat = table.x_num[:1], table.x_cat[:1]
    inputs = (torch.from_numpy(x_num).to(device), torch.from_numpy(x_cat).to(device))

    @torch.no_grad()
    def forward() -> object:
        return network(*inputs)

    return {"network": forward, "Network.predict": lambda: network.predict(x_num, x_cat)}


def their_side(reference: Reference, table: Table, device: torch.device) -> Callable[[], object]:
    """Their prediction of the first row."""
    torch.manual_seed(0)
    network: Any = reference.build(N_CAT, N_NUM, 2, device)
    network.get_bins(torch.from_numpy(table.x_num))
    network.eval()
    x_cat, x_num = torch.from_numpy(table.x_cat[:1]).to(device), torch.from_numpy(table.x_num[:1]).to(device)

    @torch.no_grad()
    def forward() -> object:
        return network(x_cat, x_num)

    return forward


def main() -> int:
    """Measures and prints a table.

    Raises:
        UserError: ``--reference`` is no checkout.
    """
    built = parser(__doc__, repeats=300, reference=True)
    built.set_defaults(device="cpu")
    args = built.parse_args()
    reference = None if args.reference is None else load_reference(args.reference)
    device = start(args)
    publish(measure(args, reference, device), args, device)
    return 0


def measure(args: argparse.Namespace, reference: Reference | None, device: torch.device) -> list[Row]:
    """A row per side, the authors' first."""
    table = make_table()
    sides: dict[str, Callable[[], object]] = {}
    if reference is not None:
        sides[AUTHORS] = their_side(reference, table, device)
    sides |= our_sides(table, device)
    if device.type == "cpu" and importlib.util.find_spec("pandas") is not None:
        frame = make_frame(table)
        predictor, first = loaded_predictor(table, frame), frame.iloc[:1]
        sides["Predictor.predict"] = lambda: predictor.predict(first)
    times = interleave(sides, args.repeats, device, warm_up=10)
    middle = {name: statistics.median(values) for name, values in times.items()}
    slow = {name: statistics.quantiles(values, n=100, method="inclusive")[98] for name, values in times.items()}
    return [
        {
            "side": name,
            "median ms": 1e3 * middle[name],
            "p99 ms": 1e3 * slow[name],
            "median of theirs": ratio(middle[name], middle.get(AUTHORS)),
            "p99 of theirs": ratio(slow[name], slow.get(AUTHORS)),
        }
        for name in sides
    ]


if __name__ == "__main__":
    cli.run(main)
