"""The coordinator's brain: a pure state machine, apply(state, event, now) → (state, records, commands).

No clock, no I/O, no randomness. A run is a chain of *tasks* that all stages do together: place, link, then steps with a
sync or an evaluation between them, and a finish. A task is concluded when every stage has reported; records say what
was decided, and reach the journal before the commands that follow from them leave. Snapshots are taken beside it.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import assert_never

from protomodels_cli.coordinator import seating
from protomodels_cli.coordinator.events import (
    BasisTaken,
    Command,
    Dismiss,
    Done,
    Event,
    Fetched,
    Joined,
    Leaving,
    Left,
    PartFailed,
    PauseRun,
    Quit,
    ResumeRun,
    SendBasis,
    SendTurn,
    SnapshotLost,
    SnapshotWhole,
    StopRun,
    SubspaceReported,
    Tick,
    Trouble,
)
from protomodels_cli.coordinator.history import (
    Adopted,
    Decided,
    Ended,
    Evaluated,
    Forgot,
    History,
    Paused,
    Record,
    Reported,
    Resumed,
    Synced,
    beginning,
)
from protomodels_cli.coordinator.moves import Moves
from protomodels_cli.coordinator.plan import next_kind, stages_in_words, waiting_for
from protomodels_cli.coordinator.snapshots import policy
from protomodels_cli.coordinator.state import Hashes, Report, State, Task
from protomodels_cli.errors import EXIT_OUTSIDE, EXIT_REFUSED
from protomodels_cli.protocol import steps
from protomodels_cli.protocol.hashes import weights_sha256
from protomodels_cli.spec.schema import RunSpec

REDIAL_SECONDS = 2.0  # for a holder whose connection broke to come back before another takes its place
# What a task may take: so many times what is usual, and at least so many seconds; or these, while no step was decided.
STALL_TIMES, STALL_SECONDS, STALL_AT_FIRST = 10, 600.0, 3600.0


def start(spec: RunSpec, basis_sha256: str, t_fixed: tuple[int, str]) -> State:
    return State(spec, t_fixed, beginning(basis_sha256))


def resume(spec: RunSpec, t_fixed: tuple[int, str], history: History, now: float) -> State:
    """From a journal: the holders are waited for, since what they have in memory is usually all there."""
    until = now + 2 * spec.limits.lease_seconds
    return State(
        spec,
        t_fixed,
        history,
        absent=dict.fromkeys(history.holders, until),
        missing="the peers of before to come back",
    )


def apply(state: State, event: Event, now: float) -> tuple[State, list[Record], list[Command]]:
    moves = Moves(state, now)
    if state.history.over:
        if isinstance(event, Joined):
            moves.set(peers={**state.peers, event.peer.id: event.peer})
            _dismiss_all(moves, "the run is done")
    elif state.stopped:
        if isinstance(event, Joined):
            moves.do(_stopped(event.peer.id, state.history))
    else:
        _take(moves, event)
    return moves.state, moves.records, moves.commands


def _stopped(peer: str, history: History) -> Dismiss:
    saved = history.newest.step
    return Dismiss(peer, f"the run was stopped by its owner; it is saved up to step {saved}", "", 0)


def _take(moves: Moves, event: Event) -> None:
    state = moves.state
    match event:
        case Joined(peer):
            seating.join(moves, peer)
        case Left(peer_id, why, may_return):
            seating.lose(moves, why, peer_id, until=moves.now + REDIAL_SECONDS if may_return else None)
        case Leaving(peer_id):
            _hear_leaving(moves, peer_id)
        case Trouble(peer_id, what, about, generation):
            known = state.stage_of(peer_id) is not None and generation == state.history.generation
            if about is None:
                seating.part_with(moves, what, peer_id)
            elif known and about < state.stages:
                seating.break_up(moves, what, peer_id, about)
        case Done(peer_id, generation, number, report):
            stage = state.stage_of(peer_id)
            known = stage is not None and generation == state.history.generation
            if known and state.task is not None and state.task.number == number:
                assert stage is not None
                _hear(moves, state.task, stage, report)
        case BasisTaken():
            _take_basis(moves, event)
        case SubspaceReported():
            _hear_subspace(moves, event)
        case SnapshotWhole():
            policy.hear_whole(moves, event)
            _go_on_if_idle(moves)
        case PartFailed():
            if event.peer is None or event.peer in state.history.holders:
                policy.give_up(moves, event)
                _go_on_if_idle(moves)
        case SnapshotLost():
            _lose_snapshot(moves, event)
        case Fetched(peer_id, part):
            policy.note_part(moves, peer_id, part)
        case PauseRun():
            if state.history.paused is None:
                moves.record(Paused("its owner paused it", "pmtrain resume"))
                moves.say("paused after the step that is under way")
                _go_on_if_idle(moves)
        case ResumeRun():
            if state.history.paused is not None:
                moves.record(Resumed())
                moves.say("resumed")
                _go_on_if_idle(moves)
        case StopRun():
            nothing_new = state.history.newest.step == state.history.step or not (state.holds or state.absent)
            moves.set(stopping=True)
            if not state.placed and (nothing_new or state.stopping):  # asked twice: what is not saved is let go
                _stop(moves)
            _go_on_if_idle(moves)
        case Tick():
            _watch_the_clock(moves)
        case _:
            assert_never(event)


def _hear_leaving(moves: Moves, peer: str) -> None:
    state = moves.state
    if peer not in state.peers:
        return
    if state.history.step == 0 or (peer not in state.holds and state.stage_of(peer) is None):
        _let_go(moves, peer)
        return
    moves.set(leaving=state.leaving | {peer})
    _go_on_if_idle(moves)


def _let_go(moves: Moves, *peers: str) -> None:
    """They asked to go."""
    moves.do(*(Dismiss(peer, "left the run", "", 0) for peer in peers))
    seating.lose(moves, "it asked to go", *peers)


# Tasks


def _hear(moves: Moves, task: Task, stage: int, report: Report) -> None:
    state = moves.state
    if stage in state.heard:
        return
    if task.kind in ("place", "sync") and not _check_hashes(moves, task, stage, report):
        return
    moves.set(heard={**state.heard, stage: report})
    if task.kind == "place":
        peer, newest = state.history.holders[stage], state.history.newest
        moves.set(holds={**moves.state.holds, peer: stage})
        if newest.parts and newest.step == state.history.step:
            policy.note_part(moves, peer, newest.as_parts()[stage])
    if task.kind == "step":
        moves.set(usage={**state.usage, stage: report})
    if len(moves.state.heard) == state.stages:
        _conclude(moves, task, [moves.state.heard[i] for i in range(state.stages)])


def right_hashes(state: State) -> Hashes | None:
    """What every stage must use now."""
    if not state.spec.subspace.has_basis:
        return None
    history = state.history
    return Hashes(history.basis_version, history.basis_sha256, *state.t_fixed)


def _check_hashes(moves: Moves, task: Task, stage: int, report: Report) -> bool:
    state, right, found = moves.state, right_hashes(moves.state), report.hashes
    if right is None or found == right:
        return True
    new = state.history.next_basis
    if new is not None and new.first_step == state.history.step + 1:
        ahead = replace(right, basis_version=new.version, basis=new.sha256)
        if found == ahead:
            return True  # a step that was under way has switched to it
    peer = state.peers[state.history.holders[stage]]
    other = "T_fixed" if found and (found.basis_version, found.basis) == (right.basis_version, right.basis) else "U"
    if peer.id in state.suspects or (seating.fresh(state.history) and task.kind == "place"):
        why = f"{peer.name} ({peer.id}) makes other bytes of {other} than the run's"
        fix = "install the coordinator's version of pmtrain; if it has that, test the machine's memory"
        moves.do(Dismiss(peer.id, why, fix, EXIT_REFUSED))
        seating.lose(moves, f"its {other} has other bytes than the run's", peer.id)
        return False
    moves.set(suspects=state.suspects | {peer.id})
    moves.write_row("mismatch", task.step, stage=stage, peer=peer.id, what=other)
    why = f"stage {stage} ({peer.name}) used other bytes of {other} than the run, found after step {task.step}"
    seating.roll_back(moves, state.history.newest, why)
    seating.regroup(moves)
    return False


def _conclude(moves: Moves, task: Task, reports: list[Report]) -> None:
    """Every stage has reported: decide what follows."""
    match task.kind:
        case "place":
            if moves.state.spec.subspace.has_basis:
                moves.record(Synced(task.step))
            moves.do(SendTurn(None, moves.begin("link", task.step)))
            return
        case "link":
            moves.say("all stages are placed and linked")
            if moves.state.history.next_basis is not None:
                moves.do(SendBasis(moves.state.history.next_basis.version))
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
            moves.set(task=None)
            _dismiss_all(moves, "the run is done")
            return
    _go_on(moves)


def _decide(moves: Moves, task: Task, reports: list[Report]) -> None:
    state, spec, step = moves.state, moves.state.spec, task.step
    squares = [square for r in reports for _, square in r.norms]
    outcome = steps.decide(spec, step, reports[-1].loss_sum, squares)
    before = state.history.basis_version
    sent = [int(sum(r.usage.get(f"{leg}_bytes", 0) for r in reports)) for leg in ("forward", "backward")]
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
    moves.set(
        undelivered=True,
        broken=0,
        stalled=0,
        decided_at=(*state.decided_at[-49:], moves.now),
        step_seconds=(*state.step_seconds[-49:], seconds),
    )
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
        stages=[dict(r.usage) for r in reports],
    )
    policy.say_if_left_out(moves)
    if history.skipped_in_a_row >= spec.limits.nonfinite_steps:
        _answer_bad_numbers(moves)


def _answer_bad_numbers(moves: Moves) -> None:
    """Too many steps in a row had a loss or gradient that is not finite."""
    spec, history = moves.state.spec, moves.state.history
    many, step = history.skipped_in_a_row, history.step
    why = f"{many} steps in a row, up to step {step}, had a non-finite loss or gradient"
    before = [mark for mark in history.snapshots if mark.step <= step - many]
    if spec.limits.nonfinite_action == "return" and history.answered < step:
        seating.roll_back(moves, before[-1], why, answered=step)
        seating.regroup(moves)
        return
    fix = f"lower optimizer.lr ({spec.optimizer.lr:g}) or lengthen the warm-up in a new run, or pmtrain resume"
    moves.record(Paused(why, fix))
    moves.say(f"paused: {why}\n    fix:  {fix}")


def _go_on_if_idle(moves: Moves) -> None:
    if moves.state.placed and moves.state.task is None:
        _go_on(moves)


def _go_on(moves: Moves) -> None:
    """Send the next task, with the last decision where it has not been sent."""
    state = moves.state
    if not policy.is_needed(state) and state.history.step < state.spec.steps:
        if state.leaving:
            _let_go(moves, *sorted(state.leaving))
            if moves.state.task != state.task or not moves.state.placed:
                return  # their stages are seated anew
            state = moves.state  # they had none any more
        if state.stopping:
            _stop(moves)
            return
    save = policy.begin_if_due(moves)
    decision = state.history.decision if state.undelivered else None
    coming = next_kind(moves.state)
    task = None if isinstance(coming, str) else moves.begin(*coming)
    if task is None:
        moves.set(task=None, heard={})
    if decision is not None or task is not None or save:
        moves.do(SendTurn(decision, task, save))
    moves.set(undelivered=False)


def _stop(moves: Moves) -> None:
    moves.set(stopped=True, task=None)
    for peer in moves.state.peers:
        moves.do(_stopped(peer, moves.state.history))
    moves.do(Quit())


# The subspace


def _hear_subspace(moves: Moves, event: SubspaceReported) -> None:
    state = moves.state
    known = state.stage_of(event.peer) == state.stages - 1 and event.generation == state.history.generation
    if not known or state.owed != event.step:
        return
    history, update = state.history, state.spec.subspace.update
    version, row = history.basis_version, dict(event.row)
    if event.sha256 is not None:
        version += 1
        first = steps.first_step_with(update, event.step)
        moves.record(Adopted(version, event.sha256, event.step, first))
        moves.set(took_basis=frozenset())
        moves.do(SendBasis(version))
        row = {"first_step": first, **row}
    moves.record(Reported(event.step))
    if event.row:
        moves.write_row("subspace", event.step, version=version, **row)
    policy.complete(moves)
    _go_on_if_idle(moves)


def _take_basis(moves: Moves, event: BasisTaken) -> None:
    state, new = moves.state, moves.state.history.next_basis
    stage = state.stage_of(event.peer)
    known = stage is not None and event.generation == state.history.generation
    if not known or new is None or event.version != new.version:
        return
    if event.sha256 != new.sha256:
        seating.part_with(moves, f"basis {new.version} did not reach it whole", event.peer)
        return
    assert stage is not None
    moves.set(took_basis=state.took_basis | {stage})
    if len(moves.state.took_basis) == state.stages:
        _go_on_if_idle(moves)


# What goes wrong


def _lose_snapshot(moves: Moves, event: SnapshotLost) -> None:
    """A stage's part is damaged wherever it was looked for: what it belongs to is worth nothing. If it is only the peer
    that cannot read it, it may try again, a few times."""
    state, history = moves.state, moves.state.history
    known = state.stage_of(event.peer) is not None and event.generation == history.generation
    place = (event.lineage, event.step)
    if not known or place not in [(m.lineage, m.step) for m in history.snapshots[1:]]:
        return
    if event.whole_here:
        seating.seat_again(moves, f"could not read its part of the snapshot of step {event.step}", event.peer)
        return
    moves.say(f"the snapshot of step {event.step} cannot be used: {event.why}")
    moves.record(Forgot(*place))
    seating.roll_back(moves, moves.state.history.newest, "a snapshot is damaged")
    seating.regroup(moves)


def _watch_the_clock(moves: Moves) -> None:
    seating.give_up_waiting(moves)
    if policy.may_try_again(moves):
        _go_on_if_idle(moves)
    task = moves.state.task
    if task is None:
        return
    if task.kind in ("place", "link"):
        _watch_seating(moves, task)
    elif moves.now - task.started > _patience(moves.state, task):
        moves.say(f"still waiting for {waiting_for(moves.state, moves.now)}: linking all stages anew")
        moves.set(stalled=moves.state.stalled + 1)
        seating.regroup(moves)


def _watch_seating(moves: Moves, task: Task) -> None:
    state, limits = moves.state, moves.state.spec.limits
    if task.kind == "link":
        doing, limit = "link", limits.link_seconds
    elif state.history.step == 0:
        doing, limit = "build", limits.build_seconds
    else:
        doing, limit = "reuse", limits.reuse_seconds
    if moves.now - task.started < limit:
        return
    late = [i for i in range(state.stages) if i not in state.heard]
    if doing == "reuse":
        # A part of a snapshot may take long to arrive, and who waits for it says so if it does not come.
        late = [i for i in late if state.history.holders[i] in state.holds]
        if not late:
            return
    if task.kind == "link" and not state.relay_all:
        moves.say(f"{stages_in_words(state, late)} cannot reach each other within {limit:g} s: relaying all links")
        moves.set(relay_all=True)
        seating.regroup(moves)
        return
    for i in late:
        peer = state.peers[state.history.holders[i]]
        why = f"{peer.name} ({peer.id}) did not {doing} stage {i} within limits.{doing}_seconds ({limit:g} s)"
        moves.do(Dismiss(peer.id, why, "use a faster machine, or raise the limit in the spec", EXIT_OUTSIDE))
    seating.lose(moves, f"not ready within {limit:g} s", *(state.history.holders[i] for i in late))


def _patience(state: State, task: Task) -> float:
    """How long a task may take before we no longer believe in it. Who is merely slow gets more each time."""
    if not state.step_seconds:
        return STALL_AT_FIRST * 2.0**state.stalled
    usual = statistics.median(state.step_seconds)
    if task.kind == "evaluation":
        usual *= max(1.0, state.spec.eval.windows / state.spec.batch.size)
    return max(STALL_SECONDS, STALL_TIMES * usual) * 2.0**state.stalled


def _dismiss_all(moves: Moves, why: str) -> None:
    for peer in moves.state.peers:
        moves.do(Dismiss(peer, why, "", 0))
