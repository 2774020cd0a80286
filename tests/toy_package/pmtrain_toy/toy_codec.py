"""`toydelta:GRID`: how a message differs from the one before, in 16 bits on a grid. Both ends keep the last one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protomodels_cli.codecs.base import (
    LARGEST,
    AtEnds,
    BaseCodec,
    CodecError,
    Extent,
    Remembered,
    Slot,
    bounded_sum,
    parse_number,
)
from protomodels_cli.lazy import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from protomodels_cli.codecs.base import Layout
else:
    torch = lazy_import("torch")

MOST = 2**15 - 1


@dataclass(frozen=True)
class Delta(BaseCodec):
    grid: float

    name = "toydelta"
    usage = "toydelta:GRID"
    help = "how a message differs from the last one, in steps of GRID"
    examples = ("toydelta:0.001",)
    remembers = True

    @classmethod
    def parse(cls, parameter: str) -> Delta:
        grid = parse_number(parameter)
        if not 0 < grid <= LARGEST / MOST:
            raise CodecError(f"the grid {parameter!r} is not a small number above 0", f"write {cls.examples[0]}")
        return cls(grid)

    def __str__(self) -> str:
        return f"{self.name}:{self.grid:.12g}"

    def message_bytes(self, e: Extent) -> int:
        return 2 * e.tokens * e.width

    def remembered(self, e: Extent) -> Remembered:
        return Remembered({"last": e.message}, {"last": e.message})

    def staged_bytes(self, e: Extent) -> AtEnds:
        return AtEnds(e.message_bytes, e.message_bytes)

    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        last = slot.memory.get("last")
        change = message if last is None else message - last
        tensors = [(change / self.grid).round().clamp(-MOST, MOST).to(torch.int16)]
        self.decode(tensors, slot)
        return tensors

    def decode(self, tensors: Sequence[Tensor], slot: Slot) -> Tensor:
        last = bounded_sum(tensors[0].to(slot.dtype) * self.grid, slot.memory.get("last"))
        slot.memory.put("last", last)
        return last

    def layout(self, slot: Slot) -> Layout:
        return [(slot.shape, torch.int16)]
