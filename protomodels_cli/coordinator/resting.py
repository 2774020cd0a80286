"""Peers that rest: they keep their session and their name, hold no stage, and are given none until they wake. Pure.

A holder hands its stage over as one that leaves does: the step is finished and saved first, so that none is redone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from protomodels_cli.coordinator import assigning, notices, reasons
from protomodels_cli.coordinator.moves import Moves
from protomodels_cli.coordinator.peers import Peer, Rest


def hear(moves: Moves, peer: str, rest: Rest | None) -> None:
    """It is to rest, or to wake."""
    state, known = moves.state, moves.state.peers.get(peer)
    if known is None:
        return
    if rest is None:
        _wake(moves, known)
        return
    rested = known.rest is not None and peer not in state.leaving
    moves.know(replace(known, rest=rest))
    if state.history.step > 0 and (peer in state.seats.holds or state.stage_of(peer) is not None):
        moves.state = replace(moves.state, leaving=state.leaving | {peer})
    elif not rested or state.seats.preparing.get(peer) is not None:
        lay_down(moves, {}, {peer})
    elif known.rest != rest:
        moves.tell(notices.PeerRests(peer, known.name, None, rest.until))


def end(moves: Moves, peer: str) -> None:
    """It wants to go: nothing is kept for it."""
    if (known := moves.state.peers.get(peer)) is not None and known.rest is not None:
        moves.know(replace(known, rest=None))


def lay_down(moves: Moves, leave: Mapping[str, reasons.Loss], rest: Collection[str]) -> None:
    """These are without a stage from now on: those that leave are gone, the others stay and rest."""
    before = {id_: peer for id_, peer in moves.state.peers.items() if id_ in rest}
    why = {peer: reasons.AskedToRest(known.rest.until) for peer, known in before.items() if known.rest is not None}
    if (former := moves.seats.former) is not None and former[1] in before:
        moves.seats = (
            moves.seats.without_former()
        )  # the stage that it kept in memory, in case another fails with it, is dropped
    assigning.lose(moves, {**leave, **why})
    moves.know(*(replace(known, holding=None) for known in before.values()))
    for peer in sorted(rest):
        assigning.make_spare(moves, peer, reasons.Resting())


def _wake(moves: Moves, known: Peer) -> None:
    state, peer = moves.state, known.id
    if known.rest is None:
        return
    moves.know(replace(known, rest=None))
    moves.state = replace(moves.state, leaving=state.leaving - {peer})
    moves.tell(notices.PeerWoke(peer, known.name))
    if state.stage_of(peer) is not None or peer in state.seats.holds:
        return  # it had not handed its stage over yet
    if state.placed:
        assigning.make_spare(moves, peer, reasons.AllStagesHeld(state.stages))
    else:
        assigning.regroup(moves)
