"""Holders that are away: their stage stays theirs, and their generation open, until going on without them costs less.

A connection that was closed without a goodbye is a process that died, unless it comes back at once. A silent one is
mostly a blip of somebody's line: recovery.py weighs what a rollback would cost against what waiting has cost. Meanwhile
a spare fetches the part and builds the stage. Until it has, nothing is given up.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from protomodels_cli.coordinator import assigning, notices, outgoing, readiness, reasons, recovery, turns
from protomodels_cli.coordinator.events import MakeSpare, SnapshotLost, StoreAway
from protomodels_cli.coordinator.history import Forgot
from protomodels_cli.coordinator.moves import Moves
from protomodels_cli.coordinator.seats import Absent, Preparation
from protomodels_cli.coordinator.snapshots import policy
from protomodels_cli.coordinator.state import State
from protomodels_cli.protocol.parts import Part


def miss(moves: Moves, why: reasons.Silence, absent: Absent) -> None:
    """A peer has no session any more."""
    state, history, peer = moves.state, moves.state.history, absent.peer
    known, stage, task = state.peers.get(peer), state.stage_of(peer), state.task
    if known is None:
        return
    if peer not in state.seats.holds or assigning.fresh(history):
        assigning.lose(moves, {peer: why})
        return
    assigning.part_with(moves, {peer: why}, absent)
    if stage is None or (task is not None and task.kind in ("build", "link")):
        assigning.regroup(moves)
    elif absent.until is None:
        redo = costs(moves.state, peer).redo
        moves.tell(notices.HolderAway(peer, known.name, stage, history.step - history.newest.step, redo))


def weigh(moves: Moves) -> None:
    """Stop waiting for those whose time is up; have stages prepared that may soon be needed."""
    _pass_over(moves)
    state = moves.state
    late = {peer for peer, absent in state.seats.absent.items() if _is_late(moves, absent)}
    if late:
        moves.seats = moves.seats.given_up(late)
        assigning.regroup(moves)
    _stand_down(moves)


def _is_late(moves: Moves, absent: Absent) -> bool:
    state, peer = moves.state, absent.peer
    if absent.until is not None:
        return absent.until <= moves.now and not _is_nearly_saved(state, peer, moves.now)
    if peer not in state.history.holders:
        return True  # another has its stage
    stage = state.history.holders.index(peer)
    successor = _successor(moves, stage)
    if successor is None:
        return False  # nobody could take over: waiting is all there is
    part, preparation = readiness.wanted(state.history, stage), state.seats.preparing.get(successor)
    asked = preparation is not None and preparation.part == part
    ready = asked and preparation is not None and preparation.ready
    away, lease = moves.now - absent.since, state.spec.limits.lease_seconds
    action = recovery.decide(costs(state, peer), away, state.conduct.longest.get(peer, 0.0), lease, ready)
    if action == "fetch" and not asked:
        here = moves.now if readiness.is_here(state, successor, part) else None
        moves.seats = moves.seats.prepared(successor, Preparation(part, moves.now, here))
        moves.do(outgoing.prepare(moves.state, successor, part))
    return action == "replace" and not _is_nearly_saved(state, peer, moves.now)


def _is_nearly_saved(state: State, peer: str, now: float) -> bool:
    """Is a newer snapshot about to be complete, without anything that is still to come from who is away? A rollback
    gives up what is begun: to wait for the other parts is worth it while that takes less than the steps that they save.
    A dead holder's part may well be here, since the largest part takes longest."""
    history, pace = state.history, state.saving.pace
    if not history.pending or pace.upload is None or peer not in history.holders:
        return False
    mark, usual = history.pending[-1], statistics.median(state.measured.step_seconds or (0.0,))
    here = state.saving.arrived.get(mark.key, frozenset())
    expected = pace.since + pace.upload - now
    saved = (mark.step - history.newest.step) * usual
    return (
        mark.key == (pace.lineage, pace.step)
        and set(state.seats.absent_stages) <= here
        and -pace.upload / 4 < expected < saved
    )


def _successor(moves: Moves, stage: int) -> str | None:
    """Who would hold this stage, if all that are absent were given up."""
    found = assigning.fill(moves.state, moves.seats.held, moves.now)
    return found.get(stage) if isinstance(found, dict) else None


def _pass_over(moves: Moves) -> None:
    """A spare that was told to build a stage and has not within limits.restore_seconds goes, where another is here: it
    is slow beyond use, or it never had what it said."""
    for peer in list(moves.seats.preparing):
        state, preparation = moves.state, moves.seats.preparing.get(peer)
        if preparation is None:
            continue  # it was assigned a stage when another went
        stage = preparation.part.stage
        limit = readiness.restore_seconds(state.spec, state.history.layers, stage, cap=readiness.cap_of(state, peer))
        if preparation.ready or state.stage_of(peer) is not None:
            continue
        passed, expected = moves.now - preparation.asked, readiness.expected(state, peer, stage)
        if passed > limit and _successor(moves, stage) not in (None, peer):
            assigning.dismiss(moves, reasons.TooSlow(stage, "restore", limit), peer)
        elif not preparation.late and passed > readiness.patience(state, stage, expected):
            moves.seats = moves.seats.prepared(peer, replace(preparation, late=True))
            moves.conduct = replace(moves.conduct, turns=turns.after_a_delay(state, peer, moves.now))


def _stand_down(moves: Moves) -> None:
    """Who prepares a stage whose holder is back drops what it has, and stays a spare."""
    state = moves.state
    if not state.placed or not state.seats.preparing:
        return
    absent = set(state.seats.absent_stages)
    done = [
        peer
        for peer, preparation in state.seats.preparing.items()
        if preparation.part.stage not in absent and state.stage_of(peer) is None and not _is_reseated(state, peer)
    ]
    moves.seats = moves.seats.stood_down(done)
    moves.do(*(MakeSpare(peer, reasons.AllStagesHeld(state.stages)) for peer in done))


def _is_reseated(state: State, spare: str) -> bool:
    return state.seats.handover is not None and state.seats.handover.spare == spare


def hear_fetched(moves: Moves, peer: str, part: Part) -> None:
    policy.note_part(moves, peer, part)
    preparation = moves.seats.preparing.get(peer)
    if preparation is not None and preparation.part == part and preparation.here is None:
        moves.seats = moves.seats.prepared(peer, replace(preparation, here=moves.now))


def hear_lacking(moves: Moves, peer: str, part: Part) -> None:
    """What it said counts no more: it has to fetch the part like anybody else."""
    state, known = moves.state, moves.state.peers.get(peer)
    if known is None or part not in known.parts:
        return
    moves.know(replace(known, parts=known.parts - {part}))
    preparation = state.seats.preparing.get(peer)
    if preparation is not None and preparation.part == part and not preparation.ready:
        moves.seats = moves.seats.prepared(peer, replace(preparation, here=None))
    moves.tell(notices.PartNotThere(peer, known.name, part.stage, part.step))


def hear_ready(moves: Moves, peer: str, part: Part) -> None:
    state, preparation = moves.state, moves.seats.preparing.get(peer)
    if preparation is None or preparation.part != part or preparation.ready:
        return
    moves.seats = moves.seats.prepared(peer, replace(preparation, ready=True))
    took, since = moves.now - preparation.asked, preparation.here or preparation.asked
    pace = replace(state.saving.pace, build=moves.now - since)
    moves.saving = replace(moves.saving, pace=replace(pace, restore=took) if since > preparation.asked else pace)
    if not _is_reseated(state, peer):
        moves.tell(notices.StagePrepared(peer, state.name_of(peer), part.stage, part.step))


def hear_store_away(moves: Moves, event: StoreAway) -> None:
    """That a part is out of everybody's reach is not the fault of whoever needs it: its time begins anew, and neither
    the snapshot nor the peer goes."""
    state = moves.state
    preparation, url = state.seats.preparing.get(event.peer), state.spec.snapshots.copy_to or ""
    part = None if preparation is None else (*preparation.part.snapshot, preparation.part.stage)
    if preparation is None or preparation.ready or part != (event.lineage, event.step, event.stage):
        return
    away = reasons.StoreUnreachable(event.stage, event.step, url, event.detail)
    moves.seats = moves.seats.prepared(event.peer, replace(preparation, asked=moves.now, away=away))
    if preparation.away is None:
        moves.tell(notices.CopyUnreachable(event.stage, event.step, url, event.detail))


def lose_snapshot(moves: Moves, event: SnapshotLost) -> bool:
    """Whether it was a spare that cannot build its stage from the part: the snapshot is worth nothing, and the one
    before it takes its place, should the run have to go back. If it is only the spare that cannot, it may try again, a
    few times."""
    state, history = moves.state, moves.state.history
    preparation = state.seats.preparing.get(event.peer)
    if preparation is None or preparation.part.snapshot != (event.lineage, event.step):
        return False
    if state.stage_of(event.peer) is not None:
        return False  # it was assigned the stage since
    if event.whole_here and preparation.failed + 1 < assigning.DISMISS_AFTER:
        again = replace(preparation, failed=preparation.failed + 1)
        moves.seats = moves.seats.prepared(event.peer, again)
        moves.do(outgoing.prepare(moves.state, event.peer, again.part))
    elif event.whole_here:
        assigning.dismiss(moves, reasons.PartUnreadable(event.step), event.peer)
    elif (event.lineage, event.step) in [mark.key for mark in history.snapshots[1:]]:
        moves.tell(notices.SnapshotUnusable(event.step, event.why))
        moves.record(Forgot(event.lineage, event.step, unusable=True))
        moves.do(outgoing.keep(moves.state))
    return True


def costs(state: State, peer: str) -> recovery.Costs:
    history, task = state.history, state.task
    stage = history.holders.index(peer)
    usual = statistics.median(state.measured.step_seconds) if state.measured.step_seconds else 0.0
    under_way = 0.0
    if state.placed and task is not None and task.kind == "step":
        away = [absent.since for absent in state.seats.absent.values()]
        under_way = max(0.0, min(away) - task.started) if away else 0.0
    redo = (history.step - history.newest.step) * usual + under_way
    return recovery.Costs(redo, readiness.restoring(state, stage))
