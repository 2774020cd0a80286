"""What every codec is: tensors in, tensors out, as pure functions of the message and its slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from protomodels_cli import counter
from protomodels_cli.protocol.messages import MessageKey

Layout = list[tuple[tuple[int, ...], torch.dtype]]

LARGEST = 2.0**127  # half of what float32 holds: whatever rounds up from here is still a number


@dataclass(frozen=True)
class Slot:
    """What both ends know of a message before it comes."""

    key: MessageKey
    shape: tuple[int, ...]  # (windows, tokens, numbers)
    dtype: torch.dtype
    samples: tuple[str, ...] = ()  # a name for the text of each window, the same whenever it comes back


class Codec(Protocol):
    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        """The parts that travel, on the message's device. The message is finite, and so is what comes out."""
        ...

    def decode(self, parts: Sequence[Tensor], slot: Slot) -> Tensor: ...

    def layout(self, slot: Slot) -> Layout:
        """Shapes and types of the parts: what a receiver expects, to the byte."""
        ...


def narrowed(message: Tensor) -> Tensor:
    """As float32 with room to round up; larger numbers become the largest."""
    return message.clamp(-LARGEST, LARGEST).float()


def uniform(seed: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """Numbers in [0, 1) on a grid of 2⁻²⁴, entry i from word i of the counter's stream: equal on every device."""
    count = 1
    for n in shape:
        count *= n
    return (counter.words_on(seed, count, device) >> 39).view(*shape).float() * 2.0**-24


def seed_at(seed: int, name: str, key: MessageKey) -> int:
    """A stream of random numbers of its own for every message."""
    return counter.subseed(seed, name, key.step, key.microbatch, key.boundary, key.leg)
