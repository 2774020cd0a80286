"""One transfer at its pace: waits for its turns, and tells the pace what was sent and what has arrived.

It must not know what the bytes are of, nor how they travel.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from protomodels_cli.worker.snapshots.pacing import Pace


class Throttle:
    """Lets at most so many bits a second pass. It must not know what they are of."""

    def __init__(self, bits_per_second: float | None):
        self._rate, self._free_at = bits_per_second, 0.0

    async def wait(self, size: int) -> None:
        if self._rate is None:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + 8 * size / self._rate
        await asyncio.sleep(self._free_at - now)


class Flow:
    """`needed` says whether this peer's stage needs the line that the transfer uses."""

    def __init__(self, pace: Pace, needed: Callable[[], bool], throttle: Throttle):
        self._pace, self._needed, self._throttle = pace, needed, throttle
        self._news = asyncio.Event()  # something has arrived
        self._now = asyncio.get_running_loop().time
        self._left: deque[tuple[float, int]] = deque()  # when pieces left that have not arrived, and their bytes

    @property
    def urgent(self) -> bool:
        return self._pace.urgent

    @property
    def on_the_way(self) -> int:
        """Bytes that have not arrived."""
        return self._pace.in_flight

    async def turn(self) -> int:
        """Returns when a piece may go, and how many bytes it may have."""
        while True:
            self._news.clear()
            size, pause = self._pace.next_piece(self._now(), self._needed())
            if size:
                await self._throttle.wait(size)
                return size
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._news.wait()

    def sent(self, size: int) -> None:
        self._pace.sent(self._now(), size)
        self._left.append((self._now(), size))

    def arrived_there(self, clock: float) -> None:
        """The next piece has arrived at the coordinator, when its clock said this."""
        left, size = self._left.popleft()
        self._note(size, clock - left, left)

    def arrived_here(self, clock: float) -> int:
        """The next piece that was asked for has arrived, which left when the coordinator's clock said this. Returns how
        many bytes it was to have."""
        left, size = self._left.popleft()
        self._note(size, self._now() - clock, left)
        return size

    def unconfirmed(self, size: int) -> None:
        """The last so many bytes that were sent, at most, have not arrived."""
        while self._left and self._pace.in_flight - self._left[0][1] >= size:
            left, piece = self._left.popleft()
            self._note(piece, self._now() - left, left)

    def _note(self, size: int, delay: float, left: float) -> None:
        self._pace.arrived(self._now(), size, delay, self._now() - left)
        self._news.set()
