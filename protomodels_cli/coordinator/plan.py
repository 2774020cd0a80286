"""What comes next in a run, and what it waits for, in words. Pure."""

from __future__ import annotations

from protomodels_cli.coordinator.snapshots.policy import is_due, is_needed
from protomodels_cli.coordinator.state import Kind, State
from protomodels_cli.protocol import steps


def next_kind(state: State) -> tuple[Kind, int] | str:
    """The task that comes next and its step, or a sentence: what must come first."""
    spec, history = state.spec, state.history
    step, last = history.step, history.step == spec.steps
    if step > 0:
        check = is_due(state) or step % spec.subspace.sync_interval == 0  # what is saved is what was checked
        if spec.subspace.has_basis and check and history.synced < step:
            return "sync", step
        if history.evaluated < step and (last or due(step, spec.eval.interval)):
            return "evaluation", step
        if is_needed(state):
            if state.unsaved is not None:
                return f"room for the snapshot of step {step} ({state.unsaved[1]})"
            return f"the snapshot of step {step} to be complete"
    if history.paused is not None:
        return f"its owner to resume it: {history.paused.why}"
    update, owed = spec.subspace.update, state.owed
    if owed is not None and (last or (update.interval and steps.first_step_with(update, owed) == step + 1)):
        return f"the last stage to say what becomes of the subspace after step {owed}"
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
        return f"peers: {state.missing}" if not state.history.step else state.missing
    if state.task is None:
        coming = next_kind(state)
        return coming if isinstance(coming, str) else "the coordinator itself"
    absent = [i for i in range(state.stages) if i not in state.heard]
    doing = {
        "place": "build" if not state.history.step else f"be as they were after step {state.task.step}",
        "link": "reach its neighbours" if len(absent) == 1 else "reach their neighbours",
        "step": f"finish step {state.task.step}",
        "sync": f"report the bytes in use after step {state.task.step}",
        "evaluation": f"evaluate step {state.task.step}",
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
