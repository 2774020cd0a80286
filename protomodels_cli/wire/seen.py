"""From where somebody outside sees a connection come: the address and port that a router gives to a local port.

A line to a relay or to the coordinator's door, and a line as the answer. Nobody is believed further than that: what
comes of it is one try to connect, under TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from protomodels_cli.wire.join_link import Address

ASK_SEEN = b"PMTRAIN 1 SEEN\n"
MOST_ASKED = 3  # observers: two that agree are enough
ASK_SECONDS = 2.0
_SEEN = re.compile(rb"SEEN ([0-9a-f.:]{2,45}) ([0-9]{1,5})\n")
_LONGEST = 64  # bytes of an answer


def seen_at(peername: Sequence[object]) -> bytes:
    """What an observer answers to whoever comes from there."""
    ip = ipaddress.ip_address(str(peername[0]).partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return f"SEEN {mapped or ip} {peername[1]}\n".encode()


def read_seen(answer: bytes) -> Address | None:
    """None: it is no such answer."""
    if (match := _SEEN.fullmatch(answer)) is None or not 1 <= int(match[2]) <= 65535:
        return None
    try:
        return str(ipaddress.ip_address(match[1].decode())), int(match[2])
    except ValueError:
        return None


def shared_port(family: int, port: int = 0) -> socket.socket:
    """A socket at this local port, which others of this process may have as well; 0: any that is free."""
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(("", port))
    except OSError:
        made.close()
        raise
    return made


@asynccontextmanager
async def seen_by(observers: Sequence[Address], family: int, port: int) -> AsyncIterator[list[Address]]:
    """Where each of the first few that answer in time sees this local port. Their connections stay open within the
    block: some routers forget a port as soon as nothing uses it."""
    with contextlib.ExitStack() as open_until_then:

        async def ask(observer: Address) -> Address | None:
            loop, came = asyncio.get_running_loop(), b""
            connection = open_until_then.enter_context(shared_port(family, port))
            async with asyncio.timeout(ASK_SECONDS):
                [(*_, where), *_] = await loop.getaddrinfo(*observer, family=family, type=socket.SOCK_STREAM)
                await loop.sock_connect(connection, where)
                await loop.sock_sendall(connection, ASK_SEEN)
                while not came.endswith(b"\n") and len(came) < _LONGEST:
                    if not (more := await loop.sock_recv(connection, _LONGEST - len(came))):
                        break
                    came += more
            return read_seen(came)

        asked = list(dict.fromkeys(observers))[:MOST_ASKED]
        found = await asyncio.gather(*map(ask, asked), return_exceptions=True)
        yield [seen for seen in found if isinstance(seen, tuple)]
