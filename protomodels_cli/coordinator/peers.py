"""Peers with an open session, as they describe themselves. Pure."""

from __future__ import annotations

import math
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from dataclasses import dataclass
from typing import Protocol

from protomodels_cli.cost.activations import Computation
from protomodels_cli.protocol.parts import Part


@dataclass(frozen=True)
class Holding:
    """What a peer has in memory: a stage after all decisions up to `applied` of a lineage."""

    lineage: int
    stage: int
    layers: tuple[int, ...]  # of all stages
    applied: int
    prepared: int = 0  # the generation in which it said that it has the gradients of the step after that; 0: it has not
    generation: int = 0  # that it still works in, linked to its neighbours; 0: in none


@dataclass(frozen=True)
class Rest:
    """A peer wants no stage for now."""

    until: float = 0.0  # seconds since 1970; 0: until somebody wakes it
    own: bool = True  # whether it was asked for on the peer's machine; the owner does not end that


@dataclass(frozen=True)
class Peer:
    """A peer with an open session."""

    id: str
    name: str
    device: str
    memory: int  # bytes of its device's memory that the run may use
    flops: float
    address: str  # as the coordinator sees it
    port: int  # for neighbours; 0: they may not dial it
    since: float
    holding: Holding | None = None  # when it registered
    parts: frozenset[Part] = frozenset()  # on its disk, as far as it has said
    host_memory: int | None = None  # bytes of the machine's own memory; None: the device's memory is that
    computation: Computation | None = None  # how it computes; None: it has not said
    cards: tuple[str, ...] = ()  # peers with the same one share it; empty: not known
    card_memory: int = 0  # bytes that were free there, on all of them, when it joined
    reached: tuple[str, ...] = ()  # addresses at which the coordinator has dialled it
    addresses: tuple[str, ...] = ()  # of its interfaces, as it says
    machine: str = ""  # peers with the same one share a loopback interface; empty: not known
    relay_trips: tuple[tuple[str, float], ...] = ()  # relay → seconds from this peer to it and back
    outside_port: int = 0  # of `outside_host`, that leads to `port`; 0: the same
    outside_host: str = ""  # the address of its router, where that maps a port
    token: str = ""  # the id of the token that it joined with: `tokens.OWN` for the run's own
    rest: Rest | None = None
    upload: float = math.inf  # bits a second that it may send; that it may receive
    download: float = math.inf
    person: str = ""  # whom the owner made that token for; empty: not said


class Peers(Protocol):
    """Connected peers by their ids. A holder may be away, so there is no `peers[id]`: `get` says who is not there."""

    def get(self, peer: str, /) -> Peer | None: ...
    def keys(self) -> KeysView[str]: ...
    def values(self) -> ValuesView[Peer]: ...
    def items(self) -> ItemsView[str, Peer]: ...
    def __contains__(self, peer: object, /) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...


def nobody() -> Peers:
    none: dict[str, Peer] = {}
    return none
