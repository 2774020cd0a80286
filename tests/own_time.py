"""An event loop with a clock of its own, for what is about time and not about this machine."""

from __future__ import annotations

import asyncio


class OwnTime(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next thing due: seconds pass at once, and a busy machine changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._now, look = 0.0, self._selector.select

        def jump(timeout: float | None) -> list:
            self._now += timeout or 0.0
            return look(0)

        self._selector.select = jump

    def time(self) -> float:
        return self._now


def in_own_time(work):
    with asyncio.Runner(loop_factory=OwnTime) as runner:
        return runner.run(work)
