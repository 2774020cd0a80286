"""A stage whose holder is much slower than a spare is given to that spare, at a snapshot, so that no step is redone.

The run stands still after the step that is saved. When the snapshot is complete the spare fetches the stage's part and
builds the stage, which is then exactly what its holder has in memory. Until it is ready nothing is given up: whatever
goes wrong before that, the holder goes on. speeds.py says whether it is worth it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from protomodels_cli.coordinator import assigning, outgoing, readiness, speeds, turns
from protomodels_cli.coordinator.events import MakeSpare
from protomodels_cli.coordinator.moves import Moves
from protomodels_cli.coordinator.reasons import AllStagesHeld, Reseating
from protomodels_cli.coordinator.reseat_notices import StageNotReseated, StageReseated, StageReseating, WhyNot
from protomodels_cli.coordinator.seats import Handover, Preparation
from protomodels_cli.coordinator.sharing import fill_on_cards, fits_beside
from protomodels_cli.coordinator.snapshots import policy
from protomodels_cli.coordinator.state import State, Timed
from protomodels_cli.coordinator.work import Report


def note_step(moves: Moves, seconds: float, reports: Sequence[Report]) -> None:
    timed = Timed(seconds, tuple(report.usage.compute_s for report in reports))
    moves.measured = replace(moves.measured, timed=(*moves.measured.timed[1 - speeds.KEPT :], timed))


def consider(moves: Moves) -> None:
    """A snapshot of the last step was begun: is this the moment?"""
    state, history = moves.state, moves.state.history
    busy = speeds.busy(state)
    if not busy or state.saving.pace.upload is None or state.seats.absent or policy.is_needed(state):
        return
    stage = busy.index(max(busy))
    had_a_turn = {peer for peer in state.peers if turns.weight(state, peer, moves.now)}
    taken = state.conduct.unready | state.seats.preparing.keys() | had_a_turn
    spares = {spare: seconds for spare, seconds in speeds.at_stage(state, stage).items() if spare not in taken}
    if not spares or speeds.decide(_weighed(state, stage, min(spares.values()))) != "reseat":
        return  # as it mostly is: which of them has the memory takes longer to say
    spare = _fastest(state, stage, spares)
    if spare is None or speeds.decide(weighed := _weighed(state, stage, spares[spare])) != "reseat":
        return
    holder, known = history.holders[stage], state.peers.get(spare)
    assert known is not None
    why = Reseating(stage, state.name_of(holder), known.name, weighed.step, weighed.expected)
    names, snapshot = turns.names_of(known), (history.lineage, history.step)
    moves.seats = moves.seats.handing_over(stage, Handover(holder, spare, snapshot, moves.now, why, names))
    moves.tell(StageReseating(history.step, weighed.pause, why))


def _weighed(state: State, stage: int, seconds: float) -> speeds.Weighed:
    """With a spare that computes for so long in a step."""
    step, expected = speeds.step_now(state), speeds.step_with(state, stage, seconds)
    pause = (state.saving.pace.upload or 0.0) + max(readiness.restoring(state, stage), state.saving.pace.restore or 0.0)
    return speeds.Weighed(step, expected, pause, state.spec.steps - state.history.step)


def _fastest(state: State, stage: int, spares: Mapping[str, float]) -> str | None:
    """Of these, the one with the memory for this stage that would compute it soonest."""
    layers, holders, most = state.history.layers, state.history.holders, max(spares.values())
    held = {i: peer for i, peer in enumerate(holders) if i != stage}
    others = [i for i in spares if not assigning.has_accused(state, i, stage)]
    able = {i for i in others if fits_beside(state.spec, state.peers, layers, holders, stage, i)}
    peers = [peer for i, peer in state.peers.items() if i in able or i in held.values()]

    def cost(peer: str, stage: int) -> float:
        return 1e5 * spares[peer] / most  # costs are told apart to a tenth

    found = fill_on_cards(state.spec, layers, held, peers, cost)
    return found[stage] if isinstance(found, dict) else None


def watch(moves: Moves) -> None:
    """After every event, while a stage is about to change hands."""
    state, history, handover = moves.state, moves.state.history, moves.seats.handover
    if handover is None:
        return  # a new generation has begun: all were assigned again
    stage, preparation = handover.why.stage, state.seats.preparing.get(handover.spare)
    part = history.newest.as_parts()[stage] if history.newest.key == handover.snapshot else None
    known = state.peers.get(handover.spare)
    if known is None or known.rest is not None:
        stood_still = turns.with_names(state, handover.names, moves.now)  # the run did, for this spare
        moves.conduct = replace(moves.conduct, turns=stood_still)
        _give_up(moves, handover, "spare_gone")
    elif turns.weight(state, handover.spare, moves.now):
        _give_up(moves, handover, "not_ready")
    elif preparation is not None and preparation.part.stage != stage:
        _give_up(moves, handover, "spare_needed")
    elif part is None:
        if _is_lost(state, handover, moves.now):
            _give_up(moves, handover, "not_saved")
    elif preparation is None or preparation.part != part:
        here = moves.now if readiness.is_here(state, handover.spare, part) else None
        moves.seats = moves.seats.prepared(handover.spare, Preparation(part, moves.now, here))
        moves.do(outgoing.prepare(moves.state, handover.spare, part))
    elif preparation.ready:
        if state.task is None and not state.seats.absent:
            _conclude(moves, handover)
    elif moves.now - preparation.asked > readiness.patience(
        state, stage, readiness.restoring(state, stage, handover.spare)
    ):
        moves.conduct = replace(moves.conduct, unready=(state.conduct.unready | {handover.spare}) & state.peers.keys())
        moves.conduct = replace(moves.conduct, turns=turns.after(state, [handover.spare], moves.now))
        _give_up(moves, handover, "not_ready")


def _is_lost(state: State, handover: Handover, now: float) -> bool:
    """Was the snapshot given up or found unusable, or does it take too long? Then the run goes on beside it."""
    begun = handover.snapshot in [mark.key for mark in state.history.pending]
    usual = state.saving.pace.upload or 0.0
    return not begun or now - handover.since > max(readiness.LEAST, readiness.TIMES * usual)


def _conclude(moves: Moves, handover: Handover) -> None:
    stage, names = handover.why.stage, handover.why
    assigning.reseat(moves, stage, handover.spare)
    moves.tell(StageReseated(stage, handover.spare, names.spare, handover.holder, names.holder))


def _give_up(moves: Moves, handover: Handover, why: WhyNot) -> None:
    state, spare, names = moves.state, handover.spare, handover.why
    moves.seats = moves.seats.handing_over(names.stage, None)
    if spare in state.peers and spare in state.seats.preparing and why != "spare_needed":
        moves.seats = moves.seats.stood_down([spare])
        moves.do(MakeSpare(spare, AllStagesHeld(state.stages)))
    moves.tell(StageNotReseated(names.stage, handover.holder, names.holder, spare, names.spare, why))
