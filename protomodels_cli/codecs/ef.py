"""Error feedback: send C(x + e), keep e ← x + e − C(x + e). The receiver remembers nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protomodels_cli.codecs.base import LARGEST, AtEnds, Extent, Feedback, Remembered, Slot, bounded_sum

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class EF(Feedback):
    name, usage = "ef", "+ef"
    help = "send C(x + e), keep e ← x + e − C(x + e) at the sender"

    def remembered(self, e: Extent) -> Remembered:
        return Remembered(sender={"error": e.message})

    def staged_bytes(self, e: Extent) -> AtEnds:
        return AtEnds(sender=e.message_bytes)

    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        whole = bounded_sum(message.clamp(-LARGEST, LARGEST), slot.memory.get("error"))
        tensors = self.inner.encode(whole, slot)
        slot.memory.put("error", whole - self.inner.decode(tensors, slot))
        return tensors

    def decode(self, tensors: Sequence[Tensor], slot: Slot) -> Tensor:
        return self.inner.decode(tensors, slot)


CODECS = (EF,)
