"""Does a report count: of the run's bytes of U and T_fixed, and of all of its stage? What follows if not. Pure."""

from __future__ import annotations

from dataclasses import replace

from protomodels_cli.coordinator import assigning, reasons, turns
from protomodels_cli.coordinator.events import Dismiss
from protomodels_cli.coordinator.moves import Moves
from protomodels_cli.coordinator.state import State
from protomodels_cli.coordinator.work import Hashes, Report, Task
from protomodels_cli.errors import EXIT_REFUSED
from protomodels_cli.protocol import steps


def right_hashes(state: State) -> Hashes | None:
    """What every stage must use now."""
    if not state.spec.subspace.has_basis:
        return None
    history = state.history
    return Hashes(history.basis_version, history.basis_sha256, *state.t_fixed)


def check_hashes(moves: Moves, task: Task, stage: int, report: Report) -> bool:
    """Whether the report counts. Otherwise what the stage may have spoilt is redone, or its holder is dismissed."""
    state, right, found = moves.state, right_hashes(moves.state), report.hashes
    if right is None or found == right:
        return True
    new = state.history.next_basis
    if new is not None and new.first_step == state.history.step + 1:
        ahead = replace(right, basis_version=new.version, basis=new.sha256)
        if found == ahead:
            return True  # a step that was under way has switched to it
    peer = state.history.holders[stage]
    same_basis = found is not None and (found.basis_version, found.basis) == (right.basis_version, right.basis)
    other: reasons.Shared = "T_fixed" if same_basis else "U"
    if peer in state.conduct.suspects or (assigning.fresh(state.history) and task.kind == "build"):
        why = reasons.HashMismatch(other)
        moves.do(Dismiss(peer, why, EXIT_REFUSED))
        assigning.lose(moves, {peer: why})
        return False
    moves.conduct = replace(
        moves.conduct,
        suspects=state.conduct.suspects | {peer},
        turns=turns.after_another(state, peer, "basis", moves.now),
    )
    moves.write_row("mismatch", task.step, stage=stage, peer=peer, what=other)
    [holder] = state.holders_of([stage])
    assigning.roll_back(moves, state.history.newest, reasons.StageDiverged(holder, other, task.step))
    assigning.regroup(moves)
    return False


def check_recorded(moves: Moves, task: Task, stage: int, report: Report) -> bool:
    """Whether a report on a step that may be audited says which messages crossed. Otherwise its holder is dismissed:
    without its word the step could not be audited on any stage."""
    recorded = report.recorded
    if not task.recorded or (recorded is not None and recorded.step == task.step):
        return True
    why = reasons.InvalidMessage(f"the report of stage {stage} lacks the hashes of its messages in step {task.step}")
    assigning.dismiss(moves, why, moves.state.history.holders[stage])
    return False


def check_units(moves: Moves, stage: int, report: Report) -> bool:
    """Whether the report has a norm of every unit of its stage: with one missing, the whole gradient's norm would be
    wrong on all stages, and nobody would notice. Otherwise its holder is dismissed."""
    history = moves.state.history
    if [unit for unit, _ in report.norms] == steps.units(history.layers, stage):
        return True
    why = reasons.InvalidMessage(f"the gradient norms of stage {stage} are not those of its units")
    assigning.dismiss(moves, why, history.holders[stage])
    return False
