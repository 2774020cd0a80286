"""A TCP proxy that delays: what goes in comes out later, in order, each way by the same time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from protomodels_cli.wire.link import JoinLink


async def _pass_on(reader: StreamReader, writer: StreamWriter, seconds: float) -> None:
    """Read at once and write `seconds` later, so that a delay is no limit on bandwidth."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def write() -> None:
        while True:
            due, chunk = await queue.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not chunk:
                writer.close()
                return
            writer.write(chunk)
            await writer.drain()

    writing = asyncio.create_task(write())
    try:
        while chunk := await reader.read(1 << 16):
            queue.put_nowait((loop.time() + seconds, chunk))
    finally:
        queue.put_nowait((loop.time() + seconds, b""))
        with contextlib.suppress(OSError):
            await writing


class _Proxy(threading.Thread):
    """Serves on a loopback port in a thread of its own."""

    def __init__(self, one_way: float):
        super().__init__(daemon=True)
        self.target = ("", 0)
        self.port = 0
        self.ready = threading.Event()
        self._one_way, self._loop = one_way, asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve())

    def run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self.join(timeout=5)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._come_in, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self.ready.set()
        await asyncio.Event().wait()

    async def _come_in(self, reader: StreamReader, writer: StreamWriter) -> None:
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(*self.target)
            ways = _pass_on(reader, far_writer, self._one_way), _pass_on(far_reader, writer, self._one_way)
            await asyncio.gather(*ways, return_exceptions=True)


@contextmanager
def delayed(one_way: float) -> Iterator[Callable[[JoinLink], JoinLink]]:
    """Gives a function that leads a link through a port with this delay each way."""
    proxy = _Proxy(one_way)
    proxy.start()
    proxy.ready.wait()

    def through(link: JoinLink) -> JoinLink:
        proxy.target = (link.host, link.port)
        return replace(link, port=proxy.port)

    try:
        yield through
    finally:
        proxy.stop()
