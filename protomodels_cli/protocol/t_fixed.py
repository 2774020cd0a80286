"""T_fixed's bits: the frozen, high-rank part of the embedding, the same bytes on every node.

Entries are ±scale; only their signs are stored, one bit an entry (V·d/8 bytes).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

from protomodels_cli import counter

VERSION = 1  # of the way bits are made; part of a sync, so that two ways are never mixed
_BLOCK = 1 << 20  # bytes made at once


def packed_signs(vocab_size: int, width: int, seed: int) -> np.ndarray:
    """Row t, bit j (little-endian within a byte): the sign of T_fixed[t, j]. A set bit is +scale."""
    return np.concatenate([*sign_blocks(vocab_size, width, seed)])


def sign_blocks(vocab_size: int, width: int, seed: int) -> Iterator[np.ndarray]:
    """The signs some rows at a time: whoever only hashes them never has the whole table."""
    stream, words_per_row = counter.subseed(seed, "t_fixed", VERSION), -(-width // 64)
    at_once = max(1, _BLOCK // (words_per_row * 8))
    for first in range(0, vocab_size, at_once):
        rows = min(at_once, vocab_size - first)
        bits = counter.words(stream, first * words_per_row, rows * words_per_row)
        block = bits.astype("<u8").view(np.uint8).reshape(rows, words_per_row * 8)
        yield np.ascontiguousarray(block[:, : -(-width // 8)])


def t_fixed_sha256(blocks: Iterable[np.ndarray], vocab_size: int, width: int, scale: float) -> str:
    """Hash of a table's bytes, with the scale and version that give them their meaning."""
    digest = hashlib.sha256(f"t_fixed {VERSION} {vocab_size} {width} {scale!r}\n".encode())
    for block in blocks:
        digest.update(block.data)
    return digest.hexdigest()
