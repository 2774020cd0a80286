"""What comes next in a run, and what it waits for. Pure."""

from __future__ import annotations

from protomodels_cli.coordinator import reasons
from protomodels_cli.coordinator.reasons import TaskKind
from protomodels_cli.coordinator.snapshots.policy import is_due, is_needed
from protomodels_cli.coordinator.state import State
from protomodels_cli.coordinator.work import Unplaced
from protomodels_cli.protocol import steps

STORE_SECONDS = 150.0  # after which a store that was out of reach is believed to be back: a try takes a minute at most


def next_task(state: State) -> tuple[TaskKind, int] | reasons.Blocker:
    """The task that comes next and its step, or what must come first."""
    spec, history = state.spec, state.history
    step, last = history.step, history.step == spec.steps
    if step == 0 and history.snapshots[0].parts and history.evaluated < 0:
        return "evaluation", 0  # what the checkpoint was worth
    if step > 0:
        check = is_due(state) or step % spec.subspace.sync_interval == 0  # what is saved is what was checked
        if spec.subspace.has_basis and check and history.synced < step:
            return "sync", step
        if history.evaluated < step and (last or steps.is_due(step, spec.eval.interval)):
            return "evaluation", step
        if state.seats.handover is not None:
            return state.seats.handover.why
        if is_needed(state):
            if state.saving.unsaved is not None:
                return reasons.SnapshotFailing(step, state.saving.unsaved[1])
            if state.owed is not None and step in state.saving.whole:  # all that it lacks
                return reasons.SubspaceReport(state.owed)
            return reasons.SnapshotIncomplete(step)
    if history.paused is not None:
        return reasons.OwnersResume()
    update, owed = spec.subspace.update, state.owed
    if owed is not None and (last or (update.interval and steps.first_step_with(update, owed) == step + 1)):
        return reasons.SubspaceReport(owed)
    if last:
        return "finish", step
    new = history.next_basis
    if new is not None and new.first_step == step + 1 and len(state.took_basis) < state.stages:
        without = [i for i in range(state.stages) if i not in state.took_basis]
        return reasons.BasisNotTaken(new.version, state.holders_of(without))
    return "step", step + 1


def waiting_for(state: State, now: float) -> reasons.Waiting | None:
    """What the run waits for; None when it is over."""
    if state.history.over:
        return None
    if isinstance(state.work, Unplaced):
        return state.work.missing
    if state.seats.absent:
        return reasons.HoldersDisconnected(state.seats.absent_stages)
    if state.task is None:
        coming = next_task(state)
        return reasons.Coordinator() if isinstance(coming, tuple) else coming
    return _store_away(state, now) or still_working(state, now)


def _store_away(state: State, now: float) -> reasons.StoreUnreachable | None:
    """What keeps a stage from being built, as long as that is said again and again."""
    if state.task is None or state.task.kind != "build":
        return None
    waits = [state.seats.preparing[peer] for peer in state.history.holders if peer in state.seats.preparing]
    return next((p.away for p in waits if p.away is not None and now - p.asked < STORE_SECONDS), None)


def still_working(state: State, now: float) -> reasons.StagesWorking:
    """The stages that have not reported on the task at hand."""
    task = state.task
    assert task is not None
    silent = state.holders_of(i for i in range(state.stages) if i not in state.heard)
    return reasons.StagesWorking(task.kind, task.step, silent, max(0.0, now - task.started))
