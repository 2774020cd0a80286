"""How long bytes take on a line: headers, TCP's rate under loss, a clock for one way of a connection. Pure."""

from __future__ import annotations

import math

from protomodels_cli.spec.schema import LinkSpec

SEGMENT, HEADERS = 1448, 66  # bytes of a full TCP segment, and what Ethernet, IP and TCP add to it
RECORD, RECORD_HEADERS = 16384, 45  # the same for HTTP/2 and TLS


def segments(payload: int) -> int:
    """TCP segments of a gRPC message."""
    return math.ceil((payload + math.ceil(payload / RECORD) * RECORD_HEADERS) / SEGMENT)


def wire_bytes(payload: int) -> int:
    """What a gRPC message of this size takes on the line."""
    return payload + math.ceil(payload / RECORD) * RECORD_HEADERS + segments(payload) * HEADERS


def reno_rate(link: LinkSpec) -> float:
    """Bits a second that one TCP connection reaches at this loss (Mathis et al. 1997), whatever the line carries."""
    round_trip = max(2 * link.latency_s, 0.001)
    return math.inf if link.loss == 0 else 8 * SEGMENT * math.sqrt(1.5 / link.loss) / round_trip


class Line:
    """One way of a connection: bytes pass one after another. Pure arithmetic on a clock that callers bring."""

    def __init__(self, bits_per_second: float):
        self.rate, self.free_at = bits_per_second, 0.0

    def seconds(self, size: float) -> float:
        return 8 * size / self.rate

    def leave(self, ready: float, size: float) -> float:
        """When `size` bytes that are ready at this time have been sent."""
        self.free_at = max(ready, self.free_at) + self.seconds(size)
        return self.free_at

    def arrive(self, last: float, size: float) -> float:
        """When `size` bytes have arrived, the last of them at `last` or later: other bytes may use the line too."""
        first = max(self.free_at, last - self.seconds(size))
        self.free_at = max(first + self.seconds(size), last)
        return self.free_at
