"""This counts refused calls by the network that they came from. Pure.

The owner is told of the tenth, the hundredth, the thousandth. An honest peer may be refused once or twice, and asks
again.
"""

from __future__ import annotations

from collections import Counter

from protomodels_cli.coordinator.notices import TurnedAway, Unwanted

FIRST = 10
MOST_KEPT = 1000  # networks; the oldest are forgotten


class RefusedCalls:
    def __init__(self) -> None:
        self._times: Counter[tuple[str, Unwanted]] = Counter()

    def note(self, network: str, what: Unwanted, peer: str = "") -> TurnedAway | None:
        """What the owner is told of one more such call. `peer`: who made it, where that is known."""
        key = network, what
        times = self._times.pop(key, 0) + 1
        self._times[key] = times
        if len(self._times) > MOST_KEPT:
            del self._times[next(iter(self._times))]
        is_round = times >= FIRST and str(times).rstrip("0") == "1"
        return TurnedAway(network, what, times, peer) if is_round else None
