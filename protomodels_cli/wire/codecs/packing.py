"""Parts to bytes and back; token ids too. Nothing here knows sockets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from protomodels_cli.protocol.messages import BadMessage
from protomodels_cli.wire.codecs.base import Layout

ZSTD_LEVEL = 1  # higher ones gain a percent and cost several times the time


def to_bytes(parts: Sequence[Tensor], zstd: bool = False) -> bytes:
    raw = [_bytes_of(p) for p in parts]
    if not zstd:
        return b"".join(r.tobytes() for r in raw)
    import zstandard

    planes = b"".join(r.reshape(-1, p.itemsize).T.tobytes() for r, p in zip(raw, parts, strict=True))
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(planes)


def from_bytes(payload: bytes, layout: Layout, zstd: bool = False) -> list[Tensor]:
    """The parts, each in memory of its own: torch aligns it, and unaligned numbers may add up differently."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in layout]
    if zstd:
        payload = _decompressed(payload, sum(sizes))
    if sum(sizes) != len(payload):
        raise BadMessage(f"a payload of {len(payload)} bytes where {sum(sizes)} belong")
    parts, offset = [], 0
    for (shape, dtype), size in zip(layout, sizes, strict=True):
        raw = torch.empty(size, dtype=torch.uint8)
        there, here = raw.numpy(), np.frombuffer(payload, np.uint8, size, offset)
        if zstd:
            there.reshape(-1, dtype.itemsize)[:] = here.reshape(dtype.itemsize, -1).T
        else:
            there[:] = here
        parts.append(raw.view(dtype).view(shape))
        offset += size
    return parts


def _bytes_of(part: Tensor) -> np.ndarray:
    return part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def _decompressed(payload: bytes, size: int) -> bytes:
    """Never more than `size`, whatever the payload says of itself."""
    import zstandard

    try:
        if zstandard.frame_content_size(payload) != size:
            raise BadMessage(f"a packed payload that is not of {size} bytes")
        return zstandard.ZstdDecompressor().decompress(payload, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as e:
        raise BadMessage(f"a payload that does not unpack: {e}") from None


def pack_ids(tokens: np.ndarray, width: int) -> bytes:
    """Token ids, little-endian, `width` bytes each."""
    return np.ascontiguousarray(tokens, "<u4").view(np.uint8).reshape(-1, 4)[:, :width].tobytes()


def unpack_ids(payload: bytes, width: int, columns: int, vocab_size: int) -> np.ndarray:
    """Rows of `columns` ids, as int64. Refuses any that the vocabulary does not have."""
    if len(payload) % (width * columns):
        raise BadMessage(f"{len(payload)} bytes of token ids are no whole windows of {columns}")
    wide = np.zeros((len(payload) // width, 4), np.uint8)
    wide[:, :width] = np.frombuffer(payload, np.uint8).reshape(-1, width)
    tokens = wide.view("<u4").astype(np.int64).reshape(-1, columns)
    if tokens.size and tokens.max() >= vocab_size:
        raise BadMessage(f"token id {tokens.max()} where the vocabulary has {vocab_size}")
    return tokens
