"""A device without memory left, whatever words torch has for it."""

from __future__ import annotations

import pytest
import torch

from protomodels_cli.wire import troubles as t
from protomodels_cli.worker import device as devices


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of …"),
            "CUDA out of memory. Tried to allocate 2.00 GiB",
        ),
        (RuntimeError("CUDA error: out of memory\nCompile with …"), "CUDA error: out of memory"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`",
        ),
        (
            RuntimeError("DefaultCPUAllocator: not enough memory: you tried"),
            "DefaultCPUAllocator: not enough memory: you tried",
        ),
        (MemoryError(), "MemoryError"),
        (RuntimeError("shapes differ"), None),
        (ValueError("out of memory"), None),
    ],
)
def test_a_device_without_memory_left_is_told_from_other_failures(error, detail):
    found = devices.as_problem(error)
    assert getattr(found, "problem", None) == (None if detail is None else t.OutOfMemory(detail))
    assert detail is not None or found is error
