"""T_fixed's bits: the frozen, high-rank part of the embedding, the same bytes on every node.

Entries are ±scale; only their signs are stored, one bit an entry (V·d/8 bytes).
"""

from __future__ import annotations

import hashlib

import numpy as np

from protomodels_cli import counter

VERSION = 1  # of the way bits are made; part of a sync, so that two ways are never mixed


def packed_signs(vocab_size: int, width: int, seed: int) -> np.ndarray:
    """Row t, bit j (little-endian within a byte): the sign of T_fixed[t, j]. A set bit is +scale."""
    words_per_row = -(-width // 64)
    bits = counter.words(counter.subseed(seed, "t_fixed", VERSION), 0, vocab_size * words_per_row)
    rows = bits.astype("<u8").view(np.uint8).reshape(vocab_size, words_per_row * 8)
    return np.ascontiguousarray(rows[:, : -(-width // 8)])


def t_fixed_sha256(signs: np.ndarray, width: int, scale: float) -> str:
    """Hash of a table's bytes, with the scale and version that give them their meaning."""
    digest = hashlib.sha256(f"t_fixed {VERSION} {len(signs)} {width} {scale!r}\n".encode())
    digest.update(signs.tobytes())
    return digest.hexdigest()
