"""A message's (tokens × numbers) matrix as the product of two thin ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protomodels_cli.codecs.base import BaseCodec, CodecError, Extent, Slot, narrowed, parse_number, seed_at, uniform
from protomodels_cli.lazy import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from protomodels_cli.codecs.base import Layout
else:
    torch = lazy_import("torch")

ITERATIONS = 2  # of the power iteration; each costs two products with the matrix


@dataclass(frozen=True)
class LowRank(BaseCodec):
    """M ≈ P·Qᵀ with P orthonormal, by power iteration from a random start; both factors in bfloat16."""

    rank: int

    name = "lowrank"
    usage = "lowrank:RANK"
    examples = ("lowrank:4",)
    help = "two bfloat16 factors of the microbatch's (tokens × numbers) matrix, by two rounds of power iteration"

    @classmethod
    def parse(cls, parameter: str) -> LowRank:
        rank = parse_number(parameter)
        if not (rank >= 1 and rank == int(rank)):
            rule = f"the rank must be a whole number of at least 1, not {parameter!r}"
            raise CodecError(rule, f"write for example {cls.examples[0]}")
        return cls(int(rank))

    def __str__(self) -> str:
        return f"{self.name}:{self.rank}"

    def message_bytes(self, e: Extent) -> int:
        return 2 * (e.tokens + e.width) * min(self.rank, e.tokens, e.width)

    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        matrix = narrowed(message).flatten(0, -2)
        largest = matrix.abs().amax()
        matrix = matrix / torch.where(largest == 0, torch.ones_like(largest), largest)  # so that no square overflows
        rank = min(self.rank, *matrix.shape)
        right = uniform(seed_at(slot, self.name), (matrix.shape[1], rank), matrix.device) - 0.5
        left = right
        for _ in range(ITERATIONS):
            left = torch.linalg.qr(matrix @ right).Q
            right = matrix.T @ left
        # Row by row, as a receiver has them: QR returns columns, and a product of those may round differently.
        return [part.to(torch.bfloat16).contiguous() for part in (left, narrowed(right * largest))]

    def decode(self, tensors: Sequence[Tensor], slot: Slot) -> Tensor:
        left, right = tensors
        return narrowed(left.float() @ right.float().T).to(slot.dtype).view(slot.shape)

    def layout(self, slot: Slot) -> Layout:
        tokens, width = math.prod(slot.shape[:-1]), slot.shape[-1]
        rank = min(self.rank, tokens, width)
        return [((tokens, rank), torch.bfloat16), ((width, rank), torch.bfloat16)]


CODECS = (LowRank,)
