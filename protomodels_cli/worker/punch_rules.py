"""When two neighbours whose routers let nobody in try to connect at once, to where, and when they leave it. Pure.

A router that gives a local port the same outside port whomever it talks to can be met that way; one that gives every
connection another port cannot. Nobody is dialled but where the coordinator has seen the neighbour.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import get_args

from protomodels_cli import timeouts
from protomodels_cli.wire.join_link import Address
from protomodels_cli.wire.path import NotPunched

FIRST = 1.0  # seconds that a link is relayed before the first try
AGAIN, LONGEST = 20.0, 3600.0  # seconds after the first failure, and at most
CHANGES_AGAIN, CHANGES_LONGEST = 600.0, 6 * 3600.0  # after it was seen that it cannot work
SHORT_LIFE = 30.0  # seconds: a connection that breaks sooner is a failure as well


def outside(seen: Sequence[Address]) -> Address | NotPunched:
    """Where a neighbour can meet the port that these observers have seen."""
    if not seen:
        return "not_seen"
    return seen[0] if len(set(seen)) == 1 else "port_changes"


def target(host: str, port: int, known: Collection[str]) -> Address | NotPunched:
    """Where to connect to, for what the neighbour says of itself. `known`: at which the coordinator has seen it, or
    reached it."""
    if not known:
        return "not_listening"
    return (host, port) if host in known and 1 <= port <= 65535 else "other_address"


def family_hosts(known: Iterable[str]) -> list[str]:
    """Of these addresses those of one family: both ends need the same, and IPv4 is where routers translate."""
    hosts = list(known)
    return [host for host in hosts if ":" not in host] or hosts


def checked_why(text: str) -> NotPunched:
    """As the neighbour says."""
    return next((why for why in get_args(NotPunched) if why == text), "not_seen")


class Turns:
    """When this end tries next, and whether it answers: longer and longer after failures, and much longer once a router
    was seen to give every connection another port."""

    def __init__(self) -> None:
        self._failures, self._until, self._answered = 0, 0.0, float("-inf")
        self.why = ""  # the last try failed; empty: none has, or the last did not

    def is_due(self, now: float) -> bool:
        return now >= self._until

    def failed(self, why: str, now: float) -> None:
        first, longest = (CHANGES_AGAIN, CHANGES_LONGEST) if why.startswith("port_changes") else (AGAIN, LONGEST)
        self._until = now + min(first * 2.0 ** min(self._failures, 16), longest)
        self._failures += 1
        self.why = why

    def opened(self) -> None:
        self.why = ""

    def broke(self, lived: float, now: float) -> None:
        """A connection that had opened, after so many seconds."""
        if lived < SHORT_LIFE:
            self.failed("not_opened", now)
        else:
            self._failures, self._until = 0, 0.0

    def answers(self, now: float) -> bool:
        """Whether an offer is answered: a neighbour that makes one after the other costs nothing."""
        if now - self._answered < timeouts.PUNCH_OFFERS_EVERY:
            return False
        self._answered = now
        return True
