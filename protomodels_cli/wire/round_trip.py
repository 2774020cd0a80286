"""The round trip that the system has measured on a TCP connection, while it carried whatever it carried."""

from __future__ import annotations

import socket
import struct
import sys

_AT, _SIZE = 68, 104  # of tcpi_rtt, in microseconds, in Linux's struct tcp_info


def round_trip(connection: socket.socket) -> float | None:
    """In seconds; None where the system does not say."""
    if sys.platform != "linux":
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
        [microseconds] = struct.unpack_from("=I", info, _AT)
    except (OSError, struct.error):
        return None
    return microseconds / 1e6 if microseconds else None
