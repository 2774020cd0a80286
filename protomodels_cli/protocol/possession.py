"""How a peer shows that it has a file which the coordinator has too: a hash of pieces of it that nobody could foresee.

A few kilobytes of whatever size: it takes no time at gigabytes. Who has half of the file passes once in 256 times. That
the bytes are right to the last one is checked where they are used.
"""

from __future__ import annotations

import hashlib
from typing import BinaryIO

PIECES, PIECE = 8, 4096  # so many, of so many bytes each
NONCE = 16  # bytes


def proof(file: BinaryIO, nonce: bytes) -> str:
    """Of the file's size, and of the pieces that the nonce stands for. Raises OSError."""
    size = file.seek(0, 2)
    found = hashlib.sha256(nonce + size.to_bytes(8, "big"))
    for i in range(PIECES):
        at = hashlib.sha256(nonce + bytes([i])).digest()
        file.seek(int.from_bytes(at[:8], "big") % max(1, size))
        found.update(file.read(PIECE))
    return found.hexdigest()
