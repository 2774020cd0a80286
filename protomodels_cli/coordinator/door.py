"""The one public TCP port: hands out the CA, splices relayed links, passes TLS on to gRPC on loopback.

Limits what a stranger can make us hold before a handshake. Must not know keys, tokens, gRPC or messages.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import resource
import socket
from asyncio import StreamReader, StreamWriter
from collections import Counter
from dataclasses import dataclass

from protomodels_cli.errors import UserError
from protomodels_cli.observe.logs import WIRE
from protomodels_cli.wire.addresses import network_of
from protomodels_cli.wire.join_link import ASK_AUTHORITY, Address, address, refusal
from protomodels_cli.wire.relay import RELAY, WAIT_SECONDS, Meetings, Role
from protomodels_cli.wire.round_trip import round_trip
from protomodels_cli.wire.splice import BACK, Stream, Watch, send_last, splice, tune

TLS_RECORD = b"\x16\x03"  # a handshake record of any TLS version
FILES_EACH = 3  # descriptors a connection takes: the caller's, ours to gRPC, and gRPC's end of that
FILES_FOR_OTHERS = 256  # and what the journal and snapshots must always find free
MOST_TOLD = 64  # callers at a time that are told why there is no room for them


@dataclass(frozen=True)
class DoorLimits:
    """What strangers may use."""

    connections: int = 1024
    connections_per_address: int = 64
    first_seconds: float = 5.0  # for the first line, or the first bytes of TLS
    line_bytes: int = 256
    handshake_bytes: int = 32 * 1024
    handshake_seconds: float = 10.0
    relay_seconds: float = WAIT_SECONDS


class _Refused(Exception):
    """Cut this connection; the argument is the kind of refusal that is counted."""


class Door:
    """Counters: `refused` by kind, and `connections` that are open now."""

    def __init__(self, authority_pem: bytes, backend: Address, limits: DoorLimits = DoorLimits()):
        self.limits = limits
        self.refused: Counter[str] = Counter()
        self._authority_pem, self._backend = authority_pem, backend
        self._most = self.limits.connections
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._telling: set[asyncio.Task[None]] = set()
        self._by_neighbourhood: Counter[str] = Counter()
        self._meetings = Meetings(self.limits.relay_seconds)
        self._callers: dict[int, tuple[str, StreamWriter]] = {}

    @property
    def connections(self) -> int:
        return len(self._tasks)

    async def open(self, host: str, port: int) -> int:
        """Listen; returns the port, which is of use where 0 was asked for."""
        self._most = _room_for(self.limits.connections)
        try:
            # reuse_port would let a second coordinator bind the same port without a word.
            self._server = await asyncio.start_server(self._come_in, host, port, reuse_port=False)
        except OSError as error:
            raise _cannot_listen(error, host, port) from None
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = [*self._tasks, *self._telling]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def allow(self, ticket: str) -> None:
        """Let two peers meet here under this ticket."""
        self._meetings.allow(ticket)

    def forbid(self, ticket: str) -> dict[Role, int]:
        """Withdraw it, and cut what is connected under it. Returns the bytes that each side has sent."""
        return self._meetings.forbid(ticket)

    def relayed(self, ticket: str) -> dict[Role, int]:
        """Bytes that each side has sent through here under this ticket."""
        return self._meetings.moved(ticket)

    def address_of(self, loopback_port: int) -> str | None:
        """The remote IP behind a connection that gRPC sees coming from this port of 127.0.0.1."""
        caller = self._callers.get(loopback_port)
        return caller[0] if caller else None

    def round_trip_of(self, loopback_port: int) -> float | None:
        """To whoever is behind that connection and back, in seconds."""
        caller = self._callers.get(loopback_port)
        connection = caller[1].get_extra_info("socket") if caller else None
        return None if connection is None else round_trip(connection)

    def _come_in(self, reader: StreamReader, writer: StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        caller = _plain_ip(peer[0]) if peer else None  # None: gone again already
        neighbourhood = network_of(caller) if caller else ""
        kind = None
        if len(self._tasks) >= self._most:
            kind = "too_many_connections"
        elif self._by_neighbourhood[neighbourhood] >= self.limits.connections_per_address:
            kind = "too_many_from_one_address"
        if kind or caller is None or self._server is None or not self._server.is_serving():
            if kind:
                self._refuse(kind, caller)
            if kind and len(self._telling) < MOST_TOLD:
                self._telling.add(telling := asyncio.create_task(self._tell((reader, writer), kind)))
                telling.add_done_callback(self._telling.discard)
            else:
                writer.transport.abort()
            return
        self._by_neighbourhood[neighbourhood] += 1
        task = asyncio.create_task(self._serve((reader, writer), caller))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._went(done, neighbourhood))

    async def _tell(self, stream: Stream, kind: str) -> None:
        """Why there is no room. Within TLS nothing can be said before a handshake; but whoever joins asks for the CA
        first, and its question has to be read: a socket that is closed over unread bytes takes the answer with it."""
        try:
            if await self._opening(stream[0]) == ASK_AUTHORITY:
                await send_last(stream[1], refusal(kind))
        except (_Refused, OSError):
            pass  # it has been counted
        finally:
            stream[1].transport.abort()

    def _refuse(self, kind: str, caller: str | None) -> None:
        self.refused[kind] += 1
        WIRE.debug("refused a connection from %s: %s", caller, kind)

    def _went(self, task: asyncio.Task[None], neighbourhood: str) -> None:
        self._tasks.discard(task)
        self._by_neighbourhood[neighbourhood] -= 1
        if not self._by_neighbourhood[neighbourhood]:  # strangers' addresses must not pile up here
            del self._by_neighbourhood[neighbourhood]

    async def _serve(self, stream: Stream, caller: str) -> None:
        try:
            tune(stream[1])
            opening = await self._opening(stream[0])
            if opening == TLS_RECORD:
                await self._to_backend(stream, caller)
            elif opening == ASK_AUTHORITY:
                await send_last(stream[1], self._authority_pem)
            elif relay := RELAY.fullmatch(opening):
                if not await self._meetings.attend(stream, relay[1].decode(), relay[2].decode()):
                    raise _Refused("unknown_ticket")
            else:
                raise _Refused("unknown_request")
        except _Refused as refusal:
            self._refuse(str(refusal), caller)
        except OSError:
            pass  # the caller closed the connection: nothing to report
        finally:
            stream[1].transport.abort()

    async def _opening(self, reader: StreamReader) -> bytes:
        """The first two bytes of TLS, or the first line; not a byte more: the rest is for gRPC or the other peer."""
        try:
            async with asyncio.timeout(self.limits.first_seconds):
                opening = await reader.readexactly(2)
                while opening != TLS_RECORD and not opening.endswith(b"\n"):
                    if len(opening) >= self.limits.line_bytes:
                        raise _Refused("line_too_long")
                    opening += await reader.readexactly(1)
                return opening
        except (TimeoutError, asyncio.IncompleteReadError):
            raise _Refused("no_request") from None

    async def _to_backend(self, client: Stream, caller: str) -> None:
        clock = asyncio.timeout(self.limits.handshake_seconds)
        port = None
        try:
            async with clock:
                try:
                    backend = await asyncio.open_connection(*self._backend)
                except OSError:
                    raise _Refused("backend_unavailable") from None
                tune(backend[1])
                port = backend[1].get_extra_info("sockname")[1]
                self._callers[port] = (caller, client[1])
                backend[1].write(TLS_RECORD)
                await splice(client, backend, _handshake(clock, self.limits.handshake_bytes))
        except TimeoutError:
            raise _Refused("handshake_too_slow") from None
        finally:
            # The port may be a newer connection's by now.
            if port is not None and self._callers.get(port) == (caller, client[1]):
                del self._callers[port]


def _handshake(clock: asyncio.Timeout, most: int) -> Watch:
    """Bounds a client until it has replied to the server's first answer: as near as bytes tell to a handshake's end."""
    sent, answered = len(TLS_RECORD), False

    def watch(way: int, count: int) -> None:
        nonlocal sent, answered
        if way == BACK:
            answered = True
        elif not answered:
            sent += count
            if sent > most:
                raise _Refused("handshake_too_long")
        elif clock.when() is not None and not clock.expired():
            clock.reschedule(None)

    return watch


def _plain_ip(host: str) -> str:
    """An IPv4 caller of an IPv6 socket is an IPv4 caller."""
    ip = ipaddress.ip_address(host.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip)


def _room_for(connections: int) -> int:
    """How many connections this process has descriptors for, after asking for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_EACH * connections + FILES_FOR_OTHERS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            soft = allowed
        except (OSError, ValueError):
            pass  # macOS has a ceiling of its own: live with fewer
        return max(1, min(connections, (soft - FILES_FOR_OTHERS) // FILES_EACH))
    return connections


def _cannot_listen(error: OSError, host: str, port: int) -> UserError:
    where = f"cannot listen on {address(host, port)}"
    if error.errno == errno.EADDRINUSE:
        fix = "stop the other program, or choose another --port"
        return UserError(f"{where}: another program uses port {port}", fix, kind="port_taken")
    # No number at all is how asyncio says "cannot assign" from Python 3.13 on.
    if error.errno in (errno.EADDRNOTAVAIL, None) or isinstance(error, socket.gaierror):
        fix = "choose one of this machine's addresses, or 0.0.0.0 for all of them"
        return UserError(f"{where}: this machine has no address {host}", fix, kind="no_such_address")
    if error.errno in (errno.EACCES, errno.EPERM):
        fix = "choose a --port of 1024 or more"
        return UserError(f"{where}: port {port} is reserved for the system", fix, kind="port_reserved")
    return UserError(f"{where}: {error.strerror or error}", "choose another address or port", kind="cannot_listen")
