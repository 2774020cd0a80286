"""Two TCP connections made into one: bytes go both ways, slowly if a reader is slow, until both ends have finished.

Knows streams of bytes. It must not know what they mean, nor who is at either end.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Sequence
from typing import cast

Stream = tuple[StreamReader, StreamWriter]
FORTH, BACK = 0, 1  # from a to b, from b to a
# Direction and bytes, before they are passed on; raises to cut the connection; returns seconds to read nothing, if any.
Watch = Callable[[int, int], float | None]
LINGER_SECONDS = 60.0  # how long one direction may be idle after the other has ended
FLUSH_SECONDS = 5.0
# Seconds, the last in milliseconds. Routers may forget a connection that is idle for 5 s, and what was sent and not
# confirmed for 6 s goes to nobody.
KEEPALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 6000}


async def splice(a: Stream, b: Stream, watch: Watch | None = None) -> None:
    """Pipe a and b into each other; closes both at the end.

    The end of one direction is passed on as a half-close. A connection that breaks ends both directions and is no
    error here; what `watch` raises is passed on.
    """
    moved = [0, 0]
    pumps = [Pump(stream[1], way, moved, watch) for way, stream in enumerate((a, b))]
    for pump, other in (pumps, pumps[::-1]):
        pump.other = other
    ends = [pump.ended for pump in pumps]
    try:
        for pump in pumps:
            pump.take_over()
        for (reader, _), pump in zip((a, b), pumps, strict=True):
            await pump.pass_on(reader)
        await _until_ended(ends, moved)
        for end in ends:
            if end.done() and (error := end.exception()) and not isinstance(error, OSError):
                raise error
        await asyncio.gather(hang_up(a[1]), hang_up(b[1]))
    finally:
        for _, writer in (a, b):
            writer.transport.abort()
        await asyncio.gather(*(pump.stop() for pump in pumps), return_exceptions=True)


async def hang_up(writer: StreamWriter) -> None:
    """Close after what was written has left; a reader that does not take it is not waited for."""
    try:
        async with asyncio.timeout(FLUSH_SECONDS):
            writer.close()
            await writer.wait_closed()
    except OSError:  # TimeoutError is one
        pass
    finally:
        writer.transport.abort()


async def send_last(writer: StreamWriter, content: bytes) -> None:
    """Send this and close the connection."""
    writer.write(content)
    await hang_up(writer)


def tune(writer: StreamWriter) -> None:
    """Small messages leave at once, and a connection to a machine that vanished ends within seconds."""
    connection = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):  # it may be gone already
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # macOS lacks some
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Pump(asyncio.Protocol):
    """What arrives on one connection is written to the other within the same callback. With a reader, a task and a
    writer between them this took a third of the time of a coordinator with a thousand peers, and now half of that."""

    other: Pump  # the opposite direction

    def __init__(self, source: StreamWriter, way: int, moved: list[int], watch: Watch | None):
        self._source = cast(asyncio.Transport, source.transport)
        self._way, self._moved, self._watch = way, moved, watch
        self._before = self._source.get_protocol()
        self._is_full = False  # of what was written to this side
        self._rests = False  # what comes from this side has to wait
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take_over(self) -> None:
        """From the connection's reader. Both sides, before any byte is passed on: who does not take them says so."""
        self._source.pause_reading()
        self._source.set_protocol(self)

    async def pass_on(self, reader: StreamReader) -> None:
        """What the connection's reader has read ahead, and then whatever comes."""
        reader.feed_eof()  # nothing more comes its way: what is there is read without waiting
        try:
            if early := await reader.read():
                self.data_received(early)
        except OSError as error:
            self._end(error)
        if self._source.is_closing():
            self._end(ConnectionResetError())
        if not self.other._is_full and not self._rests:
            self._source.resume_reading()  # an end that the reader has seen already is seen again

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        rest = None
        try:
            if self._watch is not None:
                rest = self._watch(self._way, len(data))
        except Exception as error:
            self._end(error)
            return
        self._moved[self._way] += len(data)
        self.other._source.write(data)
        if rest:
            self._rests = True
            self._source.pause_reading()
            asyncio.get_running_loop().call_later(rest, self._go_on)

    def _go_on(self) -> None:
        self._rests = False
        if not self.other._is_full and not self.ended.done():
            self._source.resume_reading()

    def eof_received(self) -> bool:
        if not self.ended.done():
            self.other._source.write_eof()
            self._end(None)
        return True  # the other direction goes on

    def pause_writing(self) -> None:
        """This side does not take what was written to it: no more is read for it. This is the backpressure."""
        self._is_full = True
        self.other._source.pause_reading()

    def resume_writing(self) -> None:
        self._is_full = False
        if not self.other._rests:
            self.other._source.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._before.connection_lost(exc)  # whoever waits for the stream's end waits for it there
        for pump in (self, self.other):
            pump._end(exc or ConnectionResetError())

    def _end(self, error: Exception | None) -> None:
        if not self.ended.done():
            if error is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(error)

    async def stop(self) -> None:
        self.ended.cancel()
        await self.ended  # looked at: asyncio would report an exception as forgotten


async def _until_ended(pumps: Sequence[asyncio.Future[None]], moved: list[int]) -> None:
    """Return when both have ended, one has failed, or one has ended and the other has been idle for too long."""
    done, running = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    while running and not any(pump.exception() for pump in done):
        before = sum(moved)
        more, running = await asyncio.wait(running, timeout=LINGER_SECONDS)
        done |= more
        if not more and sum(moved) == before:
            return
