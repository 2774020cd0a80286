"""The coordinator's brain: a pure state machine, apply(state, event, now) → (state, records, commands).

No clock, no I/O, no randomness. A run is a chain of *tasks* that all stages do together: place, link, then steps with a
sync, an evaluation or a save between them, and a finish. A task is concluded when every stage has reported; records say
what was decided, and reach the journal before the commands that follow from them leave.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, assert_never

from protomodels_cli.coordinator.events import (
    BasisTaken,
    Command,
    CompleteSnapshot,
    DiskFailed,
    Dismiss,
    Done,
    DropSnapshot,
    Event,
    Joined,
    KeepSpare,
    Leaving,
    Left,
    PlaceStage,
    Say,
    SendBasis,
    SendTurn,
    SnapshotComplete,
    SnapshotFailed,
    SubspaceReported,
    Tick,
    Trouble,
    WriteRow,
)
from protomodels_cli.coordinator.history import (
    Adopted,
    Decided,
    Ended,
    Evaluated,
    History,
    Placed,
    Record,
    Saved,
    Stopped,
    Synced,
    fold,
)
from protomodels_cli.coordinator.placement import Offer, Placement, place
from protomodels_cli.coordinator.plan import cut_in_words, next_kind, stages_in_words
from protomodels_cli.coordinator.state import Hashes, Kind, Report, State, Task
from protomodels_cli.errors import EXIT_OUTSIDE, EXIT_REFUSED, EXIT_STOPPED
from protomodels_cli.model import grassmann
from protomodels_cli.model.schedule import clip_coefficient, gradient_norm, learning_rate
from protomodels_cli.model.snapshot import weights_sha256
from protomodels_cli.spec.schema import RunSpec

SAVE_AGAIN = 5.0  # seconds


def start(spec: RunSpec, basis_sha256: str, t_fixed: tuple[int, str]) -> State:
    return State(spec, t_fixed, History(basis_sha256=basis_sha256))


class _Moves:
    """A state on its way through one event: what was recorded, and what is to be done."""

    def __init__(self, state: State, now: float):
        self.state, self.now = state, now
        self.records: list[Record] = []
        self.commands: list[Command] = []

    def record(self, record: Record) -> None:
        self.records.append(record)
        self.state = replace(self.state, history=fold(self.state.history, record))

    def set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def do(self, *commands: Command) -> None:
        self.commands += commands


def apply(state: State, event: Event, now: float) -> tuple[State, list[Record], list[Command]]:
    moves = _Moves(state, now)
    if state.history.over:
        if isinstance(event, Joined):
            moves.set(peers={**state.peers, event.peer.id: event.peer})
            _dismiss_all(moves)
        return moves.state, moves.records, moves.commands
    match event:
        case Joined(peer):
            moves.set(peers={**state.peers, peer.id: peer})
            moves.do(Say(f"{peer.name} ({peer.id}) joined with {peer.device}"))
            if state.placed:
                moves.do(KeepSpare(peer.id, _spare_because(state.stages)))
            else:
                _place(moves)
        case Left(peer_id, why):
            _lose(moves, why, peer_id)
        case Leaving(peer_id):
            if state.stage_of(peer_id) is None or state.history.step == 0:
                _let_go(moves, peer_id)
            else:
                moves.set(leaving=state.leaving | {peer_id})
                if state.task is None:
                    _go_on(moves)
        case Trouble(peer_id, what, about):
            _part_with(moves, peer_id, what, about)
        case Done(peer_id, number, report):
            stage = state.stage_of(peer_id)
            if stage is not None and state.task is not None and state.task.number == number:
                _hear(moves, state.task, stage, report)
        case BasisTaken(peer_id, version, sha256):
            _take_basis(moves, peer_id, version, sha256)
        case SubspaceReported():
            _hear_subspace(moves, event)
        case SnapshotComplete(step):
            if state.task is not None and state.task.kind == "save" and state.task.step == step:
                moves.record(Saved(step))
                moves.set(unsaved=None)
                _go_on(moves)
        case SnapshotFailed(step, why):
            if state.task is not None and state.task.kind == "save" and state.task.step == step:
                _give_up_snapshot(moves, step, why)
        case DiskFailed(why):
            _stop(moves, f"the coordinator's disk failed: {why}", "free space there and start a new run")
        case Tick():
            _watch_the_clock(moves)
        case _:
            assert_never(event)
    return moves.state, moves.records, moves.commands


def _place(moves: _Moves) -> None:
    """Give the stages to the peers that are here, if they suffice."""
    state = moves.state
    found = place(state.spec, [Offer(p.id, p.memory, p.flops) for p in state.peers.values()])
    if not isinstance(found, Placement):
        moves.set(missing=found, task=None, heard={})
        for peer in state.peers:
            moves.do(KeepSpare(peer, found))
        return
    generation = state.history.generation + 1
    moves.record(Placed(generation, found.layers, found.holders))
    _begin(moves, "place", state.history.step)
    moves.set(took_basis=frozenset(), owed=None, usage={}, leaving=frozenset(), unsaved=None)
    assert moves.state.task is not None
    for stage, peer in enumerate(found.holders):
        moves.do(PlaceStage(peer, stage, moves.state.task.number))
    for peer in state.peers:
        if peer not in found.holders:
            moves.do(KeepSpare(peer, _spare_because(len(found.holders))))
    moves.do(Say(f"generation {generation}: {cut_in_words(found.layers)}"))


def _spare_because(stages: int) -> str:
    return f"this peer is a spare, all {stages} stages have a holder"


def _begin(moves: _Moves, kind: Kind, step: int) -> None:
    number = moves.state.tasks + 1
    if kind == "step":
        moves.set(unsaved=None)
    moves.set(task=Task(number, kind, step, moves.now), heard={}, tasks=number)


def _lose(moves: _Moves, why: str, *gone: str) -> None:
    """These peers are here no more. What they held is given to others, or, once something was trained, missed."""
    state = moves.state
    held = [i for i, holder in enumerate(state.history.holders) if holder in gone]
    lost = [state.peers[peer] for peer in gone if peer in state.peers]
    if not lost:
        return
    moves.set(peers={i: p for i, p in state.peers.items() if i not in gone})
    moves.do(*(Say(f"{peer.name} ({peer.id}) left: {why}") for peer in lost))
    if held and state.history.step > 0:
        step, saved = state.history.step, state.history.saved
        peer = state.peers[state.history.holders[held[0]]]
        _stop(
            moves,
            f"stage {held[0]} was held by {peer.name} ({peer.id}), who left after step {step} ({why})",
            f"runs cannot be resumed yet; the newest complete snapshot is that of step {saved}"
            if saved >= 0
            else "runs cannot be resumed yet, and no snapshot was complete: set snapshots.interval in the spec",
        )
        return
    if held:
        _unplace(moves)
    if not moves.state.placed:
        _place(moves)


def _let_go(moves: _Moves, *peers: str) -> None:
    """They asked to go."""
    moves.do(*(Dismiss(peer, "left the run", "", 0) for peer in peers))
    _lose(moves, "it asked to go", *peers)


def _part_with(moves: _Moves, peer: str, what: str, about: int | None) -> None:
    """A peer that cannot go on, and whom it blames: before the first step both go, for we cannot know who is right."""
    state = moves.state
    if peer not in state.peers:
        return
    gone = {peer}
    if about is not None and about < state.stages and state.history.step == 0:
        gone.add(state.history.holders[about])
    for each in sorted(gone):
        moves.do(Dismiss(each, what, "join again; if it comes back, tell the run's owner", EXIT_OUTSIDE))
    _lose(moves, what, *sorted(gone, key=lambda p: p != peer))


def _unplace(moves: _Moves) -> None:
    """Nothing was trained yet: nobody holds anything any more."""
    moves.record(Placed(moves.state.history.generation, (), ()))
    moves.set(task=None, heard={})


def _hear(moves: _Moves, task: Task, stage: int, report: Report) -> None:
    if stage in moves.state.heard:
        return
    if task.kind in ("place", "sync") and not _check_hashes(moves, task, stage, report):
        return
    moves.set(heard={**moves.state.heard, stage: report})
    if task.kind == "save" and report.not_saved:
        _give_up_snapshot(moves, task.step, f"stage {stage}: {report.not_saved}")
        return
    if task.kind == "step":
        moves.set(usage={**moves.state.usage, stage: report})
    if len(moves.state.heard) == moves.state.stages:
        _conclude(moves, task, [moves.state.heard[i] for i in range(moves.state.stages)])


def right_hashes(state: State) -> Hashes | None:
    """What every stage must use now."""
    if state.spec.subspace.form == "dense":
        return None
    return Hashes(*state.history.basis_for(state.history.step), *state.t_fixed)


def _check_hashes(moves: _Moves, task: Task, stage: int, report: Report) -> bool:
    state, right, found = moves.state, right_hashes(moves.state), report.hashes
    if right is None or found == right:
        return True
    peer = state.peers[state.history.holders[stage]]
    other = "T_fixed" if found and (found.basis_version, found.basis) == (right.basis_version, right.basis) else "U"
    if task.kind == "place":
        why = f"{peer.name} ({peer.id}) makes other bytes of {other} than the run's"
        moves.do(Dismiss(peer.id, why, "install the coordinator's version of pmtrain", EXIT_REFUSED))
        _lose(moves, f"its {other} has other bytes than the run's", peer.id)
    else:
        good = f"step {state.history.synced}" if state.history.synced > 0 else "the start"
        _stop(
            moves,
            f"stage {stage}, held by {peer.name} ({peer.id}), uses other bytes of {other} than the run "
            f"(found at step {task.step}); what was trained since {good} is not to be trusted",
            "start the run again; if it comes back, test that machine's memory",
        )
    return False


def _conclude(moves: _Moves, task: Task, reports: list[Report]) -> None:
    """Every stage has reported: decide what follows."""
    spec = moves.state.spec
    match task.kind:
        case "place":
            if spec.subspace.form != "dense":
                moves.record(Synced(task.step))
            _begin(moves, "link", task.step)
            moves.do(SendTurn(None, moves.state.task))
            return
        case "link":
            moves.do(Say("all stages are placed and linked"))
        case "step":
            _decide(moves, task, reports)
        case "sync":
            moves.record(Synced(task.step))
        case "evaluation":
            loss = reports[-1].loss_sum / max(1, reports[-1].tokens)
            moves.record(Evaluated(task.step, loss))
            moves.do(WriteRow({"event": "eval", "step": task.step, "loss": loss}))
        case "save":
            if moves.state.unsaved is None:
                moves.do(CompleteSnapshot(task.step))
                return  # goes on when the snapshot is whole
            moves.do(DropSnapshot(task.step))
        case "finish":
            moves.record(Ended(weights_sha256(p for r in reports for p in r.parameters)))
            moves.set(task=None)
            _dismiss_all(moves)
            return
    if not moves.state.history.over:
        _go_on(moves)


def _decide(moves: _Moves, task: Task, reports: list[Report]) -> None:
    spec, step = moves.state.spec, task.step
    squares = [square for r in reports for _, square in r.norms]
    tokens = spec.batch.size * spec.model.context
    loss, norm = reports[-1].loss_sum / tokens, gradient_norm(squares)
    finite = math.isfinite(loss) and all(map(math.isfinite, squares))
    lr = learning_rate(spec.optimizer, step, spec.steps)
    clip = clip_coefficient(norm, spec.optimizer.clip) if finite else 0.0
    before = moves.state.history.basis_version
    moves.record(Decided(step, finite, lr, clip, loss, norm))
    history = moves.state.history
    moves.set(
        undelivered=True,
        owed=step if grassmann.reports(spec.subspace, step) else moves.state.owed,
        decided_at=(*moves.state.decided_at[-49:], (moves.now, step)),
    )
    dense = spec.subspace.form == "dense"
    if history.basis_version != before:
        row = {"event": "switch", "step": step, "version": history.basis_version, "sha256": history.basis_sha256}
        moves.do(WriteRow(row))
    moves.do(
        WriteRow(
            {
                "event": "step",
                "step": step,
                "loss": loss,
                "lr": lr,
                "grad_norm": norm,
                "applied": finite,
                "tokens": tokens,
                "seconds": moves.now - task.started,
                "basis_version": None if dense else history.basis_version,
                "stages": [dict(r.usage) for r in reports],
            }
        )
    )
    if history.skipped_in_a_row >= spec.limits.nonfinite_steps:
        _stop(
            moves,
            f"{history.skipped_in_a_row} steps in a row, up to step {step}, had a non-finite loss or gradient",
            f"lower optimizer.lr ({spec.optimizer.lr:g}) or lengthen the warm-up",
        )


def _go_on(moves: _Moves) -> None:
    """Send the next task, with the last decision where it has not been sent."""
    state = moves.state
    if state.leaving and state.history.saved == state.history.step < state.spec.steps:
        _let_go(moves, *sorted(state.leaving))
        return
    decision = state.history.decision if state.undelivered else None
    coming = next_kind(state)
    if isinstance(coming, str):
        moves.set(task=None, heard={})
    else:
        _begin(moves, *coming)
    if decision is not None or not isinstance(coming, str):
        moves.do(SendTurn(decision, moves.state.task))
    moves.set(undelivered=False)


def _hear_subspace(moves: _Moves, event: SubspaceReported) -> None:
    state = moves.state
    known = state.stage_of(event.peer) == state.stages - 1 and event.generation == state.history.generation
    if not known or state.owed != event.step:
        return
    moves.set(owed=None)
    if event.row:
        moves.do(WriteRow(_subspace_row(state, event)))
    if event.sha256 is not None:
        version = state.history.basis_version + 1
        first = grassmann.first_step_with(state.spec.subspace.update, event.step)
        moves.record(Adopted(version, event.sha256, first))
        moves.set(took_basis=frozenset())
        moves.do(SendBasis(version))
    if moves.state.task is None:
        _go_on(moves)


def _subspace_row(state: State, event: SubspaceReported) -> dict[str, Any]:
    row: dict[str, Any] = {"event": "subspace", "step": event.step, "version": state.history.basis_version}
    if event.sha256 is not None:
        row["version"] += 1
        row["first_step"] = grassmann.first_step_with(state.spec.subspace.update, event.step)
    return {**row, **event.row}


def _take_basis(moves: _Moves, peer_id: str, version: int, sha256: str) -> None:
    state, new = moves.state, moves.state.history.next_basis
    stage = state.stage_of(peer_id)
    if stage is None or new is None or version != new.version:
        return
    if sha256 != new.sha256:
        _part_with(moves, peer_id, f"basis {version} did not reach it whole", None)
        return
    moves.set(took_basis=state.took_basis | {stage})
    if state.task is None and len(moves.state.took_basis) == state.stages:
        _go_on(moves)


def _watch_the_clock(moves: _Moves) -> None:
    _try_to_save_again(moves)
    state, task = moves.state, moves.state.task
    limit = state.spec.limits.place_seconds
    if task is None or task.kind not in ("place", "link") or moves.now - task.started < limit:
        return
    late = [i for i in range(state.stages) if i not in state.heard]
    if task.kind == "link" and not state.relay_all:
        moves.do(Say(f"{stages_in_words(state, late)} cannot reach each other within {limit:g} s: relaying all links"))
        moves.set(relay_all=True)
        _unplace(moves)
        _place(moves)
        return
    for i in late:
        peer = state.peers[state.history.holders[i]]
        doing = "build" if task.kind == "place" else "link"
        why = f"{peer.name} ({peer.id}) did not {doing} stage {i} within limits.place_seconds ({limit:g} s)"
        moves.do(Dismiss(peer.id, why, "use a faster machine, or raise the limit in the spec", EXIT_OUTSIDE))
    _lose(moves, f"not ready within {limit:g} s", *(state.history.holders[i] for i in late))


def _give_up_snapshot(moves: _Moves, step: int, why: str) -> None:
    """Every part that fails says so; the stages that have not reported yet will still try theirs."""
    moves.do(DropSnapshot(step))
    if moves.state.unsaved is None:
        moves.set(unsaved=(step, why, moves.now))
        moves.do(Say(f"the snapshot of step {step} could not be written: {why}"))
    if len(moves.state.heard) == moves.state.stages:
        _go_on(moves)


def _try_to_save_again(moves: _Moves) -> None:
    """A snapshot that the run cannot go on without."""
    state = moves.state
    if state.task is None and state.unsaved is not None and moves.now - state.unsaved[2] > SAVE_AGAIN:
        moves.set(unsaved=None)
        _go_on(moves)


def _stop(moves: _Moves, why: str, fix: str) -> None:
    moves.record(Stopped(why, fix))
    moves.set(task=None)
    moves.do(Say(f"stopped: {why}"))
    _dismiss_all(moves)


def _dismiss_all(moves: _Moves) -> None:
    stopped = moves.state.history.stopped
    for peer in moves.state.peers:
        if stopped is not None:
            moves.do(Dismiss(peer, f"the run stopped: {stopped.why}", stopped.fix, EXIT_STOPPED))
        else:
            moves.do(Dismiss(peer, "the run is done", "", 0))
