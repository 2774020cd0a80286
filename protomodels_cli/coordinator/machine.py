"""The coordinator's brain: a pure state machine, apply(state, event, now) → (state, records, commands).

No clock, no I/O, no randomness. A run is a chain of *tasks* that all stages do together: build, link, then steps with a
sync or an evaluation between them, and a finish. A task is concluded when every stage has reported; records say what
was decided, and reach the journal before the commands that follow from them leave. Snapshots are taken beside it.

What the run (work.py), a seat (seats.py) and a member (State.standing) can be, and every move there is. Tests hold the
machine to this table.

    run     Unplaced  → Working      every stage has a holder, with the stage in memory or building it
            Unplaced  → Unplaced     holders are missing still, or others are
            Working   → Working      a stage has reported; or all have, and the next task follows
            Working   → Blocked      all have reported, and something else must come before the next task
            Blocked   → Working      it has come
            Blocked   → Blocked      it has come, and now something else must
            Working   → Unplaced     a holder is gone, or its links must be made anew: the generation ends
            Blocked   → Unplaced     the same
            Working   → Idle         the run is over, or is stopped
            Blocked   → Idle         it is stopped

    seat    Vacant    → Building     the stage is assigned to a peer, which builds it from a part or the seed
            Vacant    → Here         a peer is back, and has the stage in memory still
            Building  → Here         it has built the stage; or the generation ended, and who had it before has it
            Building  → Building     a part has arrived, or the stage is ready
            Building  → Vacant       the peer is gone; or the generation ended, and it goes on as an understudy
            Here      → Here         another keeps it: the generation in which a faster peer tried the stage has ended
            Here      → Building     another peer gets the stage, since this one is needed for another
            Here      → Absent       the peer's session broke
            Here      → Vacant       the peer is gone, gave it up or has a new session; or all go back to a snapshot
            Absent    → Vacant       the peer has a new session, or is not waited for any longer
            Absent    → Here         the generation ended, and who had the stage before has it
            Absent    → Building     all go back to a snapshot, and another peer gets the stage

    member  unknown   → spare        it joined
            unknown   → holder       it joined, and got a stage
            unknown   → resting      it joined, and wants no stage for now
            spare     → holder       it got a stage
            holder    → spare        it gave its stage up
            spare     → resting      it wants no stage for now
            resting   → spare        it woke
            resting   → holder       it woke, and got a stage
            holder    → resting      it wants no stage for now, and nothing is saved yet
            holder    → leaving      it goes, or rests, once the step is done and saved
            leaving   → holder       it woke before that
            leaving   → resting      the step is saved
            holder    → away         its session broke
            leaving   → away         the same
            away      → holder       it is back, and has its stage in memory
            away      → spare        it is back without it
            spare     → gone         its session broke, or it left, was kicked or was dismissed
            holder    → gone         it left, was kicked or dismissed; or its session broke, and it built its stage
            resting   → gone
            leaving   → gone
            away      → gone         it is not waited for any longer, or was dismissed
            gone      → spare        it joined again
            gone      → holder       the same, and got a stage
            gone      → resting
            gone      → unknown      it was long ago
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import assert_never

from protomodels_cli import timeouts
from protomodels_cli.coordinator import (
    absences,
    assigning,
    checking,
    disputes,
    fitting,
    notices,
    outgoing,
    patience,
    reasons,
    recovery,
    reseating,
    resting,
    spares,
    trials,
    turns,
)
from protomodels_cli.coordinator.departures import Departed
from protomodels_cli.coordinator.events import (
    Accused,
    BasisTaken,
    CheckpointCut,
    Command,
    Dismiss,
    Done,
    Event,
    FromPeers,
    Joined,
    Lacking,
    Leaving,
    Left,
    PartFailed,
    PartsArrived,
    PauseRun,
    Prefetched,
    Quit,
    Ready,
    Rests,
    ResumeRun,
    SnapshotLost,
    SnapshotWhole,
    StopRun,
    StoreAway,
    SubspaceReported,
    Tick,
    Trouble,
)
from protomodels_cli.coordinator.history import (
    Adopted,
    Decided,
    Ended,
    Evaluated,
    History,
    Paused,
    Record,
    Reported,
    Resumed,
    Synced,
    beginning,
)
from protomodels_cli.coordinator.moves import Moves
from protomodels_cli.coordinator.next_task import next_task
from protomodels_cli.coordinator.outsized import note as note_outsized
from protomodels_cli.coordinator.seats import Absent, waited_for
from protomodels_cli.coordinator.snapshots import blame, policy
from protomodels_cli.coordinator.state import KEPT_SECONDS, Measured, State
from protomodels_cli.coordinator.work import Blocked, Idle, Report, Task, Unplaced, Working
from protomodels_cli.protocol import steps
from protomodels_cli.protocol.hashes import weights_sha256
from protomodels_cli.protocol.throughput import with_step
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.usage import columns


def start(spec: RunSpec, basis_sha256: str, t_fixed: tuple[int, str]) -> State:
    return State(spec, t_fixed, beginning(basis_sha256))


def resume(
    spec: RunSpec,
    t_fixed: tuple[int, str],
    history: History,
    now: float,
    names: Mapping[str, str] | None = None,
    step_seconds: tuple[float, ...] = (),
) -> State:
    """From a journal: the holders are waited for, since what they have in memory is usually all there. `names`: of
    peers, as far as they are known. `step_seconds`: of the last steps, likewise."""
    until = now + recovery.LEASES * spec.limits.lease_seconds
    return State(
        spec,
        t_fixed,
        history,
        departed={peer: Departed((names or {}).get(peer, ""), "lost", now) for peer in history.holders},
        seats=waited_for(len(history.layers), history.holders, now, until),
        work=Unplaced(reasons.CoordinatorRestarted()),
        measured=Measured(step_seconds=step_seconds),
    )


def apply(state: State, event: Event, now: float) -> tuple[State, list[Record], list[Command]]:
    moves = Moves(state, now)
    if state.history.over:
        if isinstance(event, Joined):
            moves.know(event.peer)
            _dismiss_all(moves)
    elif state.stopped:
        if isinstance(event, Joined):
            moves.do(Dismiss(event.peer.id, reasons.RunStopped(state.history.newest.step)))
    else:
        _take(moves, event)
    return moves.state, moves.records, moves.commands


def _take(moves: Moves, event: Event) -> None:
    before = moves.state
    if not isinstance(event, FromPeers) or fitting.hear(moves, event):
        _hear(moves, event)
    if before.seats.handover is not None:
        reseating.watch(moves)
        if moves.seats.handover is None:
            _go_on_if_idle(moves)
    spares.watch(moves, before)


def _hear(moves: Moves, event: Event) -> None:
    state = moves.state
    match event:
        case Joined(peer):
            assigning.join(moves, peer)
            if peer.rest is not None:
                resting.hear(moves, peer.id, peer.rest)
                _go_on_if_idle(moves)
            absences.weigh(moves)
        case Left(peer_id, why):
            closed, lease = not isinstance(why, reasons.NoHeartbeat), state.spec.limits.lease_seconds
            until = moves.now + timeouts.SESSION_RECONNECT if closed else None
            absences.miss(moves, why, Absent(peer_id, moves.now if closed else moves.now - lease, until))
        case Leaving(peer_id):
            resting.end(moves, peer_id)
            _hear_leaving(moves, peer_id)
        case Rests(peer_id, rest):
            resting.hear(moves, peer_id, rest)
            _go_on_if_idle(moves)
        case Trouble(peer_id, what, about):
            if about is None:
                assigning.dismiss(moves, what, peer_id)
            else:
                disputes.hear(moves, what, peer_id, about)
        case Done(peer_id, _, _, report):
            _hear_done(moves, peer_id, report)
        case BasisTaken():
            _take_basis(moves, event)
        case SubspaceReported():
            _hear_subspace(moves, event)
        case SnapshotWhole():
            policy.hear_whole(moves, event)
            _go_on_if_idle(moves)
        case PartsArrived():
            blame.hear_arrived(moves, event)
        case PartFailed():
            if event.peer is None or event.peer in state.history.holders:
                blame.hear_failed(moves, event)
                _go_on_if_idle(moves)
        case CheckpointCut():
            assigning.take_first_snapshot(moves, event)
        case SnapshotLost():
            if not absences.lose_snapshot(moves, event):
                assigning.lose_snapshot(moves, event)
        case StoreAway():
            absences.hear_store_away(moves, event)
        case Prefetched(peer_id, part):
            absences.hear_fetched(moves, peer_id, part)
        case Lacking(peer_id, part, disproved):
            absences.hear_lacking(moves, peer_id, part)
            if disproved:
                trials.hear_disproved(moves, peer_id, part)
                absences.weigh(moves)
        case Ready(peer_id, part):
            absences.hear_ready(moves, peer_id, part)
            absences.weigh(moves)
        case Accused(accused, voices):
            before = state.conduct.accusers.get(accused, frozenset())
            moves.conduct = replace(moves.conduct, accusers={**state.conduct.accusers, accused: before | voices})
        case PauseRun():
            if state.history.paused is None:
                _pause(moves, reasons.ByOwner())
                _go_on_if_idle(moves)
        case ResumeRun():
            if state.history.paused is not None:
                moves.record(Resumed())
                moves.measured = replace(moves.measured, decided_at=())
                moves.tell(notices.Resumed())
                moves.do(outgoing.pause(moves.state))
                _go_on_if_idle(moves)
        case StopRun():
            nothing_new = state.history.newest.step == state.history.step or not (
                state.seats.holds or state.seats.absent
            )
            moves.state = replace(moves.state, stopping=True)
            if state.stands_still and (nothing_new or state.stopping):  # asked twice: what is not saved is let go
                _stop(moves)
            _go_on_if_idle(moves)
        case Tick(room):
            moves.saving = replace(moves.saving, room=room)
            absences.weigh(moves)
            blame.watch(moves)
            if policy.may_try_again(moves):
                _go_on_if_idle(moves)
            patience.watch(moves)
        case _:
            assert_never(event)


def _pause(moves: Moves, why: reasons.Pause) -> None:
    """After the step that is under way."""
    moves.record(Paused(why))
    moves.tell(notices.Paused(why, moves.state.called))
    moves.do(outgoing.pause(moves.state))


def _hear_leaving(moves: Moves, peer: str) -> None:
    state = moves.state
    if peer not in state.peers:
        return
    if state.history.step == 0 or (peer not in state.seats.holds and state.stage_of(peer) is None):
        _let_go(moves, peer)
        return
    moves.state = replace(moves.state, leaving=state.leaving | {peer})
    _go_on_if_idle(moves)


def _let_go(moves: Moves, *peers: str) -> None:
    """They asked to go, or to rest."""
    resting_peers = {id_ for id_, known in moves.state.peers.items() if known.rest is not None}
    going = [peer for peer in peers if peer not in resting_peers]
    moves.do(*(Dismiss(peer, reasons.AskedToLeave()) for peer in going))
    resting.lay_down(moves, dict.fromkeys(going, reasons.AskedToLeave()), set(peers) - set(going))


# Tasks


def _hear_done(moves: Moves, holder: str, report: Report) -> None:
    state, work, stage = moves.state, moves.work, moves.state.stage_of(holder)
    assert isinstance(work, Working)
    assert stage is not None
    task = work.task
    if task.kind in ("build", "sync") and not checking.check_hashes(moves, task, stage, report):
        return
    if task.kind == "step" and not (
        checking.check_units(moves, stage, report) and checking.check_recorded(moves, task, stage, report)
    ):
        return
    moves.work = replace(work, heard={**work.heard, stage: report})
    if task.kind == "build":
        peer, newest = state.history.holders[stage], state.history.newest
        ahead = (preparation := state.seats.preparing.get(peer)) is not None and preparation.ready
        if peer not in state.seats.holds and not ahead:
            policy.note_built(moves, peer, stage, moves.now - task.started)
        moves.seats = moves.seats.built(stage, peer)
        if newest.parts and newest.step == state.history.step:
            policy.note_part(moves, peer, newest.as_parts()[stage])
    if task.kind == "step":
        moves.measured = replace(moves.measured, usage={**state.measured.usage, stage: report.usage})
    if len(moves.state.heard) == state.stages:
        _conclude(moves, task, [moves.state.heard[i] for i in range(state.stages)])


def _conclude(moves: Moves, task: Task, reports: list[Report]) -> None:
    """Every stage has reported: decide what follows."""
    match task.kind:
        case "build":
            if moves.state.spec.subspace.has_basis:
                moves.record(Synced(task.step))
            link = moves.begin("link", task.step)
            moves.do(outgoing.turn(moves.state, None, link))
            return
        case "link":
            moves.measured = replace(moves.measured, linked=moves.now - task.started)
            moves.tell(notices.StagesLinked(moves.state.history.generation))
            if moves.state.history.next_basis is not None:
                moves.do(outgoing.basis(moves.state, moves.state.history.next_basis.version))
        case "step":
            _decide(moves, task, reports)
            if moves.state.task != task:
                return  # it went back to a snapshot
        case "sync":
            moves.record(Synced(task.step))
        case "evaluation":
            loss = reports[-1].loss_sum / max(1, reports[-1].tokens)
            moves.record(Evaluated(task.step, loss))
            moves.write_row("eval", task.step, loss=loss)
        case "finish":
            moves.record(Ended(weights_sha256(p for r in reports for p in r.parameters)))
            moves.work = Idle()
            moves.tell(notices.RunDone(task.step))
            _dismiss_all(moves)
            return
    _go_on(moves)


def _decide(moves: Moves, task: Task, reports: list[Report]) -> None:
    state, spec, step = moves.state, moves.state.spec, task.step
    squares = [square for r in reports for _, square in r.norms]
    outcome = steps.decide(spec, step, reports[-1].loss_sum, squares)
    before = state.history.basis_version
    sent = sum(r.usage.forward_bytes for r in reports), sum(r.usage.backward_bytes for r in reports)
    moves.record(
        Decided(
            step,
            outcome.apply,
            outcome.lr,
            outcome.clip,
            outcome.loss,
            outcome.norm,
            state.history.generation,
            *sent,
        )
    )
    history = moves.state.history
    seconds = moves.now - task.started
    moves.conduct = replace(moves.conduct, unsound=_unsound(state, reports))
    moves.state = replace(moves.state, undelivered=True, broken=0, stalled=0)
    moves.conduct = replace(moves.conduct, returns={})
    moves.state = replace(moves.state, trouble=None)
    moves.measured = replace(
        moves.measured,
        decided_at=with_step(state.measured.decided_at, task.started + state.waited, moves.now),
        step_seconds=(*state.measured.step_seconds[1 - KEPT_SECONDS :], seconds),
    )
    assigning.trust(moves)
    reseating.note_step(moves, seconds, reports)
    note_outsized(moves, step, reports)
    if history.basis_version != before:
        moves.write_row("switch", step, version=history.basis_version, sha256=history.basis_sha256)
    moves.write_row(
        "step",
        step,
        loss=outcome.loss,
        lr=outcome.lr,
        grad_norm=outcome.norm,
        applied=outcome.apply,
        tokens=outcome.tokens,
        seconds=seconds,
        basis_version=history.basis_version if spec.subspace.has_basis else None,
        holders=[state.name_of(peer) or peer for peer in state.history.holders],
        stages=columns([r.usage for r in reports]),
    )
    policy.look_at_the_clock(moves, task.started)
    if history.skipped_in_a_row >= spec.limits.nonfinite_steps:
        _answer_bad_numbers(moves)


def _unsound(state: State, reports: list[Report]) -> tuple[str, int]:
    """Finds the only holder with numbers that are not finite, and for how many steps in a row it was alone."""
    found = [stage for stage, report in enumerate(reports) if not all(isfinite(square) for _, square in report.norms)]
    if not isfinite(reports[-1].loss_sum) and len(reports) - 1 not in found:
        found.append(len(reports) - 1)
    if len(found) != 1:
        return "", 0
    holder, (before, times) = state.history.holders[found[0]], state.conduct.unsound
    return holder, 1 + (times if holder == before else 0)


def _answer_bad_numbers(moves: Moves) -> None:
    """Too many steps in a row had a loss or gradient that is not finite."""
    spec, history = moves.state.spec, moves.state.history
    many, step = history.skipped_in_a_row, history.step
    why = reasons.NonFinite(many, step, spec.optimizer.lr)
    before = [mark for mark in history.snapshots if mark.step <= step - many]
    if spec.limits.nonfinite_action == "rollback" and history.answered < step:
        assigning.roll_back(moves, before[-1], why, answered=step)
        assigning.regroup(moves)
        return
    holder, times = moves.conduct.unsound
    alone = times >= spec.limits.nonfinite_steps and moves.state.stages > 1
    first = not turns.is_recent(moves.state, "unsound", moves.now)  # another holder may have such numbers as well
    if alone and first and assigning.is_replaceable_after_its_turn(moves.state, moves.now, holder):
        stage = history.holders.index(holder)
        moves.conduct = replace(moves.conduct, turns=turns.with_names(moves.state, {"unsound"}, moves.now))
        assigning.stand_aside(moves, {holder: reasons.UnsoundNumbers(stage, times)})
        return
    _pause(moves, why)


def _go_on_if_idle(moves: Moves) -> None:
    if moves.state.placed and moves.state.task is None and not moves.state.stopped:
        _go_on(moves)


def _go_on(moves: Moves) -> None:
    """Send the next task, with the last decision where it has not been sent."""
    state = moves.state
    if not policy.is_needed(state) and state.history.step < state.spec.steps:
        if state.leaving:
            _let_go(moves, *sorted(state.leaving))
            if moves.state.task != state.task or not moves.state.placed:
                return  # their stages are assigned again
            state = moves.state  # they had none any more
        if state.stopping:
            _stop(moves)
            return
    if save := policy.begin_if_due(moves):
        reseating.consider(moves)
    decision = state.history.decision if state.undelivered else None
    coming = next_task(moves.state)
    task = moves.begin(*coming) if isinstance(coming, tuple) else None
    if not isinstance(coming, tuple):
        known = state.blocked is not None and state.blocked.on == coming
        moves.work = state.work if known else Blocked(coming, moves.now)
    if decision is not None or task is not None or save:
        moves.do(outgoing.turn(moves.state, decision, task, save))
    moves.state = replace(moves.state, undelivered=False)


def _stop(moves: Moves) -> None:
    moves.state = replace(moves.state, stopped=True)
    if moves.state.placed:
        moves.work = Idle()
    saved = moves.state.history.newest.step
    moves.do(*(Dismiss(peer, reasons.RunStopped(saved)) for peer in moves.state.peers))
    moves.tell(notices.RunStopped(saved, moves.state.folder))
    moves.do(Quit())


# The subspace


def _hear_subspace(moves: Moves, event: SubspaceReported) -> None:
    history, update = moves.state.history, moves.state.spec.subspace.update
    version, row = history.basis_version, dict(event.row)
    if event.sha256 is not None:
        version += 1
        first = steps.first_step_with(update, event.step)
        moves.record(Adopted(version, event.sha256, event.step, first))
        moves.state = replace(moves.state, took_basis=frozenset())
        moves.do(outgoing.basis(moves.state, version))
        row = {"first_step": first, **row}
    moves.record(Reported(event.step))
    if event.row:
        moves.write_row("subspace", event.step, version=version, **row)
    policy.complete(moves)
    _go_on_if_idle(moves)


def _take_basis(moves: Moves, event: BasisTaken) -> None:
    state, new, stage = moves.state, moves.state.history.next_basis, moves.state.stage_of(event.peer)
    assert new is not None
    assert stage is not None
    if event.sha256 != new.sha256:
        assigning.dismiss(moves, reasons.DamagedBasis(new.version), event.peer)
        return
    moves.state = replace(moves.state, took_basis=state.took_basis | {stage})
    if len(moves.state.took_basis) == state.stages:
        _go_on_if_idle(moves)


def _dismiss_all(moves: Moves) -> None:
    for peer in moves.state.peers:
        moves.do(Dismiss(peer, reasons.RunFinished()))
