"""A stage whose holder is much slower than a spare is given to that spare, at a snapshot, so that no step is redone.

The run stands still after the step that is saved. When the snapshot is complete the spare fetches the stage's part and
builds the stage, which is then exactly what its holder has in memory. Until it is ready nothing is given up: whatever
goes wrong before that, the holder goes on. speeds.py says whether it is worth it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from protomodels_cli.coordinator import assigning, readiness, speeds, turns
from protomodels_cli.coordinator.events import MakeSpare, PrepareStage
from protomodels_cli.coordinator.moves import Moves
from protomodels_cli.coordinator.reasons import AllStagesHeld, Reseating
from protomodels_cli.coordinator.reseat_notices import StageNotReseated, StageReseated, StageReseating, WhyNot
from protomodels_cli.coordinator.sharing import fill_on_cards, fits_beside
from protomodels_cli.coordinator.snapshots import policy
from protomodels_cli.coordinator.state import Preparation, Report, Reseat, State, Timed


def note_step(moves: Moves, seconds: float, reports: Sequence[Report]) -> None:
    timed = Timed(seconds, tuple(report.usage.compute_s for report in reports))
    moves.set(timed=(*moves.state.timed[1 - speeds.KEPT :], timed))


def consider(moves: Moves) -> None:
    """A snapshot of the last step was begun: is this the moment?"""
    state, history = moves.state, moves.state.history
    busy = speeds.busy(state)
    if not busy or state.pace.upload is None or state.absent or policy.is_needed(state):
        return
    stage = busy.index(max(busy))
    had_a_turn = {peer for peer in state.peers if turns.weight(state, peer, moves.now)}
    taken = state.unready | state.preparing.keys() | had_a_turn
    spares = {spare: seconds for spare, seconds in speeds.at_stage(state, stage).items() if spare not in taken}
    if not spares or speeds.decide(_weighed(state, stage, min(spares.values()))) != "reseat":
        return  # as it mostly is: which of them has the memory takes longer to say
    spare = _fastest(state, stage, spares)
    if spare is None or speeds.decide(weighed := _weighed(state, stage, spares[spare])) != "reseat":
        return
    holder = history.holders[stage]
    why = Reseating(stage, state.peers[holder].name, state.peers[spare].name, weighed.step, weighed.expected)
    names = turns.names_of(state.peers[spare])
    moves.set(reseat=Reseat(holder, spare, (history.lineage, history.step), moves.now, why, names))
    moves.tell(StageReseating(history.step, weighed.pause, why))


def _weighed(state: State, stage: int, seconds: float) -> speeds.Weighed:
    """With a spare that computes for so long in a step."""
    step, expected = speeds.step_now(state), speeds.step_with(state, stage, seconds)
    pause = (state.pace.upload or 0.0) + max(readiness.restoring(state, stage), state.pace.restore or 0.0)
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
    state, history, reseat = moves.state, moves.state.history, moves.state.reseat
    if reseat is None:
        return  # a new generation has begun: all were assigned again
    stage, preparation = reseat.why.stage, state.preparing.get(reseat.spare)
    part = history.newest.as_parts()[stage] if history.newest.key == reseat.snapshot else None
    if reseat.spare not in state.peers or state.peers[reseat.spare].rest is not None:
        moves.set(turns=turns.with_names(state, reseat.names, moves.now))  # the run stood still for it
        _give_up(moves, reseat, "spare_gone")
    elif turns.weight(state, reseat.spare, moves.now):
        _give_up(moves, reseat, "not_ready")
    elif preparation is not None and preparation.part.stage != stage:
        _give_up(moves, reseat, "spare_needed")
    elif part is None:
        if _is_lost(state, reseat, moves.now):
            _give_up(moves, reseat, "not_saved")
    elif preparation is None or preparation.part != part:
        here = moves.now if readiness.is_here(state, reseat.spare, part) else None
        moves.set(preparing={**state.preparing, reseat.spare: Preparation(part, moves.now, here)})
        moves.do(PrepareStage(reseat.spare, part))
    elif preparation.ready:
        if state.task is None and not state.absent:
            _conclude(moves, reseat)
    elif moves.now - preparation.asked > readiness.patience(
        state, stage, readiness.restoring(state, stage, reseat.spare)
    ):
        moves.set(unready=(state.unready | {reseat.spare}) & state.peers.keys())
        moves.set(turns=turns.after(state, [reseat.spare], moves.now))
        _give_up(moves, reseat, "not_ready")


def _is_lost(state: State, reseat: Reseat, now: float) -> bool:
    """Was the snapshot given up or found unusable, or does it take too long? Then the run goes on beside it."""
    begun = reseat.snapshot in [mark.key for mark in state.history.pending]
    usual = state.pace.upload or 0.0
    return not begun or now - reseat.since > max(readiness.LEAST, readiness.TIMES * usual)


def _conclude(moves: Moves, reseat: Reseat) -> None:
    stage, names = reseat.why.stage, reseat.why
    assigning.reseat(moves, stage, reseat.spare)
    moves.tell(StageReseated(stage, reseat.spare, names.spare, reseat.holder, names.holder))


def _give_up(moves: Moves, reseat: Reseat, why: WhyNot) -> None:
    state, spare, names = moves.state, reseat.spare, reseat.why
    moves.set(reseat=None)
    if spare in state.peers and spare in state.preparing and why != "spare_needed":
        moves.set(preparing={p: preparation for p, preparation in state.preparing.items() if p != spare})
        moves.do(MakeSpare(spare, AllStagesHeld(state.stages)))
    moves.tell(StageNotReseated(names.stage, reseat.holder, names.holder, spare, names.spare, why))
