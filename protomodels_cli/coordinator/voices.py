"""Whose word a peer's word is: one person has one voice, however many peers it brings. Pure.

A voice is the person whom a token was made for, or the token. Peers with the run's own token, which all share, are told
apart by their networks alone, so a person with several addresses has several voices there.
"""

from __future__ import annotations

from protomodels_cli.coordinator.peers import Peer
from protomodels_cli.coordinator.tokens import OWN
from protomodels_cli.wire.addresses import network_of


def voice_of(peer: Peer) -> str:
    if peer.person:
        return f"person {peer.person}"
    return f"token {peer.token}" if _has_own(peer) else f"network {_network(peer)}"


def are_independent(one: Peer, other: Peer) -> bool:
    """Whether neither may be the other's second machine, as far as tokens say; without them, addresses."""
    if voice_of(one) == voice_of(other):
        return False
    return (_has_own(one) and _has_own(other)) or _network(one) != _network(other)


def _has_own(peer: Peer) -> bool:
    return peer.token not in ("", OWN)


def _network(peer: Peer) -> str:
    return network_of(peer.address) if peer.address else ""
