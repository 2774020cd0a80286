"""What peers have done that speaks for or against them, also those that are away. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protomodels_cli.coordinator.peers import Peer


@dataclass(frozen=True)
class BrokenLink:
    """A holder said that its link to a neighbour does not work."""

    peer: str
    other: str
    at: float


@dataclass(frozen=True)
class Conduct:
    suspects: frozenset[str] = frozenset()  # peers that were seen to use other bytes of U or T_fixed, once
    quarrels: Mapping[frozenset[str], int] = field(default_factory=dict)  # two peers → how often one blamed the other
    accusers: Mapping[int, frozenset[str]] = field(default_factory=dict)  # stage → voices that accused a holder of it
    refused: Mapping[str, int] = field(default_factory=dict)  # peer → messages that no honest peer can have sent
    outsized: Mapping[str, int] = field(default_factory=dict)  # peer → reports of far larger numbers than of late
    complaints: tuple[BrokenLink, ...] = ()  # of the last hour
    parties: Mapping[str, Peer] = field(default_factory=dict)  # peers that had a quarrel or a complaint
    turns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # peer or voice → when it gave up a stage
    unsound: tuple[str, int] = (
        "",
        0,
    )  # the only holder with numbers that are not finite, and for how many steps in a row
    untried: frozenset[str] = frozenset()  # holders that built their stage, and have not finished a step with it
    unready: frozenset[str] = frozenset()  # spares for which a handover was given up: they did not get ready in time
    spoilt: Mapping[str, int] = field(
        default_factory=dict
    )  # holder → snapshots in a row that were given up for its part
    longest: Mapping[str, float] = field(default_factory=dict)  # holder → its longest absence that it came back from
    returns: Mapping[str, int] = field(default_factory=dict)  # holder → sessions opened since the last decision
    speeds: Mapping[str, float] = field(default_factory=dict)  # peer → operations a second, when it last held a stage
