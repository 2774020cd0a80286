"""Memory that a device does not have."""

from __future__ import annotations

import torch

OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "not enough memory")  # of CUDA, its libraries, the CPU's allocator


def is_out_of_memory(error: Exception) -> bool:
    """Whether the device ran out of memory: torch's allocator for CUDA has a type for that, others a RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
