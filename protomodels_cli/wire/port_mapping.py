"""A port of the router's that leads to this machine, asked for from the router itself: NAT-PMP (RFC 6886), or UPnP
(upnp.py) where it has none. What the router says is not believed further than a port and an address, which the
coordinator then dials to see.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from protomodels_cli.wire.addresses import is_address, is_private

PMP_PORT = 5351
PMP_TRIES = 0.25, 0.5, 1.0  # seconds for an answer, one after the other
LIFETIME = 3600  # seconds that a mapping is asked for; it is renewed at half of what is granted
LEAST_LIFETIME = 60.0  # seconds: a router that grants less is not asked more often
ROUTES = Path("/proc/net/route")
TCP = 2  # opcode of NAT-PMP: a mapping of a TCP port
ADDRESS = 0  # … the outside address


class NoMapping(Exception):
    """Why there is none, in a few words."""


@dataclass(frozen=True)
class Mapping:
    host: str  # the router's outside address
    port: int  # of it
    seconds: float  # that it is granted for; 0: until it is removed
    by: str  # NAT-PMP or UPnP


@dataclass
class Kept:
    """A mapping that is renewed: the router may give another port, or have another address, by then."""

    mapping: Mapping


class Router(Protocol):
    """One that maps ports, by whichever protocol."""

    async def look(self) -> str:
        """By which it answers; maps nothing. Raises NoMapping."""

    async def add(self, port: int, outside: int, seconds: int) -> Mapping:
        """Raises NoMapping."""

    async def remove(self, mapping: Mapping, port: int) -> None:
        """Raises NoMapping."""


def gateway() -> str | None:
    """The router of this machine's default route; None: there is none, or the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for row in ROUTES.read_text().splitlines()[1:]:
            fields = row.split()
            if fields[1] == "00000000" and int(fields[3], 16) & 2:
                return socket.inet_ntoa(struct.pack("<I", int(fields[2], 16)))
    return None


# NAT-PMP


def ask_address() -> bytes:
    return struct.pack("!BB", 0, ADDRESS)


def ask_port(port: int, outside: int, seconds: int) -> bytes:
    """`seconds` 0: it is to be removed."""
    return struct.pack("!BBHHHI", 0, TCP, 0, port, outside if seconds else 0, seconds)


def read_address(answer: bytes) -> str:
    """Raises NoMapping."""
    _check(answer, ADDRESS, 12)
    return socket.inet_ntoa(answer[8:12])


def read_port(answer: bytes, port: int) -> tuple[int, int]:
    """The outside port and the seconds that it is granted for. Raises NoMapping."""
    _check(answer, TCP, 16)
    inside, outside, seconds = struct.unpack("!HHI", answer[8:16])
    if inside != port:
        raise NoMapping("the router answered about another port")
    return outside, seconds


def _check(answer: bytes, operation: int, size: int) -> None:
    if len(answer) >= 4 and answer[0] == 0 and answer[1] == 128 + operation:
        [code] = struct.unpack("!H", answer[2:4])
        if code:
            reasons = {1: "unsupported version", 2: "not allowed", 3: "it has no network", 4: "out of resources"}
            raise NoMapping(f"the router refused: {reasons.get(code, f'code {code}')}")
        if len(answer) >= size:
            return
    raise NoMapping("what the router answered is no NAT-PMP")


class _Answers(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.came: asyncio.Queue[bytes] = asyncio.Queue(8)

    def datagram_received(self, data: bytes, addr: object) -> None:
        if not self.came.full():  # the socket is connected: it is the router who says this
            self.came.put_nowait(data[:64])

    def error_received(self, exc: Exception) -> None:
        if not self.came.full():
            self.came.put_nowait(b"")  # nobody listens there


class NatPmp:
    def __init__(self, host: str, port: int = PMP_PORT):
        self._router = host, port

    async def look(self) -> str:
        read_address(await self._ask(ask_address()))
        return "NAT-PMP"

    async def add(self, port: int, outside: int, seconds: int) -> Mapping:
        host = checked_host(read_address(await self._ask(ask_address())))
        granted, lasts = read_port(await self._ask(ask_port(port, outside, seconds)), port)
        return Mapping(host, granted, lasts, "NAT-PMP")

    async def remove(self, mapping: Mapping, port: int) -> None:
        read_port(await self._ask(ask_port(port, 0, 0)), port)

    async def _ask(self, question: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        try:
            transport, answers = await loop.create_datagram_endpoint(_Answers, remote_addr=self._router)
        except OSError as error:
            raise NoMapping(error.strerror or str(error)) from None
        try:
            for seconds in PMP_TRIES:
                transport.sendto(question)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        if answer := await answers.came.get():
                            return answer
                    break  # refused: nobody is there
            raise NoMapping("no answer to NAT-PMP")
        finally:
            transport.close()


# Keeping one


async def find(routers: list[Router], port: int) -> tuple[Router, Mapping]:
    """The first of these that maps the port, best to the same one. Raises NoMapping."""
    whys = []
    for router in routers:
        try:
            return router, await _add(router, port, port)
        except NoMapping as why:
            whys.append(str(why))
    raise NoMapping("; ".join(whys) or "this machine has no gateway")


async def _add(router: Router, port: int, outside: int) -> Mapping:
    """Raises NoMapping; then none is left in the router."""
    mapping = await router.add(port, outside, LIFETIME)
    try:
        return checked(mapping)
    except NoMapping:
        with contextlib.suppress(NoMapping):
            await router.remove(mapping, port)
        raise


async def answers(routers: list[Router]) -> str:
    """By which protocol one of them answers; empty: none does."""
    for router in routers:
        with contextlib.suppress(NoMapping):
            return await router.look()
    return ""


def checked(mapping: Mapping) -> Mapping:
    """Raises NoMapping for one that leads nowhere."""
    if not 1 <= mapping.port <= 65535:
        raise NoMapping(f"the router granted the port {mapping.port}, which there is not")
    checked_host(mapping.host)
    return mapping


def checked_host(host: str) -> str:
    """Of a router: known before a port is mapped, so that none is mapped in vain. Raises NoMapping."""
    if not is_address(host) or is_private(host):
        raise NoMapping(f"the router's own outside address, {host}, is not public: it is behind another router")
    return host


@asynccontextmanager
async def mapped(routers: list[Router], port: int, lost: Callable[[str], None]) -> AsyncIterator[Kept]:
    """A mapping for as long as the block lasts: renewed at half of its time, removed at the end. Raises NoMapping where
    there is none to begin with; `lost` is told where it could not be renewed, and it is tried again."""
    router, first = await find(routers, port)
    kept = Kept(first)

    async def renew() -> None:
        while kept.mapping.seconds:
            await asyncio.sleep(max(kept.mapping.seconds, LEAST_LIFETIME) / 2)
            try:
                # Where the port is another one now, the router has given the old one away: it is not ours to remove.
                kept.mapping = await _add(router, port, kept.mapping.port)
            except NoMapping as why:
                lost(str(why))

    renewing = asyncio.create_task(renew())
    try:
        yield kept
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        with contextlib.suppress(NoMapping):
            await router.remove(kept.mapping, port)
