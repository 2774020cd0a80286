"""Neighbours that blame each other: all stages are relinked, and then one of the two gives its stage up. Pure.

A complaint is one peer's word against another's, and a person may bring many peers. So nobody is dismissed for what one
person says; a peer that independent neighbours blame again and again is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from protomodels_cli import timeouts
from protomodels_cli.coordinator import assigning, reasons
from protomodels_cli.coordinator.assigning import DISMISS_AFTER, HOUR
from protomodels_cli.coordinator.audit_reasons import MessagesDiffer
from protomodels_cli.coordinator.conduct import BrokenLink
from protomodels_cli.coordinator.moves import Moves
from protomodels_cli.coordinator.peers import Peer
from protomodels_cli.coordinator.state import State
from protomodels_cli.coordinator.voices import are_independent, voice_of
from protomodels_cli.wire.troubles import InvalidInput

QUARRELS = 2  # between the same two: one may be a bit that fell over in a memory
APART = 3  # failed tries after which one of two neighbours gives its stage up, where another peer can take it
MOST_COMPLAINTS = 6  # of one holder within an hour, about links: then it gives its stage up, though steps were decided
MOST_KEPT = 200

Quarrels = Mapping[frozenset[str], int]


def hear(moves: Moves, what: reasons.Complaint, peer: str, about: int) -> None:
    """The holder of a stage says that it cannot work with another. That one may be away by now: its quarrels count,
    and nobody relinks for them."""
    other = moves.state.history.holders[about]
    _note_parties(moves, peer, other)
    if is_quarrel(what):
        pair = frozenset((peer, other))
        moves.conduct = replace(
            moves.conduct, quarrels={**moves.conduct.quarrels, pair: moves.conduct.quarrels.get(pair, 0) + 1}
        )
        if culprits := culprits_of(moves.conduct.quarrels, moves.conduct.parties, peer, other):
            assigning.dismiss(moves, what, *culprits)
            return
    elif not _counts(moves.state, peer, moves.now):
        return
    else:
        recent = [one for one in moves.conduct.complaints if moves.now - one.at < HOUR]
        moves.conduct = replace(moves.conduct, complaints=(*recent, BrokenLink(peer, other, moves.now))[-MOST_KEPT:])
    if peer not in moves.state.peers or other in moves.seats.absent:
        return
    if _is_enough(moves.state, what, peer, other) and part(moves, dict.fromkeys((peer, other), what)):
        return
    assigning.assign_again(moves, what, peer, other)


def is_quarrel(what: reasons.Complaint) -> bool:
    """Is it over something that no honest peer sends? A link that breaks may be nobody's fault."""
    return isinstance(what, MessagesDiffer) or (
        isinstance(what, reasons.PeerReport) and isinstance(what.trouble, InvalidInput)
    )


def _counts(state: State, peer: str, now: float) -> bool:
    """A link has so long to mend before its peer complains: what comes sooner after the last complaint is the same.
    Peers of one person complain as one."""
    own = [one for one in state.conduct.complaints if _voice(state, one.peer) == _voice(state, peer)]
    return all(now - one.at >= timeouts.LINK_MEND for one in own)


def _voice(state: State, peer: str) -> str:
    known = state.conduct.parties.get(peer)
    return peer if known is None else voice_of(known)


def _is_enough(state: State, what: reasons.Complaint, peer: str, other: str) -> bool:
    if is_quarrel(what):
        return state.conduct.quarrels[frozenset((peer, other))] >= APART
    return state.broken + 1 >= APART or sum(one.peer == peer for one in state.conduct.complaints) >= MOST_COMPLAINTS


def part(moves: Moves, blamed: Mapping[str, reasons.Fault]) -> bool:
    """Have one of these holders give its stage up: the one that most others blame or are blamed by, else the first.
    Whether there is another peer for its stage."""
    state = moves.state
    for peer in sorted(blamed, key=lambda peer: -opponents(state, peer)):
        if assigning.is_replaceable_after_its_turn(state, moves.now, peer, equal=True):
            moves.state = replace(moves.state, broken=0)
            assigning.stand_aside(moves, {peer: blamed[peer]})
            return True
    return False


def note_links(moves: Moves, pairs: Iterable[tuple[str, str]]) -> None:
    """These neighbours did not open their link in time."""
    for pair in pairs:
        _note_parties(moves, *pair)
        moves.conduct = replace(
            moves.conduct, complaints=(*moves.conduct.complaints, BrokenLink(*pair, moves.now))[-MOST_KEPT:]
        )


def opponents(state: State, peer: str) -> int:
    """How many independent peers it was in a quarrel with, or in a complaint of the last hour."""
    pairs = [*state.conduct.quarrels, *(frozenset((one.peer, one.other)) for one in state.conduct.complaints)]
    return len(_independent(state.conduct.parties, peer, pairs))


def culprits_of(quarrels: Quarrels, parties: Mapping[str, Peer], *pair: str) -> list[str]:
    """Of two that quarrel over what one sent the other: the one that does so with others too, again and again. No
    honest peer sends or reports what its neighbour blames it for, but a neighbour may lie: one person's word proves
    nothing against another. Two peers of one person are dismissed together when they never stop."""
    repeated = [peers for peers, times in quarrels.items() if times >= QUARRELS and len(peers) == 2]
    known = [peer for peer in dict.fromkeys(pair) if len(_independent(parties, peer, repeated)) >= 2]
    voices = {voice_of(parties[peer]) if peer in parties else peer for peer in pair}
    if not known and len(voices) == 1 and quarrels.get(frozenset(pair), 0) >= DISMISS_AFTER:
        return list(dict.fromkeys(pair))
    return known


def _independent(parties: Mapping[str, Peer], peer: str, pairs: Iterable[frozenset[str]]) -> list[Peer]:
    """The others of its pairs, without those who may be a second machine of one before. Peers of its own person count:
    they do not blame it for somebody else."""
    found: list[Peer] = []
    others = dict.fromkeys(other for pair in pairs if peer in pair for other in pair - {peer})
    for other in (parties[other] for other in others if {peer, other} <= parties.keys()):
        own = voice_of(other) == voice_of(parties[peer])
        if own or all(are_independent(other, one) for one in found):
            found.append(other)
    return found


def _note_parties(moves: Moves, *peers: str) -> None:
    state = moves.state
    moves.conduct = replace(
        moves.conduct,
        parties={
            **state.conduct.parties,
            **{
                peer: replace(known, parts=frozenset())
                for peer in peers
                if (known := state.peers.get(peer)) is not None
            },
        },
    )
