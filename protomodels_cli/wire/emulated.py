"""A slow internet connection, emulated inside the transport: no root, no kernel support, on any platform.

A peer has one connection with an uplink and a downlink, and all its streams share them. Bytes are counted as they would
be on Ethernet, with the headers of TLS, TCP and IP. A clock for each line says when a frame has passed it, and frames
are held back until then: nothing is dropped or copied, and late wake-ups cost no bandwidth.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Protocol

from protomodels_cli import counter
from protomodels_cli.cost.line import HEADERS, RECORD, Line, reno_rate, segments, wire_bytes
from protomodels_cli.spec.schema import LinkSpec

TURN = 0.005  # seconds that one stream has an uplink to itself while others wait
AHEAD = 0.02  # seconds of sending that a stream's buffer holds


class Stream(Protocol):
    """What a gRPC client call and a server context have in common."""

    def read(self) -> Awaitable[bytes]: ...
    def write(self, frame: bytes) -> Awaitable[None]: ...


class Connection:
    def __init__(self, link: LinkSpec):
        self.link = link
        self.up, self.down = Line(link.bits_per_second), Line(link.bits_per_second)

    @contextlib.asynccontextmanager
    async def over(self, stream: Stream, seed: int) -> AsyncIterator[Stream]:
        """The stream as it would be over this connection. `seed` is for jitter and loss."""
        slow = _Slowed(self, stream, seed)
        try:
            yield slow
        finally:
            slow.delivering.cancel()
            await asyncio.gather(slow.delivering, return_exceptions=True)


class _Slowed:
    def __init__(self, connection: Connection, stream: Stream, seed: int):
        self._connection, self._link, self._stream, self._seed = connection, connection.link, stream, seed
        self._own = Line(reno_rate(connection.link))  # what TCP allows this one stream
        self._turn = max(RECORD, TURN * connection.up.rate / 8)
        self._on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._frames, self._due = 0, 0.0
        self._now = asyncio.get_running_loop().time
        self.delivering = asyncio.create_task(self._deliver())

    async def write(self, frame: bytes) -> None:
        """Returns when nearly all of it has left."""
        if self.delivering.done():
            self.delivering.result()  # raises what broke the stream
        ready, left, finish = self._now(), float(wire_bytes(len(frame))), 0.0
        while left > 0:
            part = min(left, self._turn)
            finish = max(self._connection.up.leave(ready, part), self._own.leave(ready, part))
            left -= part
            await self._until(finish - AHEAD)
        self._due = max(self._due, finish + self._delay(frame))
        self._on_the_way.put_nowait((self._due, frame))

    async def read(self) -> bytes:
        frame = await self._stream.read()
        if isinstance(frame, bytes):  # otherwise it is the end
            size, now = len(frame), self._now()
            self._connection.up.leave(now, HEADERS * segments(size) / 2)  # TCP confirms every other segment
            await self._until(self._connection.down.arrive(now, wire_bytes(size)))
        return frame

    async def _deliver(self) -> None:
        while True:
            due, frame = await self._on_the_way.get()
            await self._until(due)
            await self._stream.write(frame)

    async def _until(self, when: float) -> None:
        if (wait := when - self._now()) > 0:
            await asyncio.sleep(wait)

    def _delay(self, frame: bytes) -> float:
        """Latency and jitter, and a round trip more if a segment was lost and had to be sent again."""
        self._frames += 1
        swing, luck = (counter.word(self._seed, 2 * self._frames + i) / 2**64 for i in (0, 1))
        delay = max(0.0, self._link.latency_s + (2 * swing - 1) * self._link.jitter_s)
        lost = luck >= (1 - self._link.loss) ** segments(len(frame))
        return delay + (2 * self._link.latency_s if lost else 0.0)
