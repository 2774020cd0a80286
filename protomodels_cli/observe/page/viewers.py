"""Viewers of the page: each event is made once, as bytes, and handed to all of them, a few at a time.

A viewer has room for one event. Whoever has not read it when the next one comes is given everything as it is then,
and whoever reads nothing for long is let go: nobody waits for anybody.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from protomodels_cli.observe.page.contents import Contents

EVERY = 1.0  # seconds between two events
FEW = 16  # viewers that are handed an event at once: a decision that comes meanwhile waits for no more of them
PATIENCE = 20.0  # seconds in which a viewer must read something
Write = Callable[[bytes], Awaitable[None]]


class Viewer:
    def __init__(self) -> None:
        self._next: bytes | None = None
        self._behind, self._over = False, False
        self._changed = asyncio.Event()

    def offer(self, event: bytes) -> None:
        self._behind |= self._next is not None
        self._next = event
        self._changed.set()

    def end(self) -> None:
        """After what was offered last."""
        self._over = True
        self._changed.set()

    async def next(self, whole: Callable[[], bytes]) -> bytes | None:
        """What to send next; None: it is over."""
        while self._next is None:
            if self._over:
                return None
            self._changed.clear()
            await self._changed.wait()
        event, behind = self._next, self._behind
        self._next, self._behind = None, False
        return whole() if behind else event


class Viewers:
    def __init__(self, contents: Contents):
        self._contents = contents
        self._here: set[Viewer] = set()
        self._whole: bytes | None = None  # as of the last event; None: nobody has asked since
        self._ticking: asyncio.Task[None] | None = None
        self._ready = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._here)

    async def serve(self, write: Write) -> bool:
        """Until the viewer goes, which `write` raises, or the page is closed; False: until it was too slow."""
        viewer = Viewer()
        async with self._ready:
            if self._ticking is None or self._ticking.done():  # nobody was here: the files may have grown long
                await self._contents.catch_up()
                self._whole = None
                self._here.add(viewer)
                self._ticking = asyncio.create_task(self._tick())
        self._here.add(viewer)
        try:
            event: bytes | None = self._everything()
            while event is not None:
                async with asyncio.timeout(PATIENCE):
                    await write(event)
                event = await viewer.next(self._everything)
            return True
        except TimeoutError:
            return False
        finally:
            self._here.discard(viewer)

    def _everything(self) -> bytes:
        if self._whole is None:
            self._whole = as_event(self._contents.whole(self._contents.state()))
        return self._whole

    async def _tick(self) -> None:
        """While there are viewers."""
        while self._here:
            await asyncio.sleep(EVERY)
            await self._send()

    async def _send(self) -> None:
        await self._contents.catch_up()
        self._whole = None
        event = as_event(self._contents.news(self._contents.state()))
        here = list(self._here)
        for first in range(0, len(here), FEW):
            for viewer in here[first : first + FEW]:
                viewer.offer(event)
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Send how it ended, and let all go."""
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking
        if self._here:
            await self._send()
        for viewer in self._here:
            viewer.end()


def as_event(data: bytes) -> bytes:
    """In the form of server-sent events; JSON has no line breaks."""
    return b"data: " + data + b"\n\n"
