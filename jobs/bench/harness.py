"""What the benchmarks of this folder share: flags, sides in turn, tables, JSON.

Imported by its name, because Python puts a script's own folder into its search path. Needs PyTorch and the standard
library only, so that it also runs on a bare machine with a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bishop_ray import cli
from bishop_ray.errors import UserError
from bishop_ray.tracking.environment import processor

ROOT = Path(__file__).resolve().parents[2]
_HERE = str(Path(__file__).resolve().parent)
if _HERE in sys.path:
    # Last, not first: entmax.py of this folder must not stand before the package of that name.
    sys.path.remove(_HERE)
    sys.path.append(_HERE)


Row = dict[str, Any]
"""One line of a table: column -> text, number or None."""


def parser(doc: str | None, *, repeats: int, reference: bool = False) -> argparse.ArgumentParser:
    """A parser with the flags that benchmarks share.

    Args:
        doc: The benchmark's docstring; all of it is the help.
        repeats: Default of ``--repeats``.
        reference: Whether ``--reference`` is offered.
    """
    built = cli.Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    built.add_argument(
        "--repeats", type=cli.positive_int, default=repeats, metavar="N", help=f"timed calls of each side ({repeats})"
    )
    built.add_argument("--threads", type=cli.positive_int, metavar="N", help="CPU threads of PyTorch (its default)")
    built.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="cuda where there is one (auto)"
    )
    built.add_argument("--json", type=Path, metavar="FILE", help="also write command, machine, versions and rows here")
    if reference:
        built.add_argument("--reference", type=Path, metavar="PATH", help="a checkout of the authors' release")
    return built


def start(args: argparse.Namespace) -> torch.device:
    """The device to measure on; sets the number of threads and prints what this is a measurement of.

    Raises:
        UserError: ``--device cuda`` without one, or a folder of ``--json`` that does not exist.
    """
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise UserError(f"--json: expected a file in an existing folder; found {args.json}")
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: expected a device of this machine; found 'cuda', and PyTorch sees no GPU")
    on_gpu = args.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    print(f"command: {command()}")
    print("; ".join(f"{key} {value}" for key, value in (machine(device) | versions()).items()), flush=True)
    return device


def command() -> str:
    """The command line of this process, as a user types it in the repository's root."""
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(sys.argv[0])
    return shlex.join(["python", str(shown), *sys.argv[1:]])


def machine(device: torch.device) -> dict[str, str]:
    """Processor, its number formats, CPUs, threads, load at the start, and the GPU that is measured."""
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.is_file() else set()
    formats = [flag for flag in ("avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    found = {
        "processor": " ".join([processor(), *formats]),
        "CPUs": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "load": f"{os.getloadavg()[0]:.1f}",
    }
    return found | ({"GPU": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})


def versions() -> dict[str, str]:
    """Versions of what the figures depend on, as far as it is installed."""
    found = {"Python": platform.python_version()}
    for name in ("torch", "triton", "entmax", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleave(
    sides: Mapping[str, Callable[[], object]], repeats: int, device: torch.device, warm_up: int = 2, inner: int = 1
) -> dict[str, list[float]]:
    """Seconds of each call of every side.

    One call of each side in turn, so that what else the machine does meets all alike; every other round in reverse
    order, so that none always follows the same one.

    Args:
        sides: Name -> what is measured.
        repeats: Timed calls of each side.
        device: Waited for before and after each of them.
        warm_up: Rounds before the clock counts.
        inner: Repetitions within a timed call; seconds are of one of them.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for number in range(warm_up + repeats):
        for name in order if number % 2 else reversed(order):
            synchronize(device)
            began = time.perf_counter()
            for _ in range(inner):
                sides[name]()
            synchronize(device)
            if number >= warm_up:
                times[name].append((time.perf_counter() - began) / inner)
    return times


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Name -> median."""
    return {name: statistics.median(values) for name, values in times.items()}


def ratio(slow: float | None, fast: float | None) -> float | None:
    """How many times `fast` fits into `slow`; None where one side was not measured."""
    return None if slow is None or not fast else slow / fast


def graphed(call: Callable[[], object]) -> Callable[[], None]:
    """`call` replayed as a CUDA graph: captured after three calls that let libraries and autograd settle."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def peak_memory(
    step: Callable[[], object],
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    others: Sequence[Tensor] = (),
) -> tuple[int, int]:
    """Bytes at the worst moment of a training step that has been done before, and what of it is more than necessary.

    The first number counts all that is held, the second leaves out weights, buffers and the optimizer's moments. On the
    CPU it is the sum over the profiler's records of allocations, so that libraries' own scratch memory is missing; on
    CUDA the caching allocator's peak.

    Args:
        step: One step.
        network: The network.
        optimizer: Its optimizer.
        device: Where they are.
        others: Tensors beyond these that are held from step to step.
    """
    network.zero_grad(set_to_none=True)  # the profiler does not know the size of what it has not seen allocated
    necessary = [*network.parameters(), *network.buffers(), *_moments(optimizer)]
    kept = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    held = _bytes([*necessary, *kept, *others])
    if device.type == "cuda":
        synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        synchronize(device)
        rise = torch.cuda.max_memory_allocated(device) - before
    else:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes lines of its own
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            step()
        events: Any = recorded.profiler.kineto_results.events()
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        rise = max(accumulate(change for _, change in changes))
    return held + rise, held + rise - _bytes(necessary)


def _moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def publish(rows: Sequence[Row], args: argparse.Namespace, device: torch.device) -> None:
    """Prints `rows` as one Markdown table and writes the file of ``--json``, if asked for."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
    for line in lines:
        print(f"| {' | '.join(line)} |", flush=True)
    if args.json is not None:
        document = {"command": command(), "machine": machine(device), "versions": versions(), "rows": list(rows)}
        args.json.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", "utf-8")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
