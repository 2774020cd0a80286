"""A TCP proxy that acts as a cable: it adds latency, and can be cut and repaired. Bytes arrive later, in order."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from protomodels_cli.wire.join_link import JoinLink


class Cable(threading.Thread):
    """Serves on a loopback port in a thread of its own."""

    def __init__(self, one_way: float = 0.0):
        super().__init__(daemon=True)
        self._target, self._port = ("", 0), 0
        self._ready = threading.Event()
        self._one_way, self._loop = one_way, asyncio.new_event_loop()
        self._whole = asyncio.Event()
        self._whole.set()
        self._serving = self._loop.create_task(self._serve())

    def through(self, link: JoinLink) -> JoinLink:
        """A join link to the same run that leads through the cable."""
        self._ready.wait()
        self._target = (link.host, link.port)
        return replace(link, port=self._port)

    def cut(self) -> None:
        """Nothing gets through any more, but connections stay open, as when a router loses its uplink."""
        self._loop.call_soon_threadsafe(self._whole.clear)

    def mend(self) -> None:
        self._loop.call_soon_threadsafe(self._whole.set)

    def run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left))
        self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self.join(timeout=5)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._come_in, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await asyncio.Event().wait()

    async def _come_in(self, reader: StreamReader, writer: StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # the cable is taken up: asyncio's servers do not expect that
            await self._whole.wait()
            try:
                far_reader, far_writer = await asyncio.open_connection(*self._target)
            except OSError:
                writer.transport.abort()
                return
            ways = self._pass_on(reader, far_writer), self._pass_on(far_reader, writer)
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pass_on(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Read at once and write later, so that a delay is no limit on bandwidth."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def write() -> None:
            while True:
                due, chunk = await queue.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                await self._whole.wait()
                if not chunk:
                    writer.close()
                    return
                writer.write(chunk)
                await writer.drain()

        writing = asyncio.create_task(write())
        try:
            while chunk := await reader.read(1 << 16):
                queue.put_nowait((self._loop.time() + self._one_way, chunk))
        finally:
            queue.put_nowait((self._loop.time() + self._one_way, b""))
            with contextlib.suppress(OSError):
                await writing


@contextmanager
def cable(one_way: float = 0.0) -> Iterator[Cable]:
    laid = Cable(one_way)
    laid.start()
    try:
        yield laid
    finally:
        laid.stop()
