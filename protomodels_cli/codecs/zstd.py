"""The bytes of all tensors, sorted into planes (first bytes, second bytes, …) and packed by zstd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from protomodels_cli.codecs.base import Packing
from protomodels_cli.codecs.packing import bytes_of, from_bytes, sizes_of
from protomodels_cli.lazy import lazy_import
from protomodels_cli.protocol.messages import BadMessage

if TYPE_CHECKING:
    import zstandard
    from torch import Tensor

    from protomodels_cli.codecs.base import Layout
else:
    zstandard = lazy_import("zstandard")

LEVEL = 1  # higher ones gain a percent and cost several times the time


class Zstd(Packing):
    name, usage = "zstd", "+zstd"
    help = "all bytes of a message, compressed without loss"

    def pack(self, tensors: Sequence[Tensor]) -> bytes:
        planes = b"".join(bytes_of(p).reshape(-1, p.itemsize).T.tobytes() for p in tensors)
        return zstandard.ZstdCompressor(level=LEVEL).compress(planes)

    def unpack(self, payload: bytes, layout: Layout) -> list[Tensor]:
        planes = _decompressed(payload, sum(sizes_of(layout)))
        pieces, offset = [], 0
        for (_, dtype), size in zip(layout, sizes_of(layout), strict=True):
            plane = np.frombuffer(planes, np.uint8, size, offset).reshape(dtype.itemsize, -1)
            pieces.append(plane.T.tobytes())
            offset += size
        return from_bytes(b"".join(pieces), layout)


def _decompressed(payload: bytes, size: int) -> bytes:
    """Never more than `size`, whatever the payload says of itself."""
    try:
        if zstandard.frame_content_size(payload) != size:
            raise BadMessage(f"a compressed payload that does not have {size} bytes", "size")
        return zstandard.ZstdDecompressor().decompress(payload, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as e:
        raise BadMessage(f"a payload that cannot be decompressed: {e}", "packing") from None


CODECS = (Zstd,)
