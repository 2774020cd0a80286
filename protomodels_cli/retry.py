"""When to try again, and when to give up: one rule for every loop that waits for somebody to come back.

Knows time and chance. It must not know what is tried, nor say anything about it.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class Backoff:
    """Waits that double from `first` to `longest` seconds, each shortened at random by up to `jitter` of itself, so
    that many peers do not come back all at once.

    Pure: the time is given to it. It gives up `give_up_after` seconds after the first failure, or after `most_tries`.
    """

    def __init__(
        self,
        first: float,
        longest: float | None = None,  # None: all waits are like the first
        *,
        jitter: float = 0.5,
        give_up_after: float = math.inf,
        most_tries: float = math.inf,
        chance: Callable[[], float] = random.random,
    ):
        self._first, self._longest = first, first if longest is None else longest
        self._jitter, self._chance, self._most_tries = jitter, chance, most_tries
        self.give_up_after = give_up_after
        self.failures, self._since = 0, 0.0  # in a row, and the time of the first

    def reset(self) -> None:
        """It worked: the next failure is the first again."""
        self.failures = 0

    def after_failure(self, now: float) -> float | None:
        """Seconds to wait before the next try; None: give up."""
        if self.failures == 0:
            self._since = now
        self.failures += 1
        left = self.give_up_after - (now - self._since)
        if left <= 0 or self.failures >= self._most_tries:
            return None
        wait = min(self._first * 2.0 ** min(self.failures - 1, 64), self._longest)
        return min(wait * (1 - self._jitter * self._chance()), left)


async def retry(
    work: Callable[[], Awaitable[T]],
    backoff: Backoff,
    on: type[Exception] | tuple[type[Exception], ...],
    heard: Callable[[Exception], None] = lambda error: None,
) -> T:
    """What `work` returns at last. A failure of the kinds `on` is waited out, after `heard` was told of it (which may
    raise instead); the one at which `backoff` gives up is raised."""
    while True:
        try:
            return await work()
        except on as error:
            wait = backoff.after_failure(time.monotonic())
            if wait is None:
                raise
            heard(error)
        await asyncio.sleep(wait)
