"""What α-entmax costs, forward and backward: ours, `entmax_bisect` of the entmax package with 50 halvings, and softmax.

    python jobs/bench/entmax.py [--repeats 15] [--threads 1] [--device auto] [--dtype float32] [--json FILE]

The scores are standard normal and α is one learnable number, 1.5 at the start: gradients are taken for both. Shapes are
those of BiSHop's associations. The sides alternate; each timed call is the mean of several. They must agree before the
clock runs. On CUDA the call is timed as Python makes it and, except for bisection, also replayed as a CUDA graph, which
is how a training step meets it: there only the device's own time is left. Without the entmax package its side is left
out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from harness import Row, graphed, interleave, medians, parser, publish, ratio, start
from torch import Tensor

from bishop_ray import cli
from bishop_ray.models.bishop import entmax_triton
from bishop_ray.models.bishop.entmax import entmax

SHAPES = ((10240, 10), (5248, 4), (128, 4, 41, 10))
"""Cells of an encoder level, columns of another, and cells of wide tables: memories along the last axis."""

HALVINGS = 50
"""Of the entmax package and of the authors' code, by default."""

Mapping = Callable[[Tensor, Tensor], Tensor]
"""Scores and α to probabilities along the last axis."""


def find_bisect() -> Mapping | None:
    """`entmax_bisect` of the entmax package, None when it is not installed."""
    try:
        from entmax import entmax_bisect  # type: ignore[attr-defined,unused-ignore]  # mypy takes this file for it
    except ImportError:
        print("entmax_bisect is left out: the entmax package is not installed", flush=True)
        return None
    return lambda scores, alpha: entmax_bisect(scores, alpha, dim=-1, n_iter=HALVINGS)


class Call:
    """One forward and backward pass of `function` on fixed scores; calling it gives (p, d scores, d α)."""

    def __init__(self, function: Mapping, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.function = function
        self.scores = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        self.alpha = torch.tensor(1.5, device=device, requires_grad=True)
        self.upstream = torch.randn(shape, generator=generator).to(device, dtype)

    def __call__(self) -> tuple[Tensor, ...]:
        """Probabilities and both gradients; α's is None where the function has no α."""
        p = self.function(self.scores, self.alpha)
        inputs = (self.scores, self.alpha)
        return p, *torch.autograd.grad(p, inputs, self.upstream, allow_unused=True)


def check(ours: Call, theirs: Call, tolerance: float) -> None:
    """Nothing, if both give the same.

    Raises:
        RuntimeError: They do not, so their times say nothing.
    """
    for name, mine, other in zip(("p", "gradient of scores", "gradient of alpha"), ours(), theirs(), strict=True):
        gap = float((mine.detach().float() - other.detach().float()).abs().max() / other.detach().float().abs().max())
        if not gap <= tolerance:
            raise RuntimeError(f"{name} differs by {gap:.1e} of its size from entmax_bisect's at {list(mine.shape)}")


def measure(
    shape: tuple[int, ...], bisect: Mapping | None, args: argparse.Namespace, device: torch.device
) -> list[Row]:
    """A row for the call, and on CUDA another one for its graph."""
    dtype = getattr(torch, args.dtype)
    calls = {
        "ours": Call(entmax, shape, dtype, device),
        "softmax": Call(lambda s, _: s.softmax(-1), shape, dtype, device),
    }
    if bisect is not None:
        calls["bisect"] = Call(bisect, shape, dtype, device)
        check(calls["ours"], calls["bisect"], 1e-3 if dtype == torch.float32 else 0.05)
    way = "one kernel" if entmax_triton.available(calls["ours"].scores) else "operations of torch"
    print(f"{list(shape)}: ours is {way}", flush=True)
    rows = [_row(shape, args.dtype, "eager", medians(interleave(calls, args.repeats, device, inner=args.inner)))]
    if device.type == "cuda":
        graphs = {name: graphed(calls[name]) for name in ("ours", "softmax")}
        times = medians(interleave(graphs, args.repeats, device, inner=args.inner))
        rows.append(_row(shape, args.dtype, "graph", times))
    return rows


def _row(shape: tuple[int, ...], dtype: str, mode: str, seconds: dict[str, float]) -> Row:
    ours, bisect, softmax = seconds["ours"], seconds.get("bisect"), seconds["softmax"]
    return {
        "shape": " x ".join(map(str, shape)), "dtype": dtype, "mode": mode,
        "bisect us": None if bisect is None else 1e6 * bisect, "ours us": 1e6 * ours, "softmax us": 1e6 * softmax,
        "bisect / ours": ratio(bisect, ours), "ours / softmax": ratio(ours, softmax),
    }  # fmt: skip


def main() -> int:
    """Measures every shape and prints a table."""
    built = parser(__doc__, repeats=15)
    built.add_argument("--inner", type=cli.positive_int, default=10, metavar="N", help="calls within a timed one (10)")
    built.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the scores (float32)")
    args = built.parse_args()
    device = start(args)
    bisect = find_bisect()
    publish([row for shape in SHAPES for row in measure(shape, bisect, args, device)], args, device)
    return 0


if __name__ == "__main__":
    cli.run(main)
