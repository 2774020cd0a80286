"""Holders that are away: their stage stays theirs, and their generation open, until going on without them costs less.

A connection that was closed without a goodbye is a process that died, unless it comes back at once. A silent one is
mostly a blip of somebody's line: recovery.py weighs what a rollback would cost against what waiting has cost.
"""

from __future__ import annotations

import math
import statistics

from protomodels_cli.coordinator import assigning, notices, reasons, recovery
from protomodels_cli.coordinator.events import FetchPart
from protomodels_cli.coordinator.moves import Moves
from protomodels_cli.coordinator.state import Absence, State
from protomodels_cli.cost.memory import StageMemory
from protomodels_cli.spec.cut import spans

FETCH_RATE = 10e6  # bytes a second that a part is expected to be fetched with: 80 Mbit/s
TIMES, LEAST_FETCH = 3, 60.0  # so many times what is expected, and at least so many seconds, is a fetch waited for


def miss(moves: Moves, peer: str, why: reasons.Silence, absence: Absence) -> None:
    """A peer has no session any more."""
    state, history = moves.state, moves.state.history
    is_here, is_holder = peer in state.peers, peer in state.holds
    stage, task = state.stage_of(peer), state.task
    if not is_here:
        return
    if not is_holder or assigning.fresh(history):
        assigning.lose(moves, {peer: why})
        return
    assigning.part_with(moves, {peer: why})
    moves.set(absent={**state.absent, peer: absence})
    if stage is None or (task is not None and task.kind in ("build", "link")):
        assigning.regroup(moves)
    elif absence.until is None:
        redo = costs(moves.state, peer).redo
        moves.tell(notices.HolderAway(peer, state.peers[peer].name, stage, history.step - history.newest.step, redo))


def weigh(moves: Moves) -> None:
    """Stop waiting for those whose time is up; have parts fetched that may soon be needed."""
    state = moves.state
    late = {peer for peer, absence in state.absent.items() if _is_late(moves, peer, absence)}
    if late:
        moves.set(absent={p: absence for p, absence in state.absent.items() if p not in late})
        assigning.regroup(moves)


def _is_late(moves: Moves, peer: str, absence: Absence) -> bool:
    state = moves.state
    if absence.until is not None:
        return absence.until <= moves.now
    if peer not in state.history.holders:
        return True  # another has its stage
    stage = state.history.holders.index(peer)
    successor = _successor(state, stage)
    if successor is None:
        return False  # nobody could take over: waiting is all there is
    parts, price = state.history.newest.as_parts(), costs(state, peer)
    asked = moves.state.fetching.get((successor, stage), math.inf)
    ready = not parts or parts[stage] in state.peers[successor].parts
    ready = ready or moves.now - asked > max(LEAST_FETCH, TIMES * price.fetch)  # assigned the stage, it will say why
    away, lease = moves.now - absence.since, state.spec.limits.lease_seconds
    action = recovery.decide(price, away, state.returned.get(peer, 0.0), lease, ready)
    if action == "fetch" and asked == math.inf:
        moves.set(fetching={**moves.state.fetching, (successor, stage): moves.now})
        moves.do(FetchPart(successor, parts[stage]))
    return action == "replace"


def _successor(state: State, stage: int) -> str | None:
    """Who would hold this stage, if all that are absent were given up."""
    held = {s: peer for peer, s in state.holds.items()}
    found = assigning.fill(state, held)
    return found.get(stage) if isinstance(found, dict) else None


def costs(state: State, peer: str) -> recovery.Costs:
    history, task = state.history, state.task
    stage = history.holders.index(peer)
    usual = statistics.median(state.step_seconds) if state.step_seconds else 0.0
    under_way = 0.0
    if state.placed and task is not None and task.kind == "step":
        under_way = max(0.0, min(a.since for a in state.absent.values()) - task.started) if state.absent else 0.0
    span = spans(history.layers)[stage]
    size = StageMemory(state.spec).saved(span.start, span.stop)
    return recovery.Costs((history.step - history.newest.step) * usual + under_way, size / FETCH_RATE)
