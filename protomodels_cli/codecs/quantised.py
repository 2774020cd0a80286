"""Every number in 8 or 4 bits, and a bfloat16 scale a token, rounded up so that nothing exceeds the largest level.

Activations are rounded to nearest. Gradients are rounded up or down at random with the true value as the mean: an error
that leans one way would add up over the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from protomodels_cli.codecs.base import BaseCodec, Extent, Fused, Slot, narrowed, seed_on, uniform
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
        seed = seed_on(slot, self.name, message.device) if slot.key.leg == "backward" else None
        return list(_quantised(slot, message, self.levels, seed))

    def decode(self, tensors: Sequence[Tensor], slot: Slot) -> Tensor:
        scale, packed = tensors
        return _multiplied(slot, scale, packed, slot.shape[-1], slot.dtype)


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


@Fused
def _quantised(message: Tensor, levels: int, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scales and packed levels; rounded at random where there is a seed."""
    x = narrowed(message)
    scale = _bf16_not_below(x.abs().amax(-1, keepdim=True) / levels)
    quotient = x / torch.where(scale == 0, torch.ones_like(scale), scale).float()
    if seed is None:
        quotient = quotient.round()
    else:
        below = quotient.floor()
        quotient = below + (uniform(seed, quotient.shape, quotient.device) < quotient - below)
    level = quotient.clamp(-levels, levels).to(torch.int8)
    if levels == Int8.levels:
        return scale.squeeze(-1), level
    half = torch.nn.functional.pad(level + 8, (0, level.shape[-1] % 2)).to(torch.uint8)
    return scale.squeeze(-1), half[..., ::2] | half[..., 1::2] << 4


@Fused
def _multiplied(scale: Tensor, packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Levels × scales. Two levels of four bits in a byte are bytes without a sign."""
    level = packed
    if packed.dtype == torch.uint8:
        level = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)[..., :width].to(torch.int8) - 8
    return (level.float() * scale.float().unsqueeze(-1)).to(dtype)


def _bf16_not_below(x: Tensor) -> Tensor:
    """The least bfloat16 that is at least x ≥ 0: the upper half of a float32's bits, plus one if the lower has any.

    In integers, since a compiler may leave out a rounding to bfloat16 and back."""
    return ((x.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


CODECS = (Int8, Int4)
