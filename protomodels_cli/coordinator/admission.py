"""Who may be connected to the public port, and who has to go for somebody else. Pure: no sockets, no clock.

A caller is a stranger until a call of it was authenticated. Strangers share what known callers leave them, and when
that is full the oldest of them goes, from the network that has the most. Where known callers fill the room, one goes
that is idle: it was served a while ago and has no session. Connections that are held open hold up nobody who has
something to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from protomodels_cli import timeouts
from protomodels_cli.wire.rates import Buckets, Rate

# After its first authenticated call: a caller that has no session by then makes way. Sooner, newcomers would push out
# callers that still wait for an answer.
IDLE_SECONDS = 10.0


@dataclass(frozen=True)
class DoorLimits:
    """What callers may use, and strangers among them."""

    connections: int = 1024
    connections_per_address: int = 64
    first_seconds: float = 5.0  # for the first line, or the first bytes of TLS
    line_bytes: int = 256
    handshake_bytes: int = 32 * 1024
    handshake_seconds: float = 10.0
    stranger_seconds: float = 20.0  # from the beginning to the first authenticated call
    stranger_bytes: int = 16 * 1024  # that are read until then
    stranger_most_bytes: int = 96 * 1024  # … with what was on its way; HTTP/2 lets a client begin with 64 KiB
    line_seconds: float = 6.0  # that a caller waits in line where its network has no room; a program may wait for less
    relay_seconds: float = field(default_factory=lambda: timeouts.RELAY_WAIT)

    @property
    def strangers(self) -> int:
        return max(1, self.connections // 8)

    @property
    def strangers_per_address(self) -> int:
        return max(1, self.connections_per_address // 4)

    @property
    def in_line(self) -> int:
        """Callers of one network: in these seconds, so many of its connections become idle and make way."""
        return self.connections_per_address // 2

    @property
    def comings(self) -> Rate:
        """New connections from one network: a household whose machines all come back at once gets in within seconds."""
        return Rate(self.connections_per_address / 4, 2.0 * self.connections_per_address)


@dataclass(frozen=True)
class Admitted:
    number: int  # of the caller
    instead_of: int | None  # the caller that has to go


class Admission:
    def __init__(self, limits: DoorLimits, most: int):
        """`most`: connections that there are descriptors for."""
        self._limits, self._most = limits, most
        self._next = 0
        self._networks: dict[int, str] = {}  # of everybody who is connected
        self._by_network: Counter[str] = Counter()
        self._strangers: dict[str, dict[int, None]] = {}  # by network; in both, those that were silent longest first
        self._strange = 0  # all of them
        self._comings = Buckets(limits.comings)
        self._idle: dict[str, dict[int, float]] = {}  # known callers without a session, and since when, by network

    def come(self, network: str, now: float) -> Admitted | str:
        """The kind of the refusal where there is no room."""
        limits, strangers, instead_of = self._limits, self._strangers.get(network, {}), None
        if self._by_network[network] >= limits.connections_per_address:
            instead_of = self._idle_of(network, now) or next(iter(strangers), None)
        elif len(strangers) >= limits.strangers_per_address:
            instead_of = next(iter(strangers))
        elif len(self._networks) >= self._most or self._strange >= limits.strangers:
            if (instead_of := self._stranger() or self._idle_of(self._largest(self._idle), now)) is None:
                return "too_many_connections"
        elif self._comings.take(network, now):
            return self._admitted(network, None)
        if instead_of is None or not self._comings.take(network, now):
            return "too_many_from_one_address"
        self.go(instead_of)
        return self._admitted(network, instead_of)

    def _idle_of(self, network: str, now: float) -> int | None:
        number, since = next(iter(self._idle.get(network, {}).items()), (None, now))
        return number if now - since >= IDLE_SECONDS else None

    def _stranger(self) -> int | None:
        return next(iter(self._strangers.get(self._largest(self._strangers), {})), None)

    @staticmethod
    def _largest(crowds: Mapping[str, Collection[int]]) -> str:
        return max(crowds, key=lambda network: len(crowds[network]), default="")

    def _admitted(self, network: str, instead_of: int | None) -> Admitted:
        self._next += 1
        self._networks[self._next] = network
        self._by_network[network] += 1
        self._strangers.setdefault(network, {})[self._next] = None
        self._strange += 1
        return Admitted(self._next, instead_of)

    def heard(self, number: int) -> None:
        """A stranger has sent something: others make way before it does. On a busy machine a handshake takes seconds,
        and where the oldest makes way, an attack leaves no handshake that long."""
        network = self._networks.get(number, "")
        if number in self._strangers.get(network, {}):
            strangers = self._strangers[network] = self._strangers.pop(network)
            strangers[number] = strangers.pop(number)

    def known(self, number: int, now: float) -> None:
        """This caller has shown that it belongs to the run."""
        if self._take(self._strangers, number):
            self._strange -= 1
            self.idle(number, now)

    def idle(self, number: int, now: float) -> None:
        """This caller, which is known, has no session."""
        if (network := self._networks.get(number)) is not None:
            self._idle.setdefault(network, {})[number] = now

    def busy(self, number: int) -> None:
        """This caller, which is known, has a session: it stays."""
        self._take(self._idle, number)

    def go(self, number: int) -> None:
        self._strange -= self._take(self._strangers, number)
        self._take(self._idle, number)
        if (network := self._networks.pop(number, None)) is not None:
            self._by_network[network] -= 1
            if not self._by_network[network]:
                del self._by_network[network]

    def _take(self, crowds: dict[str, dict[int, Any]], number: int) -> bool:
        """Whether the caller was in one of these."""
        network = self._networks.get(number, "")
        if number not in (crowd := crowds.get(network, {})):
            return False
        del crowd[number]
        if not crowd:  # addresses must not pile up here
            del crowds[network]
        return True
