"""Peak bytes of live tensors while a piece of work runs: exact, on any device, independent of the allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Meter(TorchDispatchMode):
    """Tensors that are gone are looked for only where the sum with them would be a new peak: otherwise it is none."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.total = self.peak = 0  # bytes of all that is known; of all that lived at one moment

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                _, before = self.known.get(storage._cdata, (None, 0))
                self.known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.total += storage.nbytes() - before
        if self.total > self.peak:
            self.known = {key: entry for key, entry in self.known.items() if not entry[0].expired()}
            self.total = sum(size for _, size in self.known.values())
            self.peak = max(self.peak, self.total)
        return out


def peak_bytes(work: Callable[[], Any]) -> int:
    """The most that tensors made by `work` occupied at one moment."""
    with _Meter() as meter:
        work()
    return meter.peak
