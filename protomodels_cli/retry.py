"""Retries: exponential backoff with jitter, and when to give up. The one rule for every loop that retries.

Knows time and chance. Must not know what is retried, nor report anything.
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
    """Waits that double from `first` to `longest` seconds, each shortened at random by up to `jitter` of its length, so
    that many peers do not reconnect all at once.

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
        """After a success: the next failure counts as the first."""
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
    on_failure: Callable[[Exception], None] = lambda error: None,
) -> T:
    """Retry `work` until it returns. After a failure of the types `on`, `on_failure` is called (it may raise instead)
    and the backoff waited for; the failure at which `backoff` gives up is raised."""
    while True:
        try:
            return await work()
        except on as error:
            wait = backoff.after_failure(time.monotonic())
            if wait is None:
                raise
            on_failure(error)
        await asyncio.sleep(wait)
