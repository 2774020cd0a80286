"""The largest numbers of every sample, in bfloat16, and where they were."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protomodels_cli.codecs.base import BaseCodec, CodecError, Extent, Slot, Surroundings, narrowed, parse_number
from protomodels_cli.lazy import lazy_import
from protomodels_cli.protocol.messages import BadMessage

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from protomodels_cli.codecs.base import Layout
else:
    torch = lazy_import("torch")

MASK = "mask"
POSITION_BYTES = 8  # of a position in memory


@dataclass(frozen=True)
class TopK(BaseCodec):
    share: float  # of a sample's numbers, those that are sent

    name = "topk"
    usage = f"topk:SHARE, topk:{MASK}"
    examples = ("topk:0.1", "topk:0.6")  # positions as indices, and as a bitmap
    help = (
        "this share of each sample's numbers, the largest, in bfloat16, and their positions; on the backward leg "
        f"`topk:{MASK}` reuses the positions of the microbatch's activations"
    )

    @classmethod
    def parse(cls, parameter: str) -> BaseCodec:
        if parameter == MASK:
            return MaskedTopK()
        share = parse_number(parameter)
        if not 0 < share <= 1:
            rule = f"the share of numbers to send must be above 0 and at most 1, not {parameter!r}"
            raise CodecError(rule, f"write for example {cls.examples[0]}")
        return cls(share)

    def __str__(self) -> str:
        return f"{self.name}:{self.share:.12g}"

    @property
    def offers_positions(self) -> bool:
        return True

    def message_bytes(self, e: Extent) -> int:
        numbers = e.context * e.width
        kept = self._count(numbers)
        return e.windows * (2 * kept + _mark_bytes(kept, numbers))

    def offered_positions(self, e: Extent) -> int:
        return self._count(e.context * e.width)

    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        x = narrowed(message).flatten(1)
        positions = x.abs().topk(self._count(x.shape[1]), dim=1).indices.sort(dim=1).values
        _offer(positions, slot)
        return [x.gather(1, positions).to(torch.bfloat16), _marked(positions, x.shape[1])]

    def decode(self, tensors: Sequence[Tensor], slot: Slot) -> Tensor:
        values, marks = tensors
        positions = _positions(marks, values.shape[1], math.prod(slot.shape[1:]))
        _offer(positions, slot)
        return _spread(values, positions, slot)

    def layout(self, slot: Slot) -> Layout:
        rows, numbers = slot.shape[0], math.prod(slot.shape[1:])
        kept = self._count(numbers)
        return [((rows, kept), torch.bfloat16), ((rows, _mark_bytes(kept, numbers)), torch.uint8)]

    def _count(self, numbers: int) -> int:
        """How many of a sample's numbers are sent."""
        return max(1, round(self.share * numbers))


@dataclass(frozen=True)
class MaskedTopK(BaseCodec):
    """A gradient's numbers at the positions that its microbatch's activations had: both ends know them."""

    name = TopK.name

    def __str__(self) -> str:
        return f"{self.name}:{MASK}"

    def contradictions(self, around: Surroundings) -> Iterator[tuple[str, str]]:
        rule = f"{self} reuses the positions of the activations, and"
        if around.leg == "forward":
            yield f"{rule} this leg carries the activations", "give a share, as in topk:0.1"
        elif not around.other.offers_positions and not around.other.uses_positions:  # its own leg says the latter
            yield (
                f"{rule} {around.other.without_positions()}",
                "give a share, as in topk:0.1, or use topk alone on the forward leg",
            )

    @property
    def uses_positions(self) -> bool:
        return True

    def message_bytes(self, e: Extent) -> int:
        return e.windows * 2 * e.positions

    def in_flight_bytes(self, e: Extent) -> int:
        return POSITION_BYTES * e.windows * e.positions

    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        return [narrowed(message).flatten(1).gather(1, self._positions(slot)).to(torch.bfloat16)]

    def decode(self, tensors: Sequence[Tensor], slot: Slot) -> Tensor:
        return _spread(tensors[0], self._positions(slot), slot)

    def layout(self, slot: Slot) -> Layout:
        return [(tuple(self._positions(slot).shape), torch.bfloat16)]

    def _positions(self, slot: Slot) -> Tensor:
        positions = None if slot.positions is None else slot.positions.get(slot.key.microbatch)
        if positions is None or positions.shape[0] != slot.shape[0]:
            raise BadMessage("a gradient for positions that no activations had", "positions")
        return positions


def _offer(positions: Tensor, slot: Slot) -> None:
    """Keep the positions of a training microbatch's activations for the gradient that reuses them."""
    if slot.positions is not None and slot.key.leg == "forward":
        slot.positions[slot.key.microbatch] = positions


def _mark_bytes(kept: int, numbers: int) -> int:
    """Bytes that say where they were: indices of two bytes or more, or a bit for every number where that is less."""
    width = max(2, -(-(numbers - 1).bit_length() // 8))
    return min(kept * width, -(-numbers // 8))


def _spread(values: Tensor, positions: Tensor, slot: Slot) -> Tensor:
    whole = torch.zeros(slot.shape, dtype=slot.dtype, device=values.device).flatten(1)
    return whole.scatter_(1, positions, values.to(slot.dtype)).view(slot.shape)


def _marked(positions: Tensor, numbers: int) -> Tensor:
    """Where the numbers were, in bytes: a bit for each place, or the places' indices, whichever is shorter."""
    rows, kept = positions.shape
    marks = _mark_bytes(kept, numbers)
    if marks == -(-numbers // 8):
        bits = torch.zeros(rows, 8 * marks, dtype=torch.uint8, device=positions.device).scatter_(1, positions, 1)
        return (bits.view(rows, marks, 8) << _bits(positions.device)).sum(-1, dtype=torch.uint8)
    width = marks // kept
    return torch.stack([positions >> 8 * i & 255 for i in range(width)], -1).to(torch.uint8).view(rows, marks)


def _positions(marks: Tensor, kept: int, numbers: int) -> Tensor:
    """The marked positions in rising order. Refuses marks that no sender makes: they come from outside."""
    rows = marks.shape[0]
    if marks.shape[1] == -(-numbers // 8):
        bits = (marks.unsqueeze(-1) >> _bits(marks.device) & 1).view(rows, -1)
        if not bool((bits.sum(1) == kept).all()) or bool(bits[:, numbers:].any()):
            raise BadMessage(f"positions that are not {kept} of {numbers}", "positions")
        return bits.nonzero()[:, 1].view(rows, kept)
    places = marks.view(rows, kept, -1).long()
    positions = (places << 8 * torch.arange(places.shape[2], device=marks.device)).sum(-1)
    if not bool((positions.diff(dim=1) > 0).all()) or not bool((positions < numbers).all()):
        raise BadMessage(f"positions that are not {kept} of {numbers}", "positions")
    return positions


def _bits(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


CODECS = (TopK,)
