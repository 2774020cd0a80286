"""Several codecs one after another, each for an equal share of a run's steps: `eden:3 then eden:5`.

While a model learns fast, what rounding adds is small beside what else is random; when its rate falls, it no longer is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from protomodels_cli.codecs.base import Codec, CodecError, Extent, Slot, Surroundings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from protomodels_cli.codecs.base import Layout

THEN = " then "


@dataclass(frozen=True)
class InTurn(Codec):
    parts: tuple[Codec, ...]

    name, usage = THEN.strip(), f"A{THEN}B"
    help = "A in the first half of the steps and B in the second; three in thirds, and so on"

    @classmethod
    def of(cls, parts: Sequence[Codec]) -> Self:
        for part in parts:
            if part.remembers:
                rule = f"{part} remembers what it sent, which is of no use to another codec"
                raise CodecError(rule, f"write {part} alone, or codecs without feedback around `{cls.name}`")
            if part.uses_positions:
                rule = f"{part} needs the positions of the other leg, which change with a codec"
                raise CodecError(rule, f"write {part} alone")
        return cls(tuple(parts))

    def __str__(self) -> str:
        return THEN.join(map(str, self.parts))

    def contradictions(self, around: Surroundings) -> Iterator[tuple[str, str]]:
        for part in dict.fromkeys(self.parts):
            yield from part.contradictions(around)

    def without_positions(self) -> str:
        return f"in {self} positions change with the codec"

    def message_bytes(self, e: Extent) -> int:
        """In the mean over all steps."""
        return -(-sum(part.message_bytes(e) for part in self.parts) // len(self.parts))

    def first_steps(self, steps: int) -> list[int]:
        return [1 + -(-i * steps // len(self.parts)) for i in range(len(self.parts))]

    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        return self._at(slot).encode(message, slot)

    def decode(self, tensors: Sequence[Tensor], slot: Slot) -> Tensor:
        return self._at(slot).decode(tensors, slot)

    def layout(self, slot: Slot) -> Layout:
        return self._at(slot).layout(slot)

    def poison(self, slot: Slot, device: torch.device) -> Tensor:
        return self._at(slot).poison(slot, device)

    def _at(self, slot: Slot) -> Codec:
        done = min(max(0, slot.key.step - 1), slot.steps - 1)
        return self.parts[done * len(self.parts) // slot.steps]
