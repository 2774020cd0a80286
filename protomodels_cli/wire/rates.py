"""How much of something one may do: token buckets. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rate:
    """Tokens that come back a second, and the most that there can be."""

    per_second: float
    burst: float


@dataclass(frozen=True)
class Bucket:
    tokens: float  # left
    at: float  # when that was so, in seconds

    @classmethod
    def full(cls, rate: Rate, now: float) -> Bucket:
        return cls(rate.burst, now)

    def give(self, rate: Rate, tokens: float) -> Bucket:
        """With these on top, as far as there is room."""
        return Bucket(min(rate.burst, self.tokens + tokens), self.at)

    def take(self, rate: Rate, tokens: float, now: float) -> Bucket | None:
        """What is left after these were taken; None: there are not so many."""
        left = min(rate.burst, self.tokens + rate.per_second * max(0.0, now - self.at)) - tokens
        return None if left < 0 else Bucket(left, max(self.at, now))


class Buckets:
    """One for each of many, of the same rate. Those that are full again say nothing, and make room."""

    def __init__(self, rate: Rate, most: int = 10_000):
        self.rate, self._most = rate, most
        self._buckets: dict[str, Bucket] = {}

    def take(self, name: str, now: float) -> bool:
        """Whether there was a token left for it."""
        left = self._buckets.get(name, Bucket.full(self.rate, now)).take(self.rate, 1, now)
        if left is not None:
            if len(self._buckets) >= self._most:
                empty = {n: b for n, b in self._buckets.items() if b.take(self.rate, self.rate.burst, now) is None}
                self._buckets = empty if len(empty) < self._most else {}
            self._buckets[name] = left
        return left is not None
