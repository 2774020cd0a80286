"""gRPC channels and servers: what all of ours share (options, sizes, heartbeats), and why."""

from __future__ import annotations

import ipaddress
import socket

HEARTBEATS = 5  # that a peer sends in a lease, and times that the coordinator looks whether it owes one
PIECE = 1 << 20  # bytes of a larger whole that one message carries; gRPC's own limit for a message is 4 MiB
MOST_FROM_COORDINATOR = 256 << 20  # a basis comes in one message; a peer trusts its coordinator that far

# Off by default. What keeps connections alive are messages, which no server counts as too many pings: heartbeats on a
# session, questions on a link, both more often than the most forgetful router (5 s) wants. gRPC's own pings are for
# calls beside these; their timeout is TCP's as well (TCP_USER_TIMEOUT): what was sent and not confirmed for so long
# ends the connection, which is how a half-dead one is noticed.
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 6_000),
    ("grpc.keepalive_permit_without_calls", 1),
]
CHANNEL_OPTIONS = [
    *_KEEPALIVE,
    ("grpc.enable_http_proxy", 0),  # peers dial addresses that they were given, not whatever a shell has set up
    ("grpc.use_local_subchannel_pool", 1),  # or two channels to one address share a connection
]
SERVER_OPTIONS = [
    *_KEEPALIVE,
    ("grpc.so_reuseport", 0),  # or a second server binds the same port without a word
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.server_handshake_timeout_ms", 10_000),  # two minutes by default
    ("grpc.max_connection_idle_ms", 600_000),  # without a call; a peer's session is one
    ("grpc.max_concurrent_streams", 64),
]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind_address(public: str) -> str:
    """Where to listen so that this address is answered: loopback alone, or every interface of its family."""
    if is_loopback(public):
        return "::1" if ":" in public else "127.0.0.1"
    return "::" if ":" in public else "0.0.0.0"


def own_address(family: int = socket.AF_INET) -> str:
    """The address of this machine on its way to the outside; loopback where there is none. Sends nothing."""
    far, here = ("2001:db8::1", "::1") if family == socket.AF_INET6 else ("192.0.2.1", "127.0.0.1")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))  # an address for documentation: no packet is sent
            return str(probe.getsockname()[0])
    except OSError:
        return here
