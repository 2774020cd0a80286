"""EF21: both ends keep A. Send C(x − A), then A ← A + C(x − A), which is what arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protomodels_cli.codecs.base import LARGEST, AtEnds, Extent, Feedback, Remembered, Slot, bounded_sum

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class EF21(Feedback):
    name, usage = "ef21", "+ef21"
    help = "keep A at both ends, send C(x − A), A ← A + C(x − A)"

    def remembered(self, e: Extent) -> Remembered:
        return Remembered({"mirror": e.message}, {"mirror": e.message})

    def staged_bytes(self, e: Extent) -> AtEnds:
        return AtEnds(e.message_bytes, e.message_bytes)

    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        mirror = slot.memory.get("mirror")
        x = message.clamp(-LARGEST, LARGEST)
        tensors = self.inner.encode(x if mirror is None else bounded_sum(x, -mirror), slot)
        self.decode(tensors, slot)
        return tensors

    def decode(self, tensors: Sequence[Tensor], slot: Slot) -> Tensor:
        mirror = bounded_sum(self.inner.decode(tensors, slot), slot.memory.get("mirror"))
        slot.memory.put("mirror", mirror)
        return mirror


CODECS = (EF21,)
