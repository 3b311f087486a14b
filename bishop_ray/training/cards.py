"""What the GPUs of this machine are like."""

from __future__ import annotations


def smallest_gpu() -> int:
    """Bytes of the smallest GPU that this process sees, 0 without any."""
    import torch

    if not torch.cuda.is_available():
        return 0
    return min(int(torch.cuda.get_device_properties(i).total_memory) for i in range(torch.cuda.device_count()))
