"""The stage's own numbers, unrounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protomodels_cli.codecs.base import BaseCodec, Extent, Slot

if TYPE_CHECKING:
    from torch import Tensor

    from protomodels_cli.codecs.base import Layout


@dataclass(frozen=True)
class FP32(BaseCodec):
    name = usage = "fp32"
    help = "the stage's own numbers, unrounded"
    exact, coarse = True, False

    def message_bytes(self, e: Extent) -> int:
        return e.message_bytes

    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        return [message]

    def decode(self, tensors: Sequence[Tensor], slot: Slot) -> Tensor:
        return tensors[0]

    def layout(self, slot: Slot) -> Layout:
        return [(slot.shape, slot.dtype)]


CODECS = (FP32,)
