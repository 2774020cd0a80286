"""A message's (tokens × numbers) matrix as the product of two thin ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from protomodels_cli.spec.sizes import lowrank_rank
from protomodels_cli.wire.codecs.base import Layout, Slot, narrowed, seed_at, uniform

ITERATIONS = 2  # of the power iteration; each costs two products with the matrix


class LowRank:
    """M ≈ P·Qᵀ with P orthonormal, by power iteration from a random start; both factors in bfloat16."""

    def __init__(self, rank: int, seed: int):
        self.rank, self.seed = rank, seed

    def encode(self, message: Tensor, slot: Slot) -> list[Tensor]:
        matrix = narrowed(message).flatten(0, -2)
        largest = matrix.abs().amax()
        matrix = matrix / torch.where(largest == 0, torch.ones_like(largest), largest)  # so that no square overflows
        rank = lowrank_rank(self.rank, *matrix.shape)
        right = uniform(seed_at(self.seed, "lowrank", slot.key), (matrix.shape[1], rank), matrix.device) - 0.5
        left = right
        for _ in range(ITERATIONS):
            left = torch.linalg.qr(matrix @ right).Q
            right = matrix.T @ left
        return [left.to(torch.bfloat16), narrowed(right * largest).to(torch.bfloat16)]

    def decode(self, parts: Sequence[Tensor], slot: Slot) -> Tensor:
        left, right = parts
        return narrowed(left.float() @ right.float().T).to(slot.dtype).view(slot.shape)

    def layout(self, slot: Slot) -> Layout:
        tokens, width = math.prod(slot.shape[:-1]), slot.shape[-1]
        rank = lowrank_rank(self.rank, tokens, width)
        return [((tokens, rank), torch.bfloat16), ((width, rank), torch.bfloat16)]
