"""Memory that a device does not have."""

from __future__ import annotations

import torch


def is_out_of_memory(error: Exception) -> bool:
    """Whether the device ran out of memory: CUDA has a type for that, the CPU's allocator a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "not enough memory" in str(error)
