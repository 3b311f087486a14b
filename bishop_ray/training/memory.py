"""How much memory a training needed at its peak, as the system counts it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

PEAK, GPU_PEAK = "peak_memory_mb", "peak_gpu_memory_mb"
"""Names of a report: resident memory of the training's process, memory that PyTorch held on its GPU; both in MB."""

_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def begin_peaks() -> None:
    """Begins to count anew, since a process trains one trial after the other.

    Linux only: writing 5 sets the peak back to what is resident now
    (https://docs.kernel.org/filesystems/proc.html, "clear_refs").
    """
    import torch

    with suppress(OSError):
        _RESET.write_text("5")
    if _on_gpu():
        torch.cuda.reset_peak_memory_stats()


def peaks() -> dict[str, float]:
    """The peaks in MB since `begin_peaks`; what this system does not tell is not among them.

    Libraries that are loaded count, and so do pages of the shared tables that were read.
    """
    import torch

    found: dict[str, float] = {}
    with suppress(OSError, ValueError, StopIteration):
        # Where the peak cannot be set back it would be an earlier trial's.
        if _can_reset():
            line = next(line for line in _STATUS.read_text("ascii").splitlines() if line.startswith("VmHWM:"))
            found[PEAK] = int(line.split()[1]) * 1024 / 1e6
    if _on_gpu():
        found[GPU_PEAK] = torch.cuda.max_memory_allocated() / 1e6
    return found


def _can_reset() -> bool:
    try:
        with _RESET.open("w"):
            return True
    except OSError:
        return False


def _on_gpu() -> bool:
    """Whether this process has used a GPU; asking for the peak would otherwise wake one."""
    import torch

    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
