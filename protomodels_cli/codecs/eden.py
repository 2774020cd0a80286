"""EDEN (Vargaftik et al. 2022): every token rotated at random, then each number in 1 to 6 bits, and a bfloat16 scale.

Numbers that were rotated are nearly normal whatever they were before, so that the best levels are known beforehand:
those of Lloyd and Max. Activations get the scale of least error. Gradients get the one that leaves no lean, and another
rotation in every message: an error that leans one way would add up over the steps.

Both ends restore the same numbers bit for bit, on any pair of devices, as feedback needs it: levels are looked up and
added, in a fixed order, and multiplied only at the very end. A compiler may put a product and a sum behind it into one
rounding, but there is no such sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from protomodels_cli import counter
from protomodels_cli.codecs.base import (
    LARGEST,
    BaseCodec,
    CodecError,
    Extent,
    Fused,
    Slot,
    narrowed,
    parse_number,
    seed_on,
)
from protomodels_cli.lazy import lazy_import
from protomodels_cli.protocol.messages import MessageKey

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from protomodels_cli.codecs.base import Layout
else:
    torch = lazy_import("torch")


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


# By bits: the levels above zero that have the least squared error for a standard normal; as many are below it.
LEVELS = {
    1: (0.797884561,),
    2: (0.452780035, 1.510417608),
    3: (0.245094179, 0.756005281, 1.343909279, 2.151945705),
    4: (0.128395030, 0.388048299, 0.656759119, 0.942340456, 1.256231197, 1.618046386, 2.069017227, 2.732589571),
    5: _numbers("""
        0.065889660 0.198051830 0.331378306 0.466699523 0.604933624 0.747135704 0.894565117 1.048783320
        1.211804381 1.386340340 1.576228079 1.787233218 2.028728399 2.317739404 2.691119577 3.260732493
    """),
    6: _numbers("""
        0.033409506 0.100278289 0.167296903 0.234566985 0.302192846 0.370282645 0.438949672 0.508313781
        0.578503031 0.649655581 0.721921941 0.795467656 0.870476587 0.947154945 1.025736349 1.106488240
        1.189720142 1.275794486 1.365141020 1.458276375 1.555831225 1.658588900 1.767541883 1.883977241
        2.009611043 2.146810217 2.298981210 2.471304798 2.672273835 2.917406791 3.240437055 3.744101271
    """),
}
GROUP = 8  # codes that fill whole bytes, whatever their bits
SMALLEST = 2.0**-126  # of float32's normal numbers: devices differ in what they do below it


@dataclass(frozen=True)
class Eden(BaseCodec):
    bits: int  # of a number

    name = "eden"
    usage = "eden:BITS"
    examples = ("eden:4", "eden:3")  # codes that fill bytes, and codes that cross them
    help = (
        "each token rotated at random, then 1 to 6 bits per number and one bfloat16 scale per token; gradients "
        "are rounded without bias"
    )

    @classmethod
    def parse(cls, parameter: str) -> Eden:
        bits = parse_number(parameter)
        if bits not in LEVELS:
            rule = f"the bits per number must be 1 to 6, not {parameter!r}"
            raise CodecError(rule, f"write for example {cls.examples[0]}")
        return cls(int(bits))

    def __str__(self) -> str:
        return f"{self.name}:{self.bits}"

    def message_bytes(self, e: Extent) -> int:
        return 2 * e.tokens + self._code_bytes(e.tokens * e.width)

    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        noise = None
        if slot.key.leg == "backward":
            noise = _noise(slot, seed_on(slot, f"{self.name}/scale", message.device), math.prod(slot.shape[:-1]))
        return list(_quantised(slot, message, self.bits, _signs(slot, *_drawn(slot, message.device)), noise))

    def decode(self, tensors: Sequence[Tensor], slot: Slot) -> Tensor:
        scale, packed = tensors
        signs = _signs(slot, *_drawn(slot, scale.device))
        return _restored(slot, scale, packed, self.bits, signs, slot.shape, slot.dtype)

    def layout(self, slot: Slot) -> Layout:
        size = self._code_bytes(math.prod(slot.shape))
        return [(slot.shape[:-1], torch.bfloat16), ((size,), torch.uint8)]

    def _code_bytes(self, numbers: int) -> int:
        return self.bits * -(-numbers // GROUP)


def _drawn(slot: Slot, device: torch.device) -> tuple[Tensor, int]:
    """What a rotation is drawn from. A gradient's message has its own. The activations over a boundary share one, those
    of evaluation too: a model is measured with the rounding that it was trained with."""
    if slot.key.leg != "backward":
        slot = replace(slot, key=MessageKey(0, 0, slot.key.boundary, "forward"))
    return seed_on(slot, Eden.name, device), slot.shape[-1]


@Fused
def _quantised(message: Tensor, bits: int, signs: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scales and packed codes; without bias where there is noise. A token all of whose numbers are smaller than normal
    is a zero vector: its scale is 0."""
    x = narrowed(message)
    largest = x.abs().amax(-1, keepdim=True)
    is_zero = largest < SMALLEST
    y = _rotated(x / torch.where(is_zero, 1.0, largest), signs)  # divided, so that no square overflows
    deviation = (y * y).mean(-1, keepdim=True).sqrt()
    z = y / torch.where(is_zero, 1.0, deviation)
    code = _code(z, bits)
    level = _looked_up(code, bits)
    fit = (z * level).sum(-1)
    ratio = (z * z).sum(-1) / fit if noise is not None else fit / (level * level).sum(-1)
    whole = (ratio * (deviation * largest).squeeze(-1)).clamp(max=LARGEST)
    scale = torch.where(is_zero.squeeze(-1), 0.0, whole)
    # A bfloat16 is the upper half of a float32's bits: what is added to the lower rounds to nearest, or at random.
    dither = 1 << 15 if noise is None else noise.view(scale.shape)
    return ((scale.view(torch.int32) + dither) >> 16).to(torch.int16).view(torch.bfloat16), _packed(code, bits)


@Fused
def _restored(
    scale: Tensor, packed: Tensor, bits: int, signs: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """`_rotated` backwards. What should be divided by the root of a block's size is not, until there is nothing more to
    add: what joins it without being rotated is taken that much larger."""
    block, rest = _block(shape[-1])
    code = _unpacked(packed, bits, math.prod(shape)).view(shape)
    factor = scale.float().unsqueeze(-1)
    if not rest:
        message = _transformed(_looked_up(code, bits)) * signs[0] * (factor * block**-0.5)
    else:
        last = _transformed(_looked_up(code[..., rest:], bits)) * signs[1]
        whole = torch.cat([_looked_up(code[..., :rest], bits, block**0.5), last], -1)
        first = _transformed(whole[..., :block]) * signs[0]
        message = torch.cat([first * (factor / block), whole[..., block:] * (factor * block**-0.5)], -1)
    return narrowed(message).to(dtype)


def _block(width: int) -> tuple[int, int]:
    """The largest power of two in a width, and what is left."""
    block = 1 << width.bit_length() - 1
    return block, width - block


@Fused
def _signs(seed: Tensor, width: int) -> Tensor:
    """Of every block's numbers. Not made where they are used: a compiler would make them anew for each token."""
    block, rest = _block(width)
    blocks = 2 if rest else 1
    return 1.0 - 2.0 * (counter.words_on(seed, blocks * block, seed.device) >> 62).view(blocks, block).float()


@Fused
def _noise(seed: Tensor, tokens: int) -> Tensor:
    """16 bits for each token's scale."""
    return (counter.words_on(seed, tokens, seed.device) >> 47).to(torch.int32)


def _rotated(x: Tensor, signs: Tensor) -> Tensor:
    """The first numbers, then the last, as many each time as the largest power of two: the two overlap. Every number is
    rotated and none is added, and what is large in either block spreads to the other."""
    block, rest = _block(x.shape[-1])
    first = _transformed(x[..., :block] * signs[0]) * block**-0.5
    if not rest:
        return first
    last = _transformed(torch.cat([first[..., rest:], x[..., block:]], -1) * signs[1]) * block**-0.5
    return torch.cat([first[..., :rest], last], -1)


def _transformed(x: Tensor) -> Tensor:
    """The Walsh–Hadamard transform, not normalised, by sums alone: the same on every device and in every shape."""
    both = 1.0 - 2.0 * torch.arange(2, device=x.device).unsqueeze(-1)  # of what is added, and of what is taken off
    for _ in range(x.shape[-1].bit_length() - 1):
        x = torch.addcmul(x[..., None, ::2], x[..., None, 1::2], both).flatten(-2)
    return x


def _code(z: Tensor, bits: int) -> Tensor:
    """The number of the nearest level: by magnitude, those above zero first."""
    levels = LEVELS[bits]
    code = (z < 0).to(torch.uint8) * len(levels)
    magnitude = z.abs()
    for below, above in pairwise(levels):
        code = code + (magnitude > (below + above) / 2)
    return code


def _looked_up(code: Tensor, bits: int, factor: float = 1.0) -> Tensor:
    """Levels by their code, each multiplied by the factor before it is rounded to float32."""
    codes = torch.arange(1 << bits, device=code.device)
    table = torch.zeros(codes.shape, device=code.device)  # made there: to send a few numbers to a GPU is to wait for it
    for i, level in enumerate((*LEVELS[bits], *(-level for level in LEVELS[bits]))):
        table = torch.where(codes == i, level * factor, table)
    return table.index_select(0, code.flatten().int()).view(code.shape)


def _packed(code: Tensor, bits: int) -> Tensor:
    """The bits of all codes one after another, the lowest first."""
    flat = code.flatten().long()
    groups = torch.nn.functional.pad(flat, (0, -flat.numel() % GROUP)).view(-1, GROUP)
    words = (groups << _steps(GROUP, bits, code.device)).sum(-1, keepdim=True)
    return (words >> _steps(bits, 8, code.device) & 255).to(torch.uint8).flatten()


def _unpacked(packed: Tensor, bits: int, count: int) -> Tensor:
    words = (packed.view(-1, bits).long() << _steps(bits, 8, packed.device)).sum(-1, keepdim=True)
    return (words >> _steps(GROUP, bits, packed.device) & (1 << bits) - 1).flatten()[:count]


def _steps(count: int, step: int, device: torch.device) -> Tensor:
    return torch.arange(0, count * step, step, device=device)


CODECS = (Eden,)
