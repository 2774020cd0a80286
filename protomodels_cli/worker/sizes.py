"""How large what arrives is, beside what arrived in the last steps that were applied. Pure: numbers in, a ratio out.

It refuses nothing: a run that diverges has honest numbers of any size. What is a thousand times as large as anything of
late is worth a name in the books, and nothing else notices it before the loss does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import isfinite

STEPS, LEAST = 32, 4  # applied steps that are remembered, and how many of them there must be
MOST = 1e30  # that is said: JSON has no infinity


class Sizes:
    """Of one leg."""

    def __init__(self) -> None:
        self._largest: deque[float] = deque(maxlen=STEPS)
        self._now = 0.0

    def see(self, sizes: Iterable[float]) -> None:
        """The root mean squares of a step's messages."""
        self._now = max(sizes, default=0.0)

    @property
    def grown(self) -> float:
        """How often the largest of the last steps fits into the largest of this one; 0: there is nothing to compare."""
        if len(self._largest) < LEAST or not (largest := max(self._largest)):
            return 0.0
        ratio = self._now / largest
        return min(ratio, MOST) if isfinite(ratio) else MOST

    def decide(self, apply: bool) -> None:
        """What a skipped step had is not remembered: it may be what it was skipped for."""
        if apply and isfinite(self._now):
            self._largest.append(self._now)
        self._now = 0.0
