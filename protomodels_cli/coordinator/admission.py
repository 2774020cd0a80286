"""Who may be connected to the public port, and who has to go for somebody else. Pure: no sockets, no clock.

A caller is a stranger until a call of it was authenticated. Strangers share what known callers leave them, and when
that is full the oldest of them goes, from the network that has the most: whoever holds connections open holds up nobody
who has something to say.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from protomodels_cli import timeouts
from protomodels_cli.wire.rates import Buckets, Rate

MOST_SHUNNED = 10_000  # networks at a time; the oldest are forgotten


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
    relay_seconds: float = field(default_factory=lambda: timeouts.RELAY_WAIT)

    @property
    def strangers(self) -> int:
        return max(1, self.connections // 8)

    @property
    def strangers_per_address(self) -> int:
        return max(1, self.connections_per_address // 4)

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
        self._shunned: dict[str, float] = {}  # networks, and until when

    def come(self, network: str, now: float) -> Admitted | str:
        """The kind of the refusal where there is no room."""
        if self._shunned.get(network, now) > now or not self._comings.take(network, now):
            return "too_many_from_one_address"
        limits, strangers, crowded = self._limits, self._strangers.get(network, {}), None
        if (
            self._by_network[network] >= limits.connections_per_address
            or len(strangers) >= limits.strangers_per_address
        ):
            crowded, kind = strangers, "too_many_from_one_address"
        elif len(self._networks) >= self._most or self._strange >= limits.strangers:
            crowded, kind = max(self._strangers.values(), key=len, default={}), "too_many_connections"
        if crowded is not None and not crowded:
            return kind
        instead_of = next(iter(crowded)) if crowded else None
        if instead_of is not None:
            self.go(instead_of)
        self._next += 1
        self._networks[self._next] = network
        self._by_network[network] += 1
        self._strangers.setdefault(network, {})[self._next] = None
        self._strange += 1
        return Admitted(self._next, instead_of)

    def shun(self, network: str, until: float) -> None:
        """Nobody new comes from there until then. Who is connected stays."""
        self._shunned.pop(network, None)
        self._shunned[network] = until
        if len(self._shunned) > MOST_SHUNNED:
            del self._shunned[next(iter(self._shunned))]

    def heard(self, number: int) -> None:
        """A stranger has sent something: others make way before it does. On a busy machine a handshake takes seconds,
        and where the oldest makes way, an attack leaves no handshake that long."""
        network = self._networks.get(number, "")
        if number in self._strangers.get(network, {}):
            strangers = self._strangers[network] = self._strangers.pop(network)
            strangers[number] = strangers.pop(number)

    def known(self, number: int) -> None:
        """This caller has shown that it belongs to the run."""
        network = self._networks.get(number, "")
        if number in (strangers := self._strangers.get(network, {})):
            del strangers[number]
            self._strange -= 1
            if not strangers:  # addresses must not pile up here
                del self._strangers[network]

    def go(self, number: int) -> None:
        self.known(number)
        if (network := self._networks.pop(number, None)) is not None:
            self._by_network[network] -= 1
            if not self._by_network[network]:
                del self._by_network[network]
