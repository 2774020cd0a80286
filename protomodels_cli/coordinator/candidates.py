"""Where a peer may be dialled, and by whom: which of its addresses a neighbour is told, and which relays. Pure.

A private address means something else behind every router, and says something about a home: it goes only to peers that
come from the same public address. A peer does not choose whom strangers dial: they are told addresses that the
coordinator has seen it at, or has reached it at.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from protomodels_cli.coordinator.peers import Peer
from protomodels_cli.wire.addresses import is_private, network_of

Kind = Literal["loopback", "lan", "public"]
R = TypeVar("R")


@dataclass(frozen=True)
class Candidate:
    host: str
    port: int
    kind: Kind
    likely: bool = True  # False: nobody has reached it there yet


def candidates_for(dialler: Peer, listener: Peer, home: str) -> tuple[Candidate, ...]:
    """At which addresses `dialler` may find `listener`, the nearest first. `home`: the coordinator's own address."""
    if not 1 <= listener.port <= 65535:
        return ()
    found: list[Candidate] = []
    if listener.machine and listener.machine == dialler.machine:
        found.append(Candidate("127.0.0.1", listener.port, "loopback"))
    if site_of(listener, home) == site_of(dialler, home):
        seen = [listener.address] if _is_in_a_lan(listener.address) else []
        near = dict.fromkeys([*seen, *filter(_is_in_a_lan, listener.addresses)])
        found += [Candidate(host, listener.port, "lan") for host in near]
    found += [Candidate(host, _port_at(host, listener), "public") for host in listener.reached if not is_private(host)]
    # Nobody has reached it there; a port may have been forwarded since.
    outside = home if is_private(listener.address) else listener.address
    if outside and not is_private(outside) and outside not in listener.reached:
        found.append(Candidate(outside, _port_at(outside, listener), "public", likely=False))
    return tuple(found)


def _port_at(host: str, listener: Peer) -> int:
    return listener.outside_port or listener.port if host == listener.outside_host else listener.port


def site_of(peer: Peer, home: str) -> str:
    """Peers with the same one are behind one public address. Who comes to the coordinator from a private address is
    where the coordinator is."""
    return network_of(home) if is_private(peer.address) or peer.address == home else network_of(peer.address)


def _is_in_a_lan(host: str) -> bool:
    return is_private(host) and not ipaddress.ip_address(host).is_loopback


def dials(previous: Peer, following: Peer, home: str) -> bool:
    """Whether the earlier stage's holder dials: it does unless only the later one's has somebody to reach."""
    return _is_likely(previous, following, home) or not _is_likely(following, previous, home)


def may_be_direct(a: Peer, b: Peer, home: str) -> bool:
    """Whether one of them has an address at which the other should reach it."""
    return _is_likely(a, b, home) or _is_likely(b, a, home)


def _is_likely(dialler: Peer, listener: Peer, home: str) -> bool:
    return any(c.likely for c in candidates_for(dialler, listener, home))


def nearest(a: Peer, b: Peer, relays: Sequence[tuple[str, R]]) -> list[R]:
    """Relays (address and whatever goes with it) by the whole way from one to the other; those that one of them could
    not reach come last."""
    trips = [dict(peer.relay_trips) for peer in (a, b)]
    far = float("inf")
    return [relay for _, relay in sorted(relays, key=lambda at: sum(trip.get(at[0], far) for trip in trips))]
