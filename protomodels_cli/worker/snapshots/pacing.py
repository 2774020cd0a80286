"""How much of a part may be on its way beside activations on the same line. Pure: the time is given to it.

Two signs say that a line is needed for something else. What this peer's own stage has on it is known exactly: then a
part has its least rate, and nothing more. What others have on it (another machine at home, say) shows as delay: pieces
take longer than the fastest did, since they wait in some router's queue. As much may be on its way as keeps that wait
short, whosever queue it is and however long it could grow (as LEDBAT does, RFC 6817).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from protomodels_cli.wire.channels import PIECE

TARGET = 0.005  # seconds that a piece may wait in a queue on its way
SMALLEST = 1 << 14  # bytes of a piece: 1.7 ms at 80 Mbit/s
PIECES = 16  # in a window: the longer and wider the line, the larger they are
GROWTH = 1 / 8  # of a window in a round trip, while nothing waits in queues
LEAST_WINDOW, MOST_WINDOW = 2 * SMALLEST, 16 << 20
SAMPLES = 8  # of delays, of which the least counts: a busy machine is late now and then
MEMORY = 60.0  # seconds after which a least delay is forgotten, at least: routes change, and clocks drift
LOOK = 0.005  # seconds after which a line that was needed is looked at again
STALLED = 1.0  # seconds of the least rate that may be on their way before nothing follows


@dataclass(frozen=True)
class Activations:
    """What this peer's stage has on its line right now."""

    leaving: Callable[[], bool]  # messages to its neighbours wait to be sent
    awaited: Callable[[], bool]  # it has nothing left to compute until a message comes


NO_STAGE = Activations(lambda: False, lambda: False)


class Pace:
    """Of one transfer, in one direction. At least `least` bytes a second go, so that it ends. `urgent`: somebody waits
    for it, and it yields to nothing."""

    def __init__(self, least: float, urgent: bool = False):
        self._least, self.urgent = least, urgent
        self._window = float(MOST_WINDOW if urgent else LEAST_WINDOW)
        self._is_new = True  # nothing has waited yet: the window doubles
        self._sent = self.delivered = 0
        self._disturbed = 0  # bytes sent before the line was last needed: their delay says nothing of others
        self._due = -math.inf  # when the least rate demands the next piece
        self._next = -math.inf  # when the next one may go: a window is spread over a round trip
        self._round_trip = math.inf  # the shortest
        self._delays: deque[float] = deque(maxlen=SAMPLES)
        self._shortest, self._shortest_before, self._since = math.inf, math.inf, -math.inf

    @property
    def in_flight(self) -> int:
        return self._sent - self.delivered

    def next_piece(self, now: float, needed: bool) -> tuple[int, float]:
        """How many bytes may go now; if none, after how many seconds to ask again at the latest. `needed`: this peer's
        stage needs the line."""
        if needed and not self.urgent:
            self._disturbed = self._sent
        elif self.in_flight + self._piece <= self._window:
            if now >= self._next:
                return self._piece, 0.0
            return 0, self._next - now
        if self.urgent:
            return 0, STALLED
        if self.in_flight >= max(self._window, STALLED * self._least):
            return 0, LOOK
        if now >= self._due:
            return SMALLEST, 0.0
        return 0, min(LOOK, self._due - now)

    @property
    def _piece(self) -> int:
        return int(min(max(self._window / PIECES, SMALLEST), PIECE))

    def sent(self, now: float, size: int) -> None:
        self._sent += size
        self._due = now + size / self._least
        if not self.urgent and math.isfinite(self._round_trip):
            self._next = now + size / self._window * self._round_trip

    def arrived(self, now: float, size: int, delay: float, round_trip: float) -> None:
        """The next bytes in order have arrived. `delay`: their seconds on the way, by clocks that need not agree;
        `round_trip`: until that was known, by this clock."""
        was_used, self.delivered = self.in_flight > self._window / 2, self.delivered + size
        if self.urgent:
            return
        self._round_trip = min(self._round_trip, round_trip)
        if now - self._since > MEMORY:
            self._shortest_before, self._shortest, self._since = self._shortest, delay, now
        self._shortest = min(self._shortest, delay)
        if self.delivered <= self._disturbed:
            return
        self._delays.append(delay)
        waited = min(self._delays) - min(self._shortest, self._shortest_before)
        spare = max(-1.0, (TARGET - waited) / TARGET)
        if spare < 0:
            self._is_new = False
            self._window += spare * size / 2
        elif was_used:
            self._window += size if self._is_new else spare * size * GROWTH
        self._window = min(max(self._window, LEAST_WINDOW), MOST_WINDOW)
