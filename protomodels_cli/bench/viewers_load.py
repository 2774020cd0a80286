"""Viewers of a page, as a load: so many connections that read what comes. And a stand-in for the page at another port,
which hands the page's own events to as many: the same bytes at the same times, by a process that leads no run.

    python -m protomodels_cli.bench.viewers_load watch URL COUNT
    python -m protomodels_cli.bench.viewers_load relay URL
"""

from __future__ import annotations

import asyncio
import sys
from urllib.parse import urlsplit

REQUEST = b"GET /events HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n"
OPENING = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
AT_ONCE = 20  # connections that are opened at the same time
MOST = 1 << 20  # bytes that may wait for one viewer


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(REQUEST)
    return reader, writer


async def watch(url: str, count: int) -> None:
    """Says how many have heard something, once all have."""
    door, heard = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(0)

    async def one() -> None:
        async with door:
            reader, _ = await _connect(url)
            await reader.readuntil(b"data: ")
        heard.release()
        while await reader.read(1 << 16):
            pass

    viewers = [asyncio.create_task(one()) for _ in range(count)]
    for _ in range(count):
        await heard.acquire()
    print(count, flush=True)
    await asyncio.gather(*viewers)


async def relay(url: str) -> None:
    """Says its port."""
    viewers: set[asyncio.StreamWriter] = set()

    async def come_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OPENING)
        viewers.add(writer)

    server = await asyncio.start_server(come_in, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    reader, _ = await _connect(url)
    while piece := await reader.read(1 << 16):
        for writer in list(viewers):
            if writer.transport.is_closing() or writer.transport.get_write_buffer_size() > MOST:
                viewers.discard(writer)
            else:
                writer.write(piece)


if __name__ == "__main__":
    what, address, *more = sys.argv[1:]
    asyncio.run(watch(address, int(more[0])) if what == "watch" else relay(address))
