"""A peer that got a stage has shown nothing yet. Until its first step is done, it has the time of an honest one.

What a peer says of itself (its speed, that it is ready) is no work. A new holder that stands still gives its stage up
after 30 s more than is expected of one that does not, where another peer can take it that had fewer turns. Pure.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from protomodels_cli.coordinator import assigning, disputes, notices, turns
from protomodels_cli.coordinator.moves import Moves
from protomodels_cli.coordinator.readiness import (
    BEYOND,
    cap_of,
    fetch_seconds,
    restore_seconds,
    usual_seconds,
)
from protomodels_cli.coordinator.reasons import AllStagesHeld, PartNotProved, TooSlow
from protomodels_cli.coordinator.state import State
from protomodels_cli.coordinator.work import Task
from protomodels_cli.protocol.parts import Part

SLOWER = 2.0  # times the usual step: a new holder may be half as fast as the others


def watch(moves: Moves, task: Task) -> bool:
    """Whether a new holder had to give its stage up."""
    state = moves.state
    late = [
        i for i in range(state.stages) if i not in state.heard and state.history.holders[i] in state.conduct.untried
    ]
    over = {i: allowed for i in late if moves.now - _since(state, task, i) > (allowed := _allowed(state, task, i))}
    if task.kind == "link" and over:
        return part_late(moves, min(over.values()), equal=False)
    for stage, allowed in over.items():
        holder = state.history.holders[stage]
        if assigning.is_replaceable_after_its_turn(state, moves.now, holder):
            why = TooSlow(stage, _doing(state, task, holder), allowed)
            assigning.stand_aside(moves, {holder: why})
            return True
    return False


def _allowed(state: State, task: Task, stage: int) -> float:
    """Seconds that a new holder of this stage may work on this task."""
    holder = state.history.holders[stage]
    preparation, limits = state.seats.preparing.get(holder), state.spec.limits
    match task.kind:
        case "build" if holder in state.seats.holds or (preparation is not None and preparation.ready):
            return BEYOND + usual_seconds(state, "step")  # it has the stage in memory, or said so
        case "build":
            if preparation is None:
                return math.inf
            build, cap = state.saving.pace.build, cap_of(state, holder)
            usual = limits.build_seconds if build is None else build  # nobody has built a stage from a part yet
            if preparation.here is None:
                usual += max(fetch_seconds(state, stage, cap), (state.saving.pace.restore or 0.0) - (build or 0.0))
            limit = restore_seconds(state.spec, state.history.layers, stage, state.fetches, cap)
            return min(limit, usual + BEYOND)
        case "link":
            return (
                math.inf if state.measured.linked is None else min(limits.link_seconds, state.measured.linked + BEYOND)
            )
        case kind:
            return BEYOND + SLOWER * usual_seconds(state, kind)


def _since(state: State, task: Task, stage: int) -> float:
    preparation = state.seats.preparing.get(state.history.holders[stage])
    if task.kind == "build" and preparation is not None and not preparation.ready:
        return preparation.asked
    return task.started + state.waited


def _doing(state: State, task: Task, holder: str) -> Literal["restore", "reuse", "step"]:
    if task.kind != "build":
        return "step"
    return "reuse" if holder in state.seats.holds else "restore"


def hear_disproved(moves: Moves, peer: str, part: Part) -> None:
    """A peer was told to build a stage from this part, and could not prove that it has the part: it had its turn."""
    state, preparation = moves.state, moves.seats.preparing.get(peer)
    if preparation is None or preparation.part != part or peer in state.seats.holds or peer not in state.peers:
        return
    why = PartNotProved(part.stage, part.step)
    if state.stage_of(peer) is None:
        moves.tell(notices.StageGivenUp(peer, state.name_of(peer), None, why))
        moves.conduct = replace(moves.conduct, turns=turns.after(state, [peer], moves.now))
        moves.seats = moves.seats.stood_down([peer])
        assigning.make_spare(moves, peer, AllStagesHeld(state.stages))
    elif assigning.is_replaceable_after_its_turn(state, moves.now, peer):
        assigning.stand_aside(moves, {peer: why})


def part_late(moves: Moves, limit: float, equal: bool) -> bool:
    """Have one of the stages that are late with their links given to another peer: the one that keeps most neighbours
    waiting, or that most others had trouble with. Whether there is one."""
    holders, stages = moves.state.history.holders, range(moves.state.stages)
    late = [i for i in stages if i not in moves.state.heard]
    pairs = [(i, i + 1) for i in late if i + 1 in late]
    state = moves.state

    def guilt(stage: int) -> tuple[int, int, bool]:
        waiting = sum(stage in pair for pair in pairs)
        return waiting, disputes.opponents(state, holders[stage]), holders[stage] in state.conduct.untried

    for stage in sorted(late, key=guilt, reverse=True):
        _, others, is_new = guilt(stage)
        if not equal and not others and not is_new:
            continue  # it has worked with its neighbours before
        if assigning.is_replaceable_after_its_turn(state, moves.now, holders[stage], equal):
            disputes.note_links(moves, [(holders[a], holders[b]) for a, b in pairs])
            assigning.stand_aside(moves, {holders[stage]: TooSlow(stage, "link", limit)})
            return True
    return False
