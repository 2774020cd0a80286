"""Which call is served next, of those that are counted together: a peer's, or those of one network. Pure: no clock.

A call is silent until its first message has come; then it waits, and takes its turn. The connection that had the fewest
turns comes first, and of several the oldest: a newcomer comes before callers that keep calling, and silent calls are in
nobody's way. Where too many are silent, one of the connection with most of them goes; where too many wait, the last.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

MOST_CONNECTIONS = 10_000  # of which turns are counted; the oldest are forgotten


@dataclass(frozen=True)
class Changes:
    """Calls whose turn it is, and calls that are refused to make room, by number."""

    served: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()


@dataclass
class _Calls:
    """Of one caller: the connection of each call, by the call's number."""

    silent: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    served: set[int] = field(default_factory=set)


class Turns:
    def __init__(self, served: int, silent: int, waiting: int):
        """The most calls of one caller that are served at a time, are silent, and wait."""
        self._most_served, self._most_silent, self._most_waiting = served, silent, waiting
        self._next = 0
        self._callers: dict[int, str] = {}  # by the number of the call
        self._calls: dict[str, _Calls] = {}
        self._turns: dict[int, int] = {}  # that a connection has had

    def come(self, caller: str, connection: int) -> tuple[int, Changes]:
        """The number of a call that has just come, and says nothing yet."""
        self._next += 1
        number, calls = self._next, self._calls.setdefault(caller, _Calls())
        self._callers[number] = caller
        calls.silent[number] = connection
        if len(calls.silent) <= self._most_silent:
            return number, Changes()
        count = Counter(calls.silent.values())
        dropped = max(calls.silent, key=lambda one: (count[calls.silent[one]], one))
        del calls.silent[dropped]
        return number, Changes(dropped=(dropped,))

    def said(self, number: int) -> Changes:
        """The first message of this call has come."""
        calls = self._calls[self._callers[number]]
        if number not in calls.silent:
            return Changes()
        calls.waiting[number] = calls.silent.pop(number)
        served = self._serve(calls)
        if len(calls.waiting) > self._most_waiting:
            last = max(calls.waiting, key=lambda one: self._order(calls, one))
            del calls.waiting[last]
            return Changes(served, (last,))
        return Changes(served)

    def end(self, number: int) -> Changes:
        """This call is over, however far it came."""
        caller = self._callers.pop(number)
        calls = self._calls[caller]
        calls.silent.pop(number, None)
        calls.waiting.pop(number, None)
        calls.served.discard(number)
        served = self._serve(calls)
        if not (calls.silent or calls.waiting or calls.served):
            del self._calls[caller]
        return Changes(served)

    def _serve(self, calls: _Calls) -> tuple[int, ...]:
        served = []
        while calls.waiting and len(calls.served) < self._most_served:
            first = min(calls.waiting, key=lambda one: self._order(calls, one))
            connection = calls.waiting.pop(first)
            calls.served.add(first)
            self._turns[connection] = self._turns.pop(connection, 0) + 1
            if len(self._turns) > MOST_CONNECTIONS:
                del self._turns[next(iter(self._turns))]
            served.append(first)
        return tuple(served)

    def _order(self, calls: _Calls, number: int) -> tuple[int, int, int]:
        connection = calls.waiting[number]
        return self._turns.get(connection, 0), connection, number
