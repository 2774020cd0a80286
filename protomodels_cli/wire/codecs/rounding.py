"""Every number, with fewer bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from protomodels_cli.wire.codecs.base import Layout, Slot, narrowed, seed_at, uniform


class Plain:
    """The stage's own numbers."""

    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        return [message]

    def decode(self, parts: Sequence[Tensor], slot: Slot) -> Tensor:
        return parts[0]

    def layout(self, slot: Slot) -> Layout:
        return [(slot.shape, slot.dtype)]


class BF16:
    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        return [narrowed(message).to(torch.bfloat16)]

    def decode(self, parts: Sequence[Tensor], slot: Slot) -> Tensor:
        return parts[0].to(slot.dtype)

    def layout(self, slot: Slot) -> Layout:
        return [(slot.shape, torch.bfloat16)]


class Quantised:
    """8 or 4 bits a number and a bfloat16 scale a token, rounded up so that nothing exceeds the largest level.

    Activations are rounded to nearest. Gradients are rounded up or down at random with the true value as the mean: an
    error that leans one way would add up over the steps.
    """

    def __init__(self, bits: int, seed: int):
        self.bits, self.seed = bits, seed
        self.levels = 2 ** (bits - 1) - 1  # on either side of zero

    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        x = narrowed(message)
        scale = _bf16_not_below(x.abs().amax(-1, keepdim=True) / self.levels)
        quotient = x / torch.where(scale == 0, torch.ones_like(scale), scale).float()
        if slot.key.leg == "backward":
            below = quotient.floor()
            seed = seed_at(self.seed, f"int{self.bits}", slot.key)
            quotient = below + (uniform(seed, quotient.shape, quotient.device) < quotient - below)
        else:
            quotient = quotient.round()
        level = quotient.clamp(-self.levels, self.levels).to(torch.int8)
        return [scale.squeeze(-1), level if self.bits == 8 else _pairs(level)]

    def decode(self, parts: Sequence[Tensor], slot: Slot) -> Tensor:
        scale, level = parts
        if self.bits == 4:
            level = _unpaired(level, slot.shape[-1])
        return (level.float() * scale.float().unsqueeze(-1)).to(slot.dtype)

    def layout(self, slot: Slot) -> Layout:
        *rows, width = slot.shape
        levels = (width, torch.int8) if self.bits == 8 else (-(-width // 2), torch.uint8)
        return [(tuple(rows), torch.bfloat16), ((*rows, levels[0]), levels[1])]


def _bf16_not_below(x: Tensor) -> Tensor:
    """The nearest bfloat16 that is at least x ≥ 0."""
    near = x.to(torch.bfloat16)
    up = (near.view(torch.int16) + 1).view(torch.bfloat16)
    return torch.where(near.float() < x, up, near)


def _pairs(level: Tensor) -> Tensor:
    """Two levels of four bits in a byte; an odd width is filled up."""
    half = torch.nn.functional.pad(level + 8, (0, level.shape[-1] % 2)).to(torch.uint8)
    return half[..., ::2] | half[..., 1::2] << 4


def _unpaired(pairs: Tensor, width: int) -> Tensor:
    halves = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)
    return halves[..., :width].to(torch.int8) - 8
