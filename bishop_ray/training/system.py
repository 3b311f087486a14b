"""Memory, disk and GPUs of this machine as a training meets them."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bishop_ray.errors import StorageFull


def smallest_gpu() -> int:
    """Bytes of the smallest GPU that this process sees, 0 without any."""
    import torch

    if not torch.cuda.is_available():
        return 0
    return min(int(torch.cuda.get_device_properties(i).total_memory) for i in range(torch.cuda.device_count()))


FULL = (errno.ENOSPC, errno.EDQUOT)
_WORDS = (
    "No space left on device", "no space left to write", "Disk quota exceeded", "disk is full", "os error 28",
    "os error 122",
)  # fmt: skip


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, says that a disk or a quota is full.

    Libraries of other languages and processes hand over the text only (safetensors, SQLite, Ray).
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        if any(words in str(error) for words in _WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def as_storage_full(place: str) -> Iterator[None]:
    """Whatever fails within for want of space is a `StorageFull` that names `place`.

    Raises:
        StorageFull: No space is left.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, StorageFull) or not is_full(error):
            raise
        raise StorageFull(place) from error


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
