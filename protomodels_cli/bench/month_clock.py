"""Virtual time: what happens when, and pieces of work that stand while one of their peers is away."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Work:
    """Something that takes a while, of peers that must all be up for it to go on."""

    __slots__ = ("left", "owners", "since", "then", "turn")

    def __init__(self, seconds: float, owners: frozenset[str], then: Callable[[], None]):
        self.left, self.owners, self.then = seconds, owners, then
        self.since: float | None = None  # it goes on since then; None: it stands
        self.turn = 0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._up: set[str] = set()
        self._works: dict[str, set[Work]] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: float, do: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (when, self._count, do))

    def next(self, before: float) -> tuple[float, Callable[[], None]] | None:
        """What comes next, and when; None: nothing before then."""
        if not self._queue or self._queue[0][0] >= before:
            return None
        when, _, do = heapq.heappop(self._queue)
        return when, do

    def is_up(self, peer: str) -> bool:
        return peer in self._up

    def rise(self, peer: str) -> None:
        self._up.add(peer)
        for work in list(self._works.setdefault(peer, set())):
            self._go_on(work)

    def fall(self, peer: str) -> None:
        self._up.discard(peer)
        for work in self._works[peer]:
            self._stand(work)

    def begin(self, seconds: float, owners: frozenset[str], then: Callable[[], None]) -> Work:
        work = Work(seconds, owners, then)
        for peer in owners:
            self._works[peer].add(work)
        self._go_on(work)
        return work

    def drop(self, work: Work) -> None:
        self._stand(work)
        for peer in work.owners:
            self._works[peer].discard(work)

    def _go_on(self, work: Work) -> None:
        if work.since is None and work.owners <= self._up:
            work.since, work.turn = self.now, work.turn + 1
            turn = work.turn
            self.at(self.now + work.left, lambda: self._end(work) if work.turn == turn else None)

    def _stand(self, work: Work) -> None:
        if work.since is not None:
            work.left -= self.now - work.since
            work.since, work.turn = None, work.turn + 1

    def _end(self, work: Work) -> None:
        self.drop(work)
        work.then()
