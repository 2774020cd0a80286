"""T_fixed: the frozen, high-rank part of the embedding, the same bytes on every node.

Entries are ±scale. Only the signs are stored, packed to one bit an entry (V·d/8 bytes); a float row exists
only for the tokens of the microbatch at hand, never the table.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from protomodels_cli import counter

VERSION = 1  # of the way bits are made; part of a sync, so that two ways are never mixed


def packed_signs(vocab_size: int, width: int, seed: int) -> np.ndarray:
    """Row t, bit j (little-endian within a byte): the sign of T_fixed[t, j]. A set bit is +scale."""
    words_per_row = -(-width // 64)
    bits = counter.words(counter.subseed(seed, "t_fixed", VERSION), 0, vocab_size * words_per_row)
    rows = bits.astype("<u8").view(np.uint8).reshape(vocab_size, words_per_row * 8)
    return np.ascontiguousarray(rows[:, : -(-width // 8)])


class TFixed:
    """The table on one device."""

    def __init__(self, vocab_size: int, width: int, scale: float, seed: int, device: torch.device | str = "cpu"):
        self.vocab_size, self.width, self.scale, self.seed = vocab_size, width, scale, seed
        self.signs = torch.from_numpy(packed_signs(vocab_size, width, seed)).to(device)
        self._bit = torch.arange(8, dtype=torch.uint8, device=device)

    def rows(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """T_fixed[tokens], as floats: shape (*tokens.shape, width)."""
        if tokens.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"token ids must be int64 or int32, not {tokens.dtype}: floats cannot hold them exactly")
        packed = self.signs[tokens]  # (…, width/8)
        bits = (packed.unsqueeze(-1) >> self._bit) & 1  # (…, width/8, 8)
        signs = bits.flatten(-2)[..., : self.width].to(dtype)
        return signs.mul_(2 * self.scale).sub_(self.scale)

    def sha256(self) -> str:
        """Hash of the bytes in use, with the scale and version that give them their meaning."""
        digest = hashlib.sha256(f"t_fixed {VERSION} {self.vocab_size} {self.width} {self.scale!r}\n".encode())
        digest.update(self.signs.cpu().numpy().tobytes())
        return digest.hexdigest()
