"""A slow internet connection, emulated inside the transport: no root, no kernel support, on any platform.

A peer has one connection with an uplink and a downlink. Its streams to its neighbours and all that it exchanges with
the coordinator share them, in turns of a few milliseconds, as in a router that is fair to every connection. Bytes are
counted as they would be on Ethernet, with the headers of TLS, TCP and IP. A clock for each line says when bytes have
passed it, and they are held back until then: nothing is dropped, and late wake-ups cost no bandwidth.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable
from typing import Protocol

from protomodels_cli import counter
from protomodels_cli.cost.line import HEADERS, RECORD, SEGMENT, Line, reno_rate, segments, wire_bytes
from protomodels_cli.spec.schema import LinkSpec
from protomodels_cli.wire.join_link import Address

TURN = 0.005  # seconds that one stream has a line to itself while others wait
AHEAD = 0.02  # seconds of sending that a stream's buffer holds
BUFFER = 1 << 16  # bytes that wait before the line to or from the coordinator


class Stream(Protocol):
    """What a gRPC client call and a server context have in common."""

    def read(self) -> Awaitable[bytes]: ...
    def write(self, frame: bytes) -> Awaitable[None]: ...


class Connection:
    def __init__(self, link: LinkSpec):
        self.link = link
        self.up, self.down = Line(link.bits_per_second), Line(link.bits_per_second)
        self.turn = max(RECORD, TURN * link.bits_per_second / 8)  # bytes
        self._servers: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def over(self, stream: Stream, seed: int) -> AsyncIterator[Stream]:
        """The stream as it would be over this connection. `seed` is for jitter and loss."""
        slow = _Slowed(self, stream, seed)
        try:
            yield slow
        finally:
            slow.delivering.cancel()
            await asyncio.gather(slow.delivering, return_exceptions=True)

    def way_to(self, target: Address) -> Address:
        """An address on this machine whose every TCP connection leads to `target` over this connection."""
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)  # or what is sent waits there, not before us
        self._servers.add(asyncio.create_task(self._serve(listening, target)))
        host, port = listening.getsockname()
        return host, port

    async def close(self) -> None:
        for server in self._servers:
            server.cancel()
        await asyncio.gather(*self._servers, return_exceptions=True)

    async def _serve(self, listening: socket.socket, target: Address) -> None:
        passing: set[asyncio.Task[None]] = set()

        def come_in(reader: StreamReader, writer: StreamWriter) -> None:
            passing.add(task := asyncio.create_task(self._pass_on(reader, writer, target)))
            task.add_done_callback(passing.discard)

        server = await asyncio.start_server(come_in, sock=listening, limit=BUFFER // 2)
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
            for task in [*passing]:
                task.cancel()
            await asyncio.gather(*passing, return_exceptions=True)

    async def _pass_on(self, reader: StreamReader, writer: StreamWriter, target: Address) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*target, limit=BUFFER // 2)
        except OSError:
            writer.transport.abort()
            return
        far_writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        ways = {
            asyncio.create_task(_Way(self, self.up, None, seed=-1).carry(reader, far_writer)),
            asyncio.create_task(_Way(self, self.down, self.up, seed=-2).carry(far_reader, writer)),
        }
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (writer, far_writer):
                end.transport.abort()


class _Way:
    """One way of a TCP connection to the coordinator. `confirming`: the line that TCP's confirmations take."""

    def __init__(self, connection: Connection, line: Line, confirming: Line | None, seed: int):
        self._line, self._confirming = line, confirming
        self._own = Line(reno_rate(connection.link))
        self._turn = int(min(connection.turn, BUFFER))
        self._latency = _Latency(connection.link, seed)

    async def carry(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Returns when one end has closed the connection, and the other has had all that was sent before."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivering, due = asyncio.create_task(_deliver(on_the_way, writer)), 0.0
        try:
            while not delivering.done() and (chunk := await reader.read(self._turn)):
                now, packets = _now(), math.ceil(len(chunk) / SEGMENT)
                size = len(chunk) + packets * HEADERS
                finish = max(self._line.leave(now, size), self._own.leave(now, size))
                if self._confirming is not None:
                    self._confirming.leave(now, HEADERS * packets / 2)
                due = max(due, finish + self._latency.of(packets))
                on_the_way.put_nowait((due, chunk))
                await _until(finish - AHEAD)
            on_the_way.put_nowait((due, b""))
            await delivering
        finally:
            delivering.cancel()


async def _deliver(on_the_way: asyncio.Queue[tuple[float, bytes]], writer: StreamWriter) -> None:
    while (entry := await on_the_way.get())[1]:
        due, chunk = entry
        await _until(due)
        writer.write(chunk)
        await writer.drain()


class _Slowed:
    def __init__(self, connection: Connection, stream: Stream, seed: int):
        self._connection, self._stream = connection, stream
        self._own = Line(reno_rate(connection.link))  # what TCP allows this one stream
        self._latency = _Latency(connection.link, seed)
        self._on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._due = 0.0
        self.delivering = asyncio.create_task(self._deliver())

    async def write(self, frame: bytes) -> None:
        """Returns when nearly all of it has left."""
        if self.delivering.done():
            self.delivering.result()  # raises what broke the stream
        ready, left, finish = _now(), float(wire_bytes(len(frame))), 0.0
        while left > 0:
            part = min(left, self._connection.turn)
            finish = max(self._connection.up.leave(ready, part), self._own.leave(ready, part))
            left -= part
            await _until(finish - AHEAD)
        self._due = max(self._due, finish + self._latency.of(segments(len(frame))))
        self._on_the_way.put_nowait((self._due, frame))

    async def read(self) -> bytes:
        frame = await self._stream.read()
        if isinstance(frame, bytes):  # otherwise it is the end
            now, left, down = _now(), float(wire_bytes(len(frame))), self._connection.down
            self._connection.up.leave(now, HEADERS * segments(len(frame)) / 2)  # TCP confirms every other segment
            while left > 0:
                part = min(left, self._connection.turn)
                left -= part
                arrived = down.arrive(now - down.seconds(left), part)
                await _until(arrived - AHEAD if left else arrived)
        return frame

    async def _deliver(self) -> None:
        while True:
            due, frame = await self._on_the_way.get()
            await _until(due)
            await self._stream.write(frame)


class _Latency:
    def __init__(self, link: LinkSpec, seed: int):
        self._link, self._seed, self._drawn = link, seed, 0

    def of(self, packets: int) -> float:
        """Latency and jitter, and a round trip more if one of the packets was lost and had to be sent again."""
        self._drawn += 1
        swing, luck = (counter.word(self._seed, 2 * self._drawn + i) / 2**64 for i in (0, 1))
        delay = max(0.0, self._link.latency_s + (2 * swing - 1) * self._link.jitter_s)
        lost = luck >= (1 - self._link.loss) ** packets
        return delay + (2 * self._link.latency_s if lost else 0.0)


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _until(when: float) -> None:
    if (wait := when - _now()) > 0:
        await asyncio.sleep(wait)
