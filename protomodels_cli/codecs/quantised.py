"""Every number in 8 or 4 bits, and a bfloat16 scale a token, rounded up so that nothing exceeds the largest level.

Activations are rounded to nearest. Gradients are rounded up or down at random with the true value as the mean: an error
that leans one way would add up over the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from protomodels_cli.codecs.base import BaseCodec, Extent, Slot, narrowed, seed_at, uniform
from protomodels_cli.lazy import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from protomodels_cli.codecs.base import Layout
else:
    torch = lazy_import("torch")


class Quantised(BaseCodec):
    levels: ClassVar[int]  # on either side of zero

    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        x = narrowed(message)
        scale = _bf16_not_below(x.abs().amax(-1, keepdim=True) / self.levels)
        quotient = x / torch.where(scale == 0, torch.ones_like(scale), scale).float()
        if slot.key.leg == "backward":
            below = quotient.floor()
            chance = uniform(seed_at(slot, self.name), quotient.shape, quotient.device)
            quotient = below + (chance < quotient - below)
        else:
            quotient = quotient.round()
        return [scale.squeeze(-1), self._packed(quotient.clamp(-self.levels, self.levels).to(torch.int8))]

    def decode(self, tensors: Sequence[Tensor], slot: Slot) -> Tensor:
        scale, packed = tensors
        return (self._levels(packed, slot.shape[-1]).float() * scale.float().unsqueeze(-1)).to(slot.dtype)

    def _packed(self, level: Tensor) -> Tensor:
        return level

    def _levels(self, packed: Tensor, width: int) -> Tensor:
        return packed


@dataclass(frozen=True)
class Int8(Quantised):
    name = usage = "int8"
    help = "one byte per number and one bfloat16 scale per token; gradients are rounded stochastically, without bias"
    coarse = False
    levels = 127

    def message_bytes(self, e: Extent) -> int:
        return e.tokens * (e.width + 2)

    def layout(self, slot: Slot) -> Layout:
        return [(slot.shape[:-1], torch.bfloat16), (slot.shape, torch.int8)]


@dataclass(frozen=True)
class Int4(Quantised):
    """Two levels of four bits in a byte; an odd width is filled up."""

    name = usage = "int4"
    help = "two numbers per byte, otherwise as int8"
    levels = 7

    def message_bytes(self, e: Extent) -> int:
        return e.tokens * (-(-e.width // 2) + 2)

    def layout(self, slot: Slot) -> Layout:
        *rows, width = slot.shape
        return [(tuple(rows), torch.bfloat16), ((*rows, -(-width // 2)), torch.uint8)]

    def _packed(self, level: Tensor) -> Tensor:
        half = torch.nn.functional.pad(level + 8, (0, level.shape[-1] % 2)).to(torch.uint8)
        return half[..., ::2] | half[..., 1::2] << 4

    def _levels(self, packed: Tensor, width: int) -> Tensor:
        halves = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
        return halves[..., :width].to(torch.int8) - 8


def _bf16_not_below(x: Tensor) -> Tensor:
    """The nearest bfloat16 that is at least x ≥ 0."""
    near = x.to(torch.bfloat16)
    up = (near.view(torch.int16) + 1).view(torch.bfloat16)
    return torch.where(near.float() < x, up, near)


CODECS = (Int8, Int4)
