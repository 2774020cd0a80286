"""This peer's own way to the store, by URLs that the coordinator signs: a part there, a part back.

One try each. Where there is no way, parts go through the coordinator; after a while the store is tried again. It must
not know sessions, stages or credentials.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from protomodels_cli.observe.logs import SNAPSHOTS
from protomodels_cli.wire.channels import PIECE
from protomodels_cli.wire.store import StoreBroken, StoreRequest, StoreUnreachable
from protomodels_cli.worker import notices
from protomodels_cli.worker.telling import Tell

Wait = Callable[[int], Awaitable[None]]  # until so many bytes may pass
MOST_FAILURES = 3  # in a row of a store that can be reached
AGAIN = 600.0  # seconds until one that cannot be used is tried again


class StoreAccess:
    def __init__(self, is_direct: bool, tell: Tell):
        """`is_direct`: the run has a store for this."""
        self._tell, self._told = tell, False
        self._failures, self._not_before = 0, 0.0 if is_direct else math.inf

    @property
    def usable(self) -> bool:
        return time.monotonic() >= self._not_before

    async def upload(self, url: str, file: BinaryIO, size: int, sha256: str, wait: Wait) -> bool:
        """Put a file there; false: there is no way. Raises StoreBroken where a retry may help, and OSError where the
        file cannot be read."""
        try:
            with StoreRequest(url) as request:
                await asyncio.to_thread(request.begin_put, size, sha256)
                while piece := await asyncio.to_thread(file.read, PIECE):
                    await wait(len(piece))
                    if not await asyncio.to_thread(request.send, piece):
                        break
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

    async def fetch(self, url: str, to: Path, wait: Wait) -> bool:
        """Add to a file what is missing; false: there is no way. Raises StoreBroken where a retry may help, and
        OSError where the file cannot be written."""
        try:
            with to.open("ab") as file, StoreRequest(url) as request:
                await asyncio.to_thread(request.begin_get, file.tell())
                while piece := await asyncio.to_thread(request.receive):
                    await asyncio.to_thread(file.write, piece)
                    await wait(len(piece))
        except (StoreUnreachable, StoreBroken) as e:
            if self._may_retry(urlsplit(url).netloc, e):
                raise
            return False
        self._failures = 0
        return True

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
