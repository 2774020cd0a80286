"""The one public TCP port: hands out the CA, says where callers are seen, splices links,
passes TLS on to gRPC on loopback.

Limits what a stranger can make us hold: time and bytes until a call of it was authenticated, of which it is told. Must
not know keys, tokens, gRPC or messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import resource
import socket
import time
from asyncio import StreamReader, StreamWriter
from collections import Counter
from collections.abc import Iterator
from typing import cast

from protomodels_cli.coordinator.admission import Admission, Admitted, DoorLimits
from protomodels_cli.errors import UserError
from protomodels_cli.observe import logs
from protomodels_cli.wire.addresses import network_of
from protomodels_cli.wire.join_link import ASK_AUTHORITY, Address, address, refusal
from protomodels_cli.wire.relay import RELAY, Meetings, Role
from protomodels_cli.wire.round_trip import round_trip
from protomodels_cli.wire.seen import ASK_SEEN, seen_at
from protomodels_cli.wire.splice import BACK, Stream, send_last, splice, tune

TLS_RECORD = b"\x16\x03"  # a handshake record of any TLS version
FILES_EACH = 3  # descriptors a connection takes: the caller's, ours to gRPC, and gRPC's end of that
FILES_FOR_OTHERS = 256  # and what the journal and snapshots must always find free
MOST_WAITING = 128  # callers at a time that wait in line, or are told why there is no room for them
LINE_LOOK_SECONDS = 0.05  # between two looks of the first in line
CROWDED = "too_many_from_one_address"


class _Refused(Exception):
    """Cut this connection; the argument is the kind of refusal that is counted."""


class Door:
    """Counters: `refused` by kind, and `connections` that are open now."""

    def __init__(self, authority_pem: bytes, backend: Address, limits: DoorLimits = DoorLimits()):
        self.limits = limits
        self.refused: Counter[str] = Counter()
        self._authority_pem, self._backend = authority_pem, backend
        self._admission = Admission(limits, limits.connections)
        self._server: asyncio.Server | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by the caller's number
        self._waiting: set[asyncio.Task[None]] = set()
        self._lines: dict[str, dict[int, None]] = {}  # callers that wait, by network, in the order in which they came
        self._meetings = Meetings(self.limits.relay_seconds)
        self._callers: dict[int, _Caller] = {}  # by the port of loopback

    @property
    def connections(self) -> int:
        return len(self._tasks)

    async def open(self, host: str, port: int) -> int:
        """Listen; returns the port, which is of use where 0 was asked for."""
        self._admission = Admission(self.limits, _room_for(self.limits.connections))
        try:
            # reuse_port would let a second coordinator bind the same port without a word.
            self._server = await asyncio.start_server(self._come_in, host, port, reuse_port=False)
        except OSError as error:
            raise cannot_listen(error, host, port) from None
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = [*self._tasks.values(), *self._waiting]
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
        return caller.ip if caller else None

    def known(self, loopback_port: int) -> None:
        """A call on that connection was authenticated: its caller is no stranger."""
        if (caller := self._callers.get(loopback_port)) is not None:
            self._admission.known(caller.number, time.monotonic())
            caller.believe()

    @contextlib.contextmanager
    def session(self, loopback_port: int) -> Iterator[None]:
        """While the block lasts, its caller does not make way for others."""
        caller = self._callers.get(loopback_port)
        if caller is not None:
            caller.sessions += 1
            self._admission.busy(caller.number)
        try:
            yield
        finally:
            if caller is not None:
                caller.sessions -= 1
                if not caller.sessions:
                    self._admission.idle(caller.number, time.monotonic())

    def number_of(self, loopback_port: int) -> int:
        """Of the connection: a newer one has a higher number. 0: it is gone."""
        caller = self._callers.get(loopback_port)
        return caller.number if caller else 0

    def cut(self, loopback_port: int) -> None:
        """End that connection, for what was said over it."""
        if (caller := self._callers.get(loopback_port)) is not None:
            self._tasks[caller.number].cancel()
            self._refuse("cut_off")

    def round_trip_of(self, loopback_port: int) -> float | None:
        """To whoever is behind that connection and back, in seconds."""
        caller = self._callers.get(loopback_port)
        connection = caller.writer.get_extra_info("socket") if caller else None
        return None if connection is None else round_trip(connection)

    def _come_in(self, reader: StreamReader, writer: StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        if not peer or self._server is None or not self._server.is_serving():  # gone again already, or too late
            writer.transport.abort()
            return
        ip = _plain_ip(peer[0])
        network, now = network_of(ip), time.monotonic()
        line = self._lines.get(network, {})
        place = CROWDED if line else self._admission.come(network, now)
        if not isinstance(place, str):
            self._let_in((reader, writer), ip, place)
        elif len(self._waiting) >= MOST_WAITING:
            self._refuse(place)
            writer.transport.abort()
        else:
            in_line = place == CROWDED and len(line) < self.limits.in_line
            work = self._wait_in_line((reader, writer), ip) if in_line else self._tell((reader, writer), place)
            self._waiting.add(waiting := asyncio.create_task(work))
            waiting.add_done_callback(self._waiting.discard)

    async def _wait_in_line(self, stream: Stream, ip: str) -> None:
        """Until there is room for callers from this network, in the order in which they came. Nothing is read."""
        network, transport = network_of(ip), cast(asyncio.Transport, stream[1].transport)
        line = self._lines.setdefault(network, {})
        number, until = id(stream), time.monotonic() + self.limits.line_seconds
        line[number] = None
        place: str | Admitted = CROWDED
        try:
            transport.pause_reading()
            while isinstance(place, str) and time.monotonic() < until:
                await asyncio.sleep(LINE_LOOK_SECONDS)
                if next(iter(line)) == number:
                    place = self._admission.come(network, time.monotonic())
        except asyncio.CancelledError:
            transport.abort()
            raise
        finally:
            del line[number]
            if not line and self._lines.get(network) is line:
                del self._lines[network]
        transport.resume_reading()
        if isinstance(place, str):
            await self._tell(stream, place)
        else:
            self._let_in(stream, ip, place)

    def _let_in(self, stream: Stream, ip: str, place: Admitted) -> None:
        if place.instead_of is not None:
            self._tasks[place.instead_of].cancel()
            self._refuse("made_way")
        caller = _Caller(place.number, ip, stream[1], self.limits, self._admission)
        self._tasks[caller.number] = task = asyncio.create_task(self._serve(stream, caller))
        task.add_done_callback(lambda _: self._went(caller.number, stream[1]))

    async def _tell(self, stream: Stream, kind: str) -> None:
        """Why there is no room. Within TLS nothing can be said before a handshake; but whoever joins asks for the CA
        first, and its question has to be read: a socket that is closed over unread bytes takes the answer with it."""
        self._refuse(kind)
        try:
            if await self._opening(stream[0]) == ASK_AUTHORITY:
                await send_last(stream[1], refusal(kind))
        except (_Refused, OSError):
            pass  # it has been counted
        finally:
            stream[1].transport.abort()

    def _refuse(self, kind: str) -> None:
        self.refused[kind] += 1
        logs.seldom(logs.WIRE, "refused connections: %s", kind)

    def _went(self, number: int, writer: StreamWriter) -> None:
        writer.transport.abort()  # of a task that was cancelled before it began
        del self._tasks[number]
        self._admission.go(number)

    async def _serve(self, stream: Stream, caller: _Caller) -> None:
        try:
            tune(stream[1])
            opening = await self._opening(stream[0])
            if opening == TLS_RECORD:
                await self._to_backend(stream, caller)
            elif opening == ASK_AUTHORITY:
                await send_last(stream[1], self._authority_pem)
            elif opening == ASK_SEEN:
                await send_last(stream[1], seen_at(stream[1].get_extra_info("peername")))
            elif relay := RELAY.fullmatch(opening):
                if self._meetings.allows(relay[1].decode()):
                    self._admission.known(caller.number, time.monotonic())
                    self._admission.busy(caller.number)
                if not await self._meetings.attend(stream, relay[1].decode(), relay[2].decode()):
                    raise _Refused("unknown_ticket")
            else:
                raise _Refused("unknown_request")
        except _Refused as refusal:
            self._refuse(str(refusal))
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

    async def _to_backend(self, client: Stream, caller: _Caller) -> None:
        port = None
        try:
            async with caller.clock:
                try:
                    backend = await asyncio.open_connection(*self._backend)
                except OSError:
                    raise _Refused("backend_unavailable") from None
                tune(backend[1])
                port = backend[1].get_extra_info("sockname")[1]
                self._callers[port] = caller
                backend[1].write(TLS_RECORD)
                await splice(client, backend, caller.watch)
        except TimeoutError:
            raise _Refused("stranger_too_long" if caller.replied else "handshake_too_slow") from None
        finally:
            if port is not None and self._callers.get(port) is caller:  # it may be a newer connection's by now
                del self._callers[port]


class _Caller:
    """Whoever sends TLS, and what it may do until a call of it was authenticated."""

    def __init__(self, number: int, ip: str, writer: StreamWriter, limits: DoorLimits, admission: Admission):
        self.number, self.ip, self.writer, self._admission = number, ip, writer, admission
        self._limits, self._until = limits, asyncio.get_running_loop().time() + limits.stranger_seconds
        self.clock = asyncio.timeout(limits.handshake_seconds)
        self._sent, self._answered, self._known, self._paused = len(TLS_RECORD), False, False, False
        self.sessions = 0  # that are open
        self.replied = False  # to the server's first answer: as near as bytes tell to a handshake's end

    def believe(self) -> None:
        if not self._known:
            self._known = True
            self._let(None)
            if self._paused:
                cast(asyncio.Transport, self.writer.transport).resume_reading()

    def watch(self, way: int, count: int) -> None:
        if self._known:
            return
        if way == BACK:
            self._answered = True
            return
        self._sent += count
        self._admission.heard(self.number)
        if self._answered and not self.replied:
            self.replied = True
            self._let(self._until)
        if not self.replied and self._sent > self._limits.handshake_bytes:
            raise _Refused("handshake_too_long")
        if self._sent > self._limits.stranger_most_bytes:
            raise _Refused("stranger_too_much")
        if self._sent > self._limits.stranger_bytes:
            self._paused = True
            cast(asyncio.Transport, self.writer.transport).pause_reading()

    def _let(self, until: float | None) -> None:
        if not self.clock.expired():
            self.clock.reschedule(until)


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


def try_port(host: str, port: int) -> None:
    """Whether a coordinator could listen there, before it does anything else. Raises UserError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise cannot_listen(error, host, port) from None


def cannot_listen(error: OSError, host: str, port: int) -> UserError:
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
