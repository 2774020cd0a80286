"""The largest numbers of every sample, in bfloat16, and where they were."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from protomodels_cli.protocol.messages import BadMessage
from protomodels_cli.spec.sizes import topk_kept, topk_marks
from protomodels_cli.wire.codecs.base import Layout, Slot, narrowed

Seen = dict[int, Tensor]  # a microbatch's positions, between its forward and its backward


class TopK:
    """`seen` is given the positions of each training microbatch's activations, for a gradient that uses them again."""

    def __init__(self, share: float, seen: Seen | None = None):
        self.share, self.seen = share, seen

    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        x = narrowed(message).flatten(1)
        positions = x.abs().topk(topk_kept(self.share, x.shape[1]), dim=1).indices.sort(dim=1).values
        self._remember(positions, slot)
        return [x.gather(1, positions).to(torch.bfloat16), _marked(positions, x.shape[1])]

    def decode(self, parts: Sequence[Tensor], slot: Slot) -> Tensor:
        values, marks = parts
        positions = _positions(marks, values.shape[1], math.prod(slot.shape[1:]))
        self._remember(positions, slot)
        return _spread(values, positions, slot)

    def layout(self, slot: Slot) -> Layout:
        rows, numbers = slot.shape[0], math.prod(slot.shape[1:])
        kept = topk_kept(self.share, numbers)
        return [((rows, kept), torch.bfloat16), ((rows, topk_marks(kept, numbers)), torch.uint8)]

    def _remember(self, positions: Tensor, slot: Slot) -> None:
        if self.seen is not None and slot.key.leg == "forward":
            self.seen[slot.key.microbatch] = positions


class MaskedTopK:
    """A gradient's numbers at the positions that its microbatch's activations had: both ends know them."""

    def __init__(self, seen: Seen):
        self.seen = seen

    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        return [narrowed(message).flatten(1).gather(1, self._positions(slot)).to(torch.bfloat16)]

    def decode(self, parts: Sequence[Tensor], slot: Slot) -> Tensor:
        return _spread(parts[0], self._positions(slot), slot)

    def layout(self, slot: Slot) -> Layout:
        return [(tuple(self._positions(slot).shape), torch.bfloat16)]

    def _positions(self, slot: Slot) -> Tensor:
        positions = self.seen.get(slot.key.microbatch)
        if positions is None or positions.shape[0] != slot.shape[0]:
            raise BadMessage("a gradient at positions that were never sent")
        return positions


def _spread(values: Tensor, positions: Tensor, slot: Slot) -> Tensor:
    whole = torch.zeros(slot.shape, dtype=slot.dtype, device=values.device).flatten(1)
    return whole.scatter_(1, positions, values.to(slot.dtype)).view(slot.shape)


def _marked(positions: Tensor, numbers: int) -> Tensor:
    """Where the numbers were, in bytes: a bit for each place, or the places' indices, whichever is shorter."""
    rows, kept = positions.shape
    marks = topk_marks(kept, numbers)
    if marks == -(-numbers // 8):
        bits = torch.zeros(rows, 8 * marks, dtype=torch.uint8, device=positions.device).scatter_(1, positions, 1)
        return (bits.view(rows, marks, 8) << _bits(positions.device)).sum(-1, dtype=torch.uint8)
    width = marks // kept
    return torch.stack([positions >> 8 * i & 255 for i in range(width)], -1).to(torch.uint8).view(rows, marks)


def _positions(marks: Tensor, kept: int, numbers: int) -> Tensor:
    """In rising order. Refuses marks that no sender makes: they come from outside."""
    rows = marks.shape[0]
    if marks.shape[1] == -(-numbers // 8):
        bits = (marks.unsqueeze(-1) >> _bits(marks.device) & 1).view(rows, -1)
        if not bool((bits.sum(1) == kept).all()) or bool(bits[:, numbers:].any()):
            raise BadMessage(f"positions that are not {kept} of {numbers}")
        return bits.nonzero()[:, 1].view(rows, kept)
    places = marks.view(rows, kept, -1).long()
    positions = (places << 8 * torch.arange(places.shape[2], device=marks.device)).sum(-1)
    if not bool((positions.diff(dim=1) > 0).all()) or not bool((positions < numbers).all()):
        raise BadMessage(f"positions that are not {kept} of {numbers}")
    return positions


def _bits(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
