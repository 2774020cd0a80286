"""What comes next in a run, and what it waits for, in words. Pure."""

from __future__ import annotations

from protomodels_cli.coordinator.state import Kind, State
from protomodels_cli.model import grassmann


def next_kind(state: State) -> tuple[Kind, int] | str:
    """The task that comes next and its step, or a sentence: what must come first."""
    spec, history = state.spec, state.history
    step, last = history.step, history.step == spec.steps
    if step > 0:
        if spec.subspace.form != "dense" and step % spec.subspace.sync_interval == 0 and history.synced < step:
            return "sync", step
        if history.evaluated < step and (last or due(step, spec.eval.interval)):
            return "evaluation", step
        needed = last or bool(state.leaving)
        failed = state.unsaved is not None and state.unsaved[0] == step
        if history.saved < step and failed and needed:
            assert state.unsaved is not None
            return f"room for the snapshot of step {step} ({state.unsaved[1]})"
        if history.saved < step and not failed and (needed or due(step, spec.snapshots.interval)):
            return "save", step
    update = spec.subspace.update
    owed = state.owed is not None and (
        last or (update.interval and grassmann.first_step_with(update, state.owed) == step + 1)
    )
    if owed:
        return f"the last stage to say what becomes of the subspace after step {state.owed}"
    if last:
        return "finish", step
    new = history.next_basis
    if new is not None and new.first_step == step + 1 and len(state.took_basis) < state.stages:
        absent = [i for i in range(state.stages) if i not in state.took_basis]
        return f"{stages_in_words(state, absent)} to take basis {new.version}"
    return "step", step + 1


def due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def waiting_for(state: State, now: float) -> str:
    """What the run waits for; empty when it is over."""
    if state.history.over:
        return ""
    if not state.placed:
        return f"peers: {state.missing}"
    if state.task is None:
        coming = next_kind(state)
        return coming if isinstance(coming, str) else "the coordinator itself"
    absent = [i for i in range(state.stages) if i not in state.heard]
    if not absent:
        return f"the snapshot of step {state.task.step} to be complete"
    doing = {
        "place": "build",
        "link": "reach its neighbours" if len(absent) == 1 else "reach their neighbours",
        "step": f"finish step {state.task.step}",
        "sync": f"report the bytes in use after step {state.task.step}",
        "evaluation": f"evaluate step {state.task.step}",
        "save": f"hand in the snapshot of step {state.task.step}",
        "finish": "hash the final weights",
    }[state.task.kind]
    return f"{stages_in_words(state, absent)} to {doing} ({max(0.0, now - state.task.started):.0f} s so far)"


def stages_in_words(state: State, stages: list[int]) -> str:
    def one(i: int) -> str:
        peer = state.peers.get(state.history.holders[i])
        return f"{i} ({peer.name})" if peer else str(i)

    return ("stage " if len(stages) == 1 else "stages ") + ", ".join(map(one, stages))


def cut_in_words(layers: tuple[int, ...]) -> str:
    count = len(layers)
    return f"{count} {'stage' if count == 1 else 'stages'} of {'+'.join(map(str, layers))} layers"
