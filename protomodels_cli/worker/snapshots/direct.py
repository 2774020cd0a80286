"""This peer's own way to the store, by URLs that the coordinator signs: a part there, a part back.

One try each. Where there is no way, parts go through the coordinator; after a while the store is tried again. It must
not know sessions, stages or credentials.
"""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from protomodels_cli.observe.logs import SNAPSHOTS
from protomodels_cli.wire.cap import Cap
from protomodels_cli.wire.channels import PIECE
from protomodels_cli.wire.store import StoreBroken, StoreRequest, StoreUnreachable
from protomodels_cli.worker import notices
from protomodels_cli.worker.snapshots.flow import Flow
from protomodels_cli.worker.telling import Tell

MOST_FAILURES = 3  # in a row of a store that can be reached
AGAIN = 600.0  # seconds until one that cannot be used is tried again
# Bytes of a fetch that yields: all that a peer can do is to read no more, and these come all the same.
ON_ITS_WAY = 1 << 18
LOOK = 0.002  # seconds between two looks at what has arrived


class StoreAccess:
    def __init__(self, is_direct: bool, tell: Tell, cap: Cap | None = None):
        """`is_direct`: the run has a store for this. These connections do not pass the cap: their bytes wait for it."""
        self._tell, self._told, self._cap = tell, False, cap
        self._failures, self._not_before = 0, 0.0 if is_direct else math.inf

    @property
    def usable(self) -> bool:
        return time.monotonic() >= self._not_before

    async def upload(self, url: str, file: BinaryIO, size: int, sha256: str, flow: Flow) -> bool:
        """Put a file there; false: there is no way. Raises StoreBroken where a retry may help, and OSError where the
        file cannot be read."""
        try:
            with StoreRequest(url) as request:
                await asyncio.to_thread(request.begin_put, size, sha256)
                watching = asyncio.create_task(_watch(request, flow))
                try:
                    await _send(request, file, flow, self._cap)
                finally:
                    watching.cancel()
                await asyncio.to_thread(request.end_put)
        except (StoreUnreachable, StoreBroken) as e:
            if self._may_retry(urlsplit(url).netloc, e):
                raise
            file.seek(0)
            return False
        return True

    def saw(self, url: str, is_there: bool) -> None:
        """Whether the coordinator found there what was put there. Raises StoreBroken where a retry may help."""
        if is_there:
            self._failures = 0
        elif self._may_retry(urlsplit(url).netloc, lost := StoreBroken("it took a part and does not have it")):
            raise lost

    async def fetch(self, url: str, to: Path, flow: Flow) -> bool:
        """Add to a file what is missing; false: there is no way. Raises StoreBroken where a retry may help, and
        OSError where the file cannot be written."""
        try:
            with to.open("ab") as file, StoreRequest(url) as request:
                buffer = None if flow.urgent and self._cap is None else ON_ITS_WAY
                await asyncio.to_thread(request.begin_get, file.tell(), buffer)
                while piece := await asyncio.to_thread(request.receive, await self._turn(flow)):
                    flow.sent(len(piece))
                    flow.unconfirmed(0)
                    await asyncio.to_thread(file.write, piece)
        except (StoreUnreachable, StoreBroken) as e:
            if self._may_retry(urlsplit(url).netloc, e):
                raise
            return False
        self._failures = 0
        return True

    async def _turn(self, flow: Flow) -> int:
        """Bytes to receive."""
        size = await flow.turn()
        if self._cap is not None:
            await self._cap.received(size := min(size, self._cap.piece))
        return size

    def _may_retry(self, host: str, error: StoreUnreachable | StoreBroken) -> bool:
        self._failures += 1
        SNAPSHOTS.warning("a transfer with the store at %s failed: %s", host, error)
        if isinstance(error, StoreBroken) and self._failures < MOST_FAILURES:
            return True
        self._failures, self._not_before = 0, time.monotonic() + AGAIN
        if not self._told:
            self._told = True
            self._tell(notices.StoreNotReached(host, str(error)))
        return False


async def _send(request: StoreRequest, file: BinaryIO, flow: Flow, cap: Cap | None) -> None:
    while block := await asyncio.to_thread(file.read, PIECE):
        while block:
            size = await flow.turn()
            if cap is not None:
                await cap.sent(size := min(size, cap.piece))
            piece, block = block[:size], block[size:]
            if not await asyncio.to_thread(request.send, piece):
                return
            flow.sent(len(piece))


async def _watch(request: StoreRequest, flow: Flow) -> None:
    """The store confirms nothing before the end, but its machine does, to ours."""
    while True:
        flow.unconfirmed(request.unconfirmed)
        await asyncio.sleep(LOOK)
