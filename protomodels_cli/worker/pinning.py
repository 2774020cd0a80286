"""Memory of this machine for numbers on their way to and from a CUDA device: pinned, which the device reads and writes
by itself. Containers and WSL2 may allow little of it or none. Knows no messages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from protomodels_cli.errors import first_line
from protomodels_cli.wire.frames import Allocate, ordinary_memory


def _pin(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class HostMemory:
    """Pinned, and ordinary where no more can be pinned: copies then take longer, and nothing fails for it."""

    def __init__(self, tell: Callable[[str], None] = lambda why: None, pin: Callable[[int], Tensor] = _pin):
        """`tell` is given why memory could not be pinned, once. `pin` raises RuntimeError where it cannot."""
        self._tell, self._pin, self._told = tell, pin, False

    def empty(self, size: int) -> Tensor:
        """Room for this many bytes."""
        pinned = self._pinned(size)
        return torch.empty(size, dtype=torch.uint8) if pinned is None else pinned

    def holding(self, tensor: Tensor) -> Tensor:
        """The same numbers, to be uploaded: the tensor itself where its copy cannot be pinned."""
        pinned = self._pinned(tensor.nbytes)
        return tensor if pinned is None else pinned.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def allocate(self, size: int) -> memoryview:
        return self.empty(size).numpy().data

    def _pinned(self, size: int) -> Tensor | None:
        try:
            return self._pin(size)  # also after a failure: what was pinned before may be free again
        except RuntimeError as error:
            if not self._told:
                self._told = True
                self._tell(first_line(error))
            return None


def memory_for(device: torch.device, memory: HostMemory) -> Allocate:
    """Where messages for this device are put together as they come in."""
    return memory.allocate if device.type == "cuda" else ordinary_memory
