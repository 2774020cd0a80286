"""Every number in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protomodels_cli.codecs.base import BaseCodec, Extent, Slot, narrowed
from protomodels_cli.lazy import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from protomodels_cli.codecs.base import Layout
else:
    torch = lazy_import("torch")


@dataclass(frozen=True)
class BF16(BaseCodec):
    name = usage = "bf16"
    help = "rounded to nearest"
    coarse = False

    def message_bytes(self, e: Extent) -> int:
        return e.tokens * e.width * 2

    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        return [narrowed(message).to(torch.bfloat16)]

    def decode(self, tensors: Sequence[Tensor], slot: Slot) -> Tensor:
        return tensors[0].to(slot.dtype)

    def layout(self, slot: Slot) -> Layout:
        return [(slot.shape, torch.bfloat16)]


CODECS = (BF16,)
