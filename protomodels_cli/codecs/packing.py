"""Tensors and token ids to bytes and back. Knows nothing of sockets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from protomodels_cli.lazy import lazy_import
from protomodels_cli.protocol.messages import BadMessage

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from protomodels_cli.codecs.base import Layout
else:
    torch = lazy_import("torch")


def to_bytes(tensors: Sequence[Tensor]) -> bytes:
    return b"".join(bytes_of(p).tobytes() for p in tensors)


def from_bytes(payload: bytes | memoryview, layout: Layout) -> list[Tensor]:
    """The tensors, each in memory of its own: torch aligns it, and unaligned numbers may add up differently."""
    check_size(payload, layout)
    sizes = sizes_of(layout)
    tensors, offset = [], 0
    for (shape, dtype), size in zip(layout, sizes, strict=True):
        raw = torch.empty(size, dtype=torch.uint8)
        raw.numpy()[:] = np.frombuffer(payload, np.uint8, size, offset)
        tensors.append(raw.view(dtype).view(shape))
        offset += size
    return tensors


def check_size(payload: bytes | memoryview, layout: Layout) -> None:
    if len(payload) != (right := sum(sizes_of(layout))):
        raise BadMessage(f"a payload of {len(payload)} bytes instead of {right}", "size")


def bytes_of(part: Tensor) -> np.ndarray:
    return part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def sizes_of(layout: Layout) -> list[int]:
    return [math.prod(shape) * dtype.itemsize for shape, dtype in layout]


def pack_ids(tokens: np.ndarray, width: int) -> bytes:
    """Token ids, little-endian, `width` bytes each."""
    return np.ascontiguousarray(tokens, "<u4").view(np.uint8).reshape(-1, 4)[:, :width].tobytes()


def unpack_ids(payload: bytes, width: int, columns: int, vocab_size: int) -> np.ndarray:
    """Rows of `columns` ids, as int64. Refuses any that the vocabulary does not have."""
    if len(payload) % (width * columns):
        raise BadMessage(f"{len(payload)} bytes of token ids, which are no whole windows of {columns}", "size")
    wide = np.zeros((len(payload) // width, 4), np.uint8)
    wide[:, :width] = np.frombuffer(payload, np.uint8).reshape(-1, width)
    tokens = wide.view("<u4").astype(np.int64).reshape(-1, columns)
    if tokens.size and tokens.max() >= vocab_size:
        raise BadMessage(f"token id {tokens.max()} in a vocabulary of {vocab_size}", "token_id")
    return tokens
