"""How many messages a peer may send: a token bucket. Pure."""

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
