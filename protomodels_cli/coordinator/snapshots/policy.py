"""Snapshots as the machine sees them: when one is due, when it counts, which are kept."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace

from protomodels_cli.coordinator import notices, outgoing
from protomodels_cli.coordinator.events import PartFailed, SnapshotWhole
from protomodels_cli.coordinator.history import Began, Forgot, GaveUp, Saved
from protomodels_cli.coordinator.moves import Moves
from protomodels_cli.coordinator.snapshots.failures import NoRoom
from protomodels_cli.coordinator.snapshots.pace import Pace
from protomodels_cli.coordinator.snapshots.room import missing_room
from protomodels_cli.coordinator.state import State
from protomodels_cli.cost.saving import due_after, slowed_by
from protomodels_cli.protocol import steps
from protomodels_cli.protocol.parts import Part

SAVE_AGAIN = 5.0  # seconds
COMPARED, ENOUGH = 20, 5  # steps beside an upload, and without, whose medians are compared: the last, and at least


def is_due(state: State) -> bool:
    """Should the stages be saved as they are now, after the last decided step?"""
    history, step = state.history, state.history.step
    if step == 0 or history.newest.step == step or any(m.step == step for m in history.pending):
        return False
    if state.saving.unsaved is not None and state.saving.unsaved[0] == step:
        return False
    regular = (_at_interval(state) or state.saving.pace.due) and not state.saving.pace.no_room
    return is_needed(state) or (regular and not history.pending)


def _at_interval(state: State) -> bool:
    return steps.is_due(state.history.step, state.spec.snapshots.interval or 0)


def seconds_between(state: State) -> float:
    """After which a snapshot is due since the last one was begun; infinite: they go by steps alone."""
    history, usual = state.history, statistics.median(state.measured.step_seconds or (0.0,))
    trained = (history.step + history.redone) * usual
    pace = state.saving.pace
    return due_after(state.spec, state.stages, pace.upload or 0.0, usual, trained, history.rollbacks, pace.slowed)


def is_needed(state: State) -> bool:
    """Does the run wait until this step is saved?"""
    history = state.history
    ends = state.leaving or state.stopping or history.paused is not None
    return history.newest.step < history.step and (history.step == state.spec.steps or bool(ends))


def begin_if_due(moves: Moves) -> bool:
    """Whether the next turn asks for the parts. A new generation asks again: the turn that asked may have been lost."""
    state = moves.state
    if is_due(state) and (not state.spec.subspace.has_basis or state.history.synced == state.history.step):
        _begin(moves)
    history = moves.state.history
    here = history.generation, history.step
    if (
        state.saving.asked == here
        or history.step in state.saving.whole
        or all(m.step != history.step for m in history.pending)
    ):
        return False
    moves.saving = replace(moves.saving, asked=here)
    return True


def _begin(moves: Moves) -> None:
    state, history = moves.state, moves.state.history
    if missing := missing_room(state.spec, history.layers, state.saving.room):
        _skip(moves, missing)
        moves.saving = replace(moves.saving, unsaved=(history.step, NoRoom(missing), moves.now))
        return
    moves.record(Began(history.step))
    begun = replace(
        state.saving.pace, lineage=history.lineage, since=moves.now, step=history.step, due=False, no_room=False
    )
    moves.saving = replace(moves.saving, pace=begun)


def _skip(moves: Moves, missing: int) -> None:
    """The disk lacks so many bytes. It is said once, and looked at again after every step."""
    pace = moves.saving.pace
    if not pace.no_room:
        moves.tell(notices.SnapshotWithoutRoom(moves.state.history.step, missing))
    moves.saving = replace(moves.saving, pace=replace(pace, no_room=True))


def look_at_the_clock(moves: Moves, granted: float) -> None:
    """After the decision of a step that was granted then: has enough time passed for a snapshot, and is there room for
    one that is due? The answer stands until the next decision. While another one is still uploading, one that is due by
    steps is left out, and one that is due by time waits."""
    history, pace = moves.state.history, moves.saving.pace
    if pace.lineage != history.lineage:
        pace = replace(pace, lineage=history.lineage, since=granted, step=0, due=False, beside=(), alone=())
    pace = _compare(pace, bool(history.pending), granted, moves.now - granted)
    moves.saving = replace(moves.saving, pace=pace)
    due = pace.no_room or moves.now - pace.since >= seconds_between(moves.state)
    moves.saving = replace(moves.saving, pace=replace(pace, due=due))
    if not (due or _at_interval(moves.state)):
        return
    if history.pending:
        if _at_interval(moves.state) or not pace.due:
            moves.tell(notices.SnapshotSkipped(history.step, history.pending[-1].step))
    elif missing := missing_room(moves.state.spec, history.layers, moves.saving.room):
        _skip(moves, missing)
    else:
        moves.saving = replace(moves.saving, pace=replace(moves.saving.pace, no_room=False))


def _compare(pace: Pace, uploading: bool, granted: float, seconds: float) -> Pace:
    """What steps take beside an upload, and without: a step that began or ended in the middle of one tells nothing."""
    if uploading and pace.since <= granted:
        pace = replace(pace, beside=(*pace.beside[1 - COMPARED :], seconds))
    elif not uploading and (pace.step == 0 or pace.since + (pace.upload or 0.0) <= granted):
        pace = replace(pace, alone=(*pace.alone[1 - COMPARED :], seconds))
    if min(len(pace.beside), len(pace.alone)) >= ENOUGH:
        pace = replace(pace, slowed=slowed_by(pace.beside, pace.alone))
    return pace


def note_built(moves: Moves, peer: str, stage: int, seconds: float) -> None:
    """This peer has built a stage that it did not have in memory. The slowest one reports last."""
    pace, parts = moves.saving.pace, moves.state.history.newest.as_parts()
    known = moves.state.peers.get(peer)
    fetched = bool(parts) and known is not None and parts[stage] not in known.parts
    moves.saving = replace(
        moves.saving, pace=replace(pace, restore=seconds) if fetched else replace(pace, build=seconds)
    )


def hear_whole(moves: Moves, event: SnapshotWhole) -> None:
    if event.lineage == moves.state.history.lineage and any(
        mark.step == event.step for mark in moves.state.history.pending
    ):
        pace = moves.saving.pace
        if (pace.lineage, pace.step) == (event.lineage, event.step):
            moves.saving = replace(moves.saving, pace=replace(pace, upload=moves.now - pace.since))
        moves.saving = replace(moves.saving, whole={**moves.saving.whole, event.step: event.parts})
        complete(moves)


def complete(moves: Moves) -> None:
    """Record as complete the snapshots whose parts are all here. One at a step after which the last stage still owes
    its report on the subspace has to wait for that: a rollback to it could not tell what becomes of U."""
    for step, parts in sorted(moves.saving.whole.items()):
        owed = moves.state.owed
        if owed is not None and owed <= step:
            continue
        moves.record(Saved(step, parts))
        _note_parts(moves)
        begun = {mark.key for mark in moves.state.history.pending}
        moves.saving = replace(
            moves.saving,
            whole={s: p for s, p in moves.saving.whole.items() if s > step},
            arrived={key: stages for key, stages in moves.saving.arrived.items() if key in begun},
        )
        moves.conduct = replace(moves.conduct, suspects=frozenset(), spoilt={})
        moves.saving = replace(moves.saving, late=0)
        moves.write_row("snapshot", step)
        moves.tell(notices.SnapshotComplete(step))
        for old in moves.state.history.snapshots[1 : -moves.state.spec.snapshots.keep]:
            moves.record(Forgot(old.lineage, old.step))
        moves.do(outgoing.keep(moves.state))


def _note_parts(moves: Moves) -> None:
    """A peer that uploaded a part has it on its own disk too."""
    history = moves.state.history
    _note(moves, zip(history.holders, history.newest.as_parts(), strict=False))


def note_part(moves: Moves, peer: str, part: Part) -> None:
    _note(moves, [(peer, part)])


def _note(moves: Moves, found: Iterable[tuple[str, Part]]) -> None:
    """Once for all of them: the peers may be many."""
    peers = dict(moves.state.peers.items())
    needed = {part for mark in moves.state.history.snapshots for part in mark.as_parts()}
    for peer, part in found:
        if (known := peers.get(peer)) is not None:
            peers[peer] = replace(known, parts=(known.parts | {part}) & needed)
    moves.state = replace(moves.state, peers=peers)


def give_up(moves: Moves, *failed: PartFailed) -> bool:
    """A snapshot that was begun, for these parts of it. Returns whether it was."""
    state, event = moves.state, failed[0]
    snapshot = event.lineage, event.step
    if snapshot not in [mark.key for mark in state.history.pending] or event.lineage != state.history.lineage:
        return False
    moves.record(GaveUp(event.step))
    moves.saving = replace(
        moves.saving,
        whole={s: p for s, p in state.saving.whole.items() if s != event.step},
        arrived={key: stages for key, stages in state.saving.arrived.items() if key != snapshot},
        due={key: until for key, until in state.saving.due.items() if key != snapshot},
        unsaved=(event.step, event.why, moves.now),
        asked=(0, 0),
    )
    moves.do(outgoing.keep(moves.state))
    for part in failed:
        peer = state.peers.get(part.peer or "")
        name = peer.name if peer else ""
        moves.tell(notices.SnapshotFailed(part.step, part.stage, part.peer, name, part.why))
    return True


def may_try_again(moves: Moves) -> bool:
    unsaved = moves.saving.unsaved
    if unsaved is None or moves.now - unsaved[2] < SAVE_AGAIN:
        return False
    moves.saving = replace(moves.saving, unsaved=None)
    return True
