"""Which steps of a measurement count, and when there are enough of them. Pure.

A machine may be lent for minutes only, and a step over a slow link may take one or two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    warm_up: int  # steps that do not count: compiling, cold caches, the optimizer's first allocations
    steps: int  # that count, at most
    seconds: float  # after this time both end early, with a step each at least

    def counted(self, took: Sequence[float]) -> range:
        """Which of the steps taken so far count, by place."""
        first = self._end_of(took, 0, self.warm_up)
        return range(first, self._end_of(took, first, self.steps))

    def reached(self, took: Sequence[float]) -> bool:
        counted = self.counted(took)
        done = sum(took[counted.start : counted.stop])
        return len(counted) >= self.steps or (len(counted) > 0 and done >= self.seconds)

    def _end_of(self, took: Sequence[float], start: int, most: int) -> int:
        """Where a part that starts here ends: after `most` steps, or the step with which its time is over."""
        done = 0.0
        for at in range(start, min(start + most, len(took))):
            done += took[at]
            if done >= self.seconds:
                return at + 1
        return min(start + most, len(took))
