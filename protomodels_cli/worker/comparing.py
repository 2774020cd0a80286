"""A message that a stage sent, beside the numbers that it should have been made from. Pure: tensors in, a count out.

Honest machines round differently, and a codec makes a step of what was hardly apart: decoded numbers cannot be held
against each other one by one. So the recomputed numbers are moved by as much as honest arithmetic moves them, several
times, and each time go through the codec with the message's own random numbers: what was sent must lie among what comes
out. It must not know any codec by name.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from protomodels_cli.codecs import End
from protomodels_cli.codecs.base import Slot
from protomodels_cli.protocol.audit import Compared
from protomodels_cli.protocol.messages import BadMessage

DRAWS = 64
WIDER = 2.0  # than honest noise: what was sent is one draw more, and must not lie outside by chance
LARGE = 1e15  # where another machine's numbers may be no numbers any more: nobody lies who says so
SMALL = 0.1  # of a message's root mean square: a token with less than this has the noise of one with this


def compare(end: End, slot: Slot, right: Tensor, sent: bytes | memoryview | None, noise: float) -> Compared:
    """`end`: as it was before the message was encoded; `right`: the recomputed numbers; `sent`: what went out."""
    numbers, device = right.numel(), right.device
    if not bool(torch.isfinite(right).all()):  # a step that is skipped
        return Compared(slot.key.leg, numbers, 0)
    if sent is None and float(right.abs().max()) > LARGE:
        return Compared(slot.key.leg, numbers, 0)
    try:
        found = end.twin().unpack(sent, slot, device)
    except BadMessage:
        return Compared(slot.key.leg, numbers, numbers)
    return Compared(slot.key.leg, *outside(right, found, lambda moved: _crossed(end, moved, slot), noise))


def outside(right: Tensor, found: Tensor, cross: Callable[[Tensor], Tensor], noise: float) -> tuple[int, int]:
    """How many numbers travelled (a codec may leave out most), and how many of those that were found lie outside what
    `right` becomes on its way."""
    size = right.double().square().mean(-1, keepdim=True).sqrt()
    size = torch.maximum(size, SMALL * right.double().square().mean().sqrt()).to(right.dtype)
    draw = torch.Generator().manual_seed(0)
    low = high = cross(right)
    for _ in range(DRAWS):
        moves = torch.randn(right.shape, generator=draw, dtype=torch.float32).to(right)
        crossed = cross(right + WIDER * noise * size * moves)
        low, high = torch.minimum(low, crossed), torch.maximum(high, crossed)
    room = 2 * WIDER * noise * size
    is_wild = (found < low - room) | (found > high + room) | ~torch.isfinite(found)
    return int(((low != 0) | (high != 0) | (found != 0)).sum()), int(is_wild.sum())


def _crossed(end: End, message: Tensor, slot: Slot) -> Tensor:
    sender, receiver = end.twin(), end.twin()
    return receiver.decode(sender.encode(message, slot), slot, message.device)
