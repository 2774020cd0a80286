"""Who holds which stage, and from what: memory where every stage is still there, a snapshot where one is gone.

Every change of holders and every broken link goes through `regroup`: a new generation, in which all holders link anew
and a step that was under way is done again. What is in a peer's memory counts if it has applied exactly the decisions
of this lineage; a stage that nobody has so is taken from the newest complete snapshot, and then all stages are.
"""

from __future__ import annotations

from collections.abc import Mapping

from protomodels_cli.coordinator import notices, reasons
from protomodels_cli.coordinator.events import AssignStage, Dismiss, KeepSnapshots, MakeSpare, Wait
from protomodels_cli.coordinator.history import History, Mark, Placed, RolledBack
from protomodels_cli.coordinator.moves import Moves
from protomodels_cli.coordinator.placement import Offer, Placement, fill, place
from protomodels_cli.coordinator.state import Holding, Peer, State
from protomodels_cli.errors import EXIT_OUTSIDE

RELAY_AFTER = 3  # generations in a row that ended before a step was decided
PART_AFTER = 6


def fresh(history: History) -> bool:
    """Nothing was ever trained: stages come from the seed, and the cut may still change."""
    return history.step == 0 and (history.lineage == 1 or not history.layers)


def join(moves: Moves, peer: Peer) -> None:
    """A peer is here, or here again."""
    state = moves.state
    again = peer.id in state.peers or peer.id in state.absent
    was_holder = state.stage_of(peer.id) is not None
    moves.set(
        peers={**state.peers, peer.id: peer},
        absent={p: until for p, until in state.absent.items() if p != peer.id},
        holds={p: stage for p, stage in state.holds.items() if p != peer.id},
    )
    kind = notices.PeerReturned if again else notices.PeerJoined
    moves.tell(kind(peer.id, peer.name, peer.device))
    if not state.placed or was_holder:
        if is_current(state.history, peer.holding):
            assert peer.holding is not None
            if peer.holding.stage not in moves.state.holds.values():
                moves.set(holds={**moves.state.holds, peer.id: peer.holding.stage})
        regroup(moves)
    else:
        moves.do(MakeSpare(peer.id, reasons.AllStagesHeld(state.stages)))


def is_current(history: History, holding: Holding | None) -> bool:
    """Has it applied exactly the decisions of this lineage, or all but the last, which it is prepared for?"""
    if holding is None or (holding.lineage, holding.layers) != (history.lineage, history.layers):
        return False
    if holding.applied == history.step:
        return True
    last = history.decision
    return last is not None and holding.applied == last.step - 1 and holding.prepared == last.generation


def lose(moves: Moves, gone: Mapping[str, reasons.Loss], until: float | None = None) -> None:
    """These peers are not here any more; `until`: holders are waited for so long before others take their place."""
    state = moves.state
    lost = [state.peers[peer] for peer in gone if peer in state.peers]
    if not lost:
        return
    needed = any(peer in state.holds or state.stage_of(peer) is not None for peer in gone)
    absent = dict(state.absent)
    if until is not None and not fresh(state.history):
        absent |= {peer: until for peer in gone if peer in state.holds}
    moves.set(
        peers={i: p for i, p in state.peers.items() if i not in gone},
        holds={i: stage for i, stage in state.holds.items() if i not in gone},
        leaving=state.leaving - gone.keys(),
        absent=absent,
    )
    for peer in lost:
        moves.tell(_parting(peer, _stage(state, peer.id), gone[peer.id]))
    if needed or not state.placed:
        regroup(moves)


def _parting(peer: Peer, stage: int | None, why: reasons.Loss) -> notices.Notice:
    match why:
        case reasons.AskedToLeave():
            return notices.PeerLeft(peer.id, peer.name, stage)
        case reasons.NoHeartbeat() | reasons.ConnectionClosed():
            return notices.PeerLost(peer.id, peer.name, stage, why)
        case _:
            return notices.PeerDismissed(peer.id, peer.name, stage, why)


def _stage(state: State, peer: str) -> int | None:
    """That it holds, or has in memory while nobody is seated."""
    stage = state.stage_of(peer)
    return state.holds.get(peer) if stage is None else stage


def part_with(moves: Moves, what: reasons.Fault, *peers: str) -> None:
    for peer in (p for p in peers if p in moves.state.peers):
        moves.do(Dismiss(peer, what, EXIT_OUTSIDE))
    lose(moves, dict.fromkeys(peers, what))


def break_up(moves: Moves, what: reasons.Complaint, peer: str, about: int) -> None:
    """Two holders cannot work with each other: link all anew, at last without these two."""
    if moves.state.broken + 1 >= RELAY_AFTER:
        moves.set(relay_all=True)
    seat_again(moves, what, peer, moves.state.history.holders[about])


def seat_again(moves: Moves, what: reasons.Complaint | reasons.PartUnreadable, *peers: str) -> None:
    """In a new generation; if that did not help several times, without these."""
    broken = moves.state.broken + 1
    moves.set(broken=broken)
    if broken >= PART_AFTER:
        part_with(moves, what, *dict.fromkeys(peers))
        return
    peer = moves.state.peers[peers[0]]
    moves.tell(notices.Relinking(peer.id, peer.name, moves.state.stage_of(peer.id), what))
    regroup(moves)


def give_up_waiting(moves: Moves) -> None:
    """Holders that did not come back in time."""
    late = {peer for peer, until in moves.state.absent.items() if until <= moves.now}
    if late:
        moves.set(absent={p: until for p, until in moves.state.absent.items() if p not in late})
        if not moves.state.placed:
            regroup(moves)


def regroup(moves: Moves) -> None:
    """Seat the peers that are here, if they suffice; otherwise say what is missing."""
    moves.set(placed=False, task=None, heard={}, took_basis=frozenset(), usage={})
    history = moves.state.history
    if history.over:
        return
    if fresh(history):
        _seat_afresh(moves)
        return
    seats = {stage: peer for peer, stage in moves.state.holds.items()}
    absent = [stage for stage in range(len(history.layers)) if stage not in seats]
    if absent and moves.state.absent:
        _wait(moves, reasons.HoldersDisconnected(tuple(absent)))
        return
    found = _fill(moves.state, absent, seats)
    if not isinstance(found, dict):
        _wait(moves, found)
        return
    if absent and history.newest.step != history.step:
        roll_back(moves, history.newest, reasons.StagesLost(tuple(absent), history.step))
    _seat(moves, history.layers, {**seats, **found})


def _fill(state: State, absent: list[int], seats: dict[int, str]) -> dict[int, str] | reasons.StagesWithoutPeer:
    """With peers that have no stage."""
    free = [Offer(p.id, p.memory, p.flops) for p in state.peers.values() if p.id not in seats.values()]
    wanted = dict(enumerate(state.history.newest.as_parts()))

    def has(peer: str, stage: int) -> bool:
        return wanted.get(stage) in state.peers[peer].parts

    return fill(state.spec, state.history.layers, absent, free, has)


def roll_back(moves: Moves, mark: Mark, why: reasons.Rollback, answered: int = 0) -> None:
    """Nothing in memory counts any more."""
    history = moves.state.history
    redo = history.step - mark.step
    moves.record(RolledBack(history.lineage + 1, mark.lineage, mark.step, why, answered))
    moves.set(holds={}, undelivered=False, whole={}, unsaved=None)
    moves.do(KeepSnapshots())
    moves.tell(notices.RolledBack(why, mark.step, redo, history.lineage + 1))


def _seat_afresh(moves: Moves) -> None:
    state = moves.state
    found = place(state.spec, [Offer(p.id, p.memory, p.flops) for p in state.peers.values()])
    moves.set(holds={}, absent={})
    if isinstance(found, Placement):
        _seat(moves, found.layers, dict(enumerate(found.holders)))
        return
    moves.set(missing=found)
    for peer in state.peers:
        moves.do(MakeSpare(peer, found))


def _seat(moves: Moves, layers: tuple[int, ...], seats: dict[int, str]) -> None:
    state = moves.state
    holders = tuple(seats[stage] for stage in range(len(layers)))
    generation = state.history.generation + 1
    moves.set(relay_all=state.relay_all and holders == state.history.holders)  # others may reach each other
    moves.record(Placed(generation, layers, tuple((peer,) for peer in holders)))
    reuse = {peer for peer in holders if peer in state.holds}
    # Whoever has it in memory has it now too; the others once they say so.
    moves.set(placed=True, absent={}, undelivered=False, holds={p: s for p, s in state.holds.items() if p in reuse})
    task = moves.begin("build", state.history.step)
    for stage, peer in enumerate(holders):
        moves.do(AssignStage(peer, stage, task.number, peer in reuse))
    for peer in state.peers:
        if peer not in holders:
            moves.do(MakeSpare(peer, reasons.AllStagesHeld(len(holders))))
    moves.tell(notices.StagesAssigned(generation, layers, moves.state.holders_of(range(len(layers)))))


def _wait(moves: Moves, what: reasons.Missing) -> None:
    moves.set(missing=what)
    for peer in moves.state.peers:
        moves.do(Wait(peer, what) if peer in moves.state.holds else MakeSpare(peer, what))
