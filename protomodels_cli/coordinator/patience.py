"""How long a task may take, and what is done when it takes longer. Pure."""

from __future__ import annotations

from dataclasses import replace

from protomodels_cli.coordinator import assigning, disputes, notices, readiness, trials
from protomodels_cli.coordinator.events import Dismiss
from protomodels_cli.coordinator.moves import Moves
from protomodels_cli.coordinator.next_task import still_working
from protomodels_cli.coordinator.readiness import restore_seconds
from protomodels_cli.coordinator.reasons import BasisNotTaken, Stall, SubspaceReport, TaskKind, TooSlow
from protomodels_cli.coordinator.state import State
from protomodels_cli.coordinator.work import Blocked, Task
from protomodels_cli.errors import EXIT_OUTSIDE

# What a task may take: so many times what is usual, and at least so many seconds; or these, while no step was decided.
STALL_TIMES, STALL_SECONDS, STALL_AT_FIRST = 5, 60.0, 3600.0


def watch(moves: Moves) -> None:
    state, task = moves.state, moves.state.task
    if state.seats.absent:
        return  # it is known who is waited for
    if task is None:
        _watch_subspace(moves)
    elif state.conduct.untried and state.measured.step_seconds and trials.watch(moves, task):
        return
    elif task.kind in ("build", "link"):
        _watch_assigning(moves, task)
    elif moves.now - task.started - state.waited > patience(state, task.kind):
        _start_over(moves, still_working(state, moves.now))


def _watch_subspace(moves: Moves) -> None:
    """What stages owe beside their tasks: a new generation asks for it again. A snapshot's parts may take long to
    arrive, and the owner may take all the time in the world."""
    work = moves.work
    if not isinstance(work, Blocked) or not isinstance(work.on, SubspaceReport | BasisNotTaken):
        return
    if moves.now - work.since > patience(moves.state, "step"):
        _start_over(moves, work.on)


def _start_over(moves: Moves, stalled_at: Stall) -> None:
    state = moves.state
    again, limit = state.stalled > 0, patience(state, "step" if state.task is None else state.task.kind)
    moves.tell(notices.Stalled(stalled_at))
    moves.state = replace(moves.state, stalled=state.stalled + 1)
    if not _rotate(moves, again, limit):
        assigning.regroup(moves)


def _rotate(moves: Moves, again: bool, limit: float) -> bool:
    """Whether another peer takes the stage of a holder that was not heard of. Of several, nobody can tell which keeps
    the others waiting: then one is chosen when the task did not end `again`."""
    state = moves.state
    done = state.heard.keys() if state.task is not None else state.took_basis
    owes_a_report = state.blocked is not None and isinstance(state.blocked.on, SubspaceReport)
    silent = [state.stages - 1] if owes_a_report else [i for i in range(state.stages) if i not in done]
    late = [i for i in silent if state.history.holders[i] in state.peers]
    if len(late) > 1 and not again:
        return False
    holders = state.history.holders
    for stage in sorted(
        late, key=lambda i: (holders[i] in state.conduct.untried, disputes.opponents(state, holders[i]))
    )[::-1]:
        if assigning.is_replaceable_after_its_turn(state, moves.now, holders[stage]):
            assigning.stand_aside(moves, {holders[stage]: TooSlow(stage, "task", limit)})
            return True
    return False


def _watch_assigning(moves: Moves, task: Task) -> None:
    state, limits = moves.state, moves.state.spec.limits
    passed = moves.now - task.started
    late = [i for i in range(state.stages) if i not in state.heard]
    if task.kind == "link":
        if passed >= limits.link_seconds:  # long ago both ends went to the relays as well
            _give_up_links(moves, late)
    elif state.history.step == 0 and not state.history.newest.parts:
        if passed >= limits.build_seconds:
            _replace(moves, [TooSlow(i, "build", limits.build_seconds) for i in late])
    else:
        reusing = [i for i in late if state.history.holders[i] in state.seats.holds]
        if reusing and passed >= limits.reuse_seconds:
            _replace(moves, [TooSlow(i, "reuse", limits.reuse_seconds) for i in reusing])
        else:
            _watch_restoring(moves, [i for i in late if i not in reusing])


def _give_up_links(moves: Moves, late: list[int]) -> None:
    """Which end of a link keeps it from opening, nobody can tell: a peer is dismissed for it only where its neighbours
    are of the same person."""
    state, limit = moves.state, moves.state.spec.limits.link_seconds
    ends = {state.history.holders[n] for i in late for n in (i - 1, i, i + 1) if 0 <= n < state.stages}
    if assigning.are_one_persons(state, *ends):
        _replace(moves, [TooSlow(i, "link", limit) for i in late])
    elif not trials.part_late(moves, limit, equal=True):
        _start_over(moves, still_working(state, moves.now))


def _watch_restoring(moves: Moves, stages: list[int]) -> None:
    """Who takes too long to build a stage from a snapshot goes where another is here: without one, late is better than
    never. From when it was told first, however often all were assigned again since."""
    state, gone = moves.state, dict[str, TooSlow]()
    for stage in stages:
        holder = state.history.holders[stage]
        limit = restore_seconds(state.spec, state.history.layers, stage, state.fetches, readiness.cap_of(state, holder))
        if moves.now - state.seats.preparing[holder].asked >= limit and assigning.are_replaceable(
            state, moves.now, *gone, holder
        ):
            gone[holder] = TooSlow(stage, "restore", limit)
    if gone:
        _replace(moves, list(gone.values()))


def _replace(moves: Moves, late: list[TooSlow]) -> None:
    slow = {moves.state.history.holders[why.stage]: why for why in late}
    for peer, why in slow.items():
        moves.do(Dismiss(peer, why, EXIT_OUTSIDE))
    assigning.lose(moves, slow)


def patience(state: State, kind: TaskKind) -> float:
    """How long a task may take before we no longer believe in it. Who is merely slow gets more each time."""
    if not state.measured.step_seconds:
        return STALL_AT_FIRST * 2.0**state.stalled
    return max(STALL_SECONDS, STALL_TIMES * readiness.usual_seconds(state, kind)) * 2.0**state.stalled
