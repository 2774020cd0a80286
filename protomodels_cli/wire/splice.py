"""Two TCP connections made into one: bytes go both ways, slowly if a reader is slow, until both ends have finished.

Knows streams of bytes. It must not know what they mean, nor who is at either end.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable

Stream = tuple[StreamReader, StreamWriter]
FORTH, BACK = 0, 1  # from a to b, from b to a
Watch = Callable[[int, int], None]  # direction and bytes, before they are passed on; raises to cut the connection
CHUNK = 64 * 1024
LINGER_SECONDS = 60.0  # how long one direction may be idle after the other has ended
FLUSH_SECONDS = 5.0
KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


async def splice(a: Stream, b: Stream, watch: Watch | None = None) -> None:
    """Pipe a and b into each other; closes both at the end.

    The end of one direction is passed on as a half-close. A connection that breaks ends both directions and is no
    error here; what `watch` raises is passed on.
    """
    moved = [0, 0]
    pumps = [
        asyncio.create_task(_pump(a[0], b[1], FORTH, moved, watch)),
        asyncio.create_task(_pump(b[0], a[1], BACK, moved, watch)),
    ]
    try:
        await _until_ended(pumps, moved)
        for pump in pumps:
            if pump.done() and (error := pump.exception()) and not isinstance(error, OSError):
                raise error
            pump.cancel()
        await asyncio.gather(hang_up(a[1]), hang_up(b[1]))
    finally:
        for pump in pumps:
            pump.cancel()
        for _, writer in (a, b):
            writer.transport.abort()
        await asyncio.gather(*pumps, return_exceptions=True)


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
    """Small messages leave at once, and an idle link to a machine that vanished ends within a minute and a half."""
    connection = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):  # it may be gone already
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # macOS lacks some
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _pump(reader: StreamReader, writer: StreamWriter, way: int, moved: list[int], watch: Watch | None) -> None:
    while chunk := await reader.read(CHUNK):
        if watch is not None:
            watch(way, len(chunk))
        writer.write(chunk)
        await writer.drain()  # the next read waits until the other side takes more: this is the backpressure
        moved[way] += len(chunk)
    writer.write_eof()


async def _until_ended(pumps: list[asyncio.Task[None]], moved: list[int]) -> None:
    """Return when both have ended, one has failed, or one has ended and the other has been idle for too long."""
    done, running = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    while running and not any(pump.exception() for pump in done):
        before = sum(moved)
        more, running = await asyncio.wait(running, timeout=LINGER_SECONDS)
        done |= more
        if not more and sum(moved) == before:
            return
