"""Does what a peer says fit the run as it is: its generation, its task, its stages, and who is there? Pure.

Messages cross on their way. One about a generation or task that is over is late, and changes nothing. One that no
honest peer can have sent, about a generation that has not begun or a stage that is not its neighbour's, is refused and
counted, and a peer that sends such messages again and again is dismissed.
"""

from __future__ import annotations

from dataclasses import replace

from protomodels_cli.coordinator import assigning, events, reasons
from protomodels_cli.coordinator.disputes import is_quarrel
from protomodels_cli.coordinator.moves import Moves
from protomodels_cli.coordinator.state import State
from protomodels_cli.wire.troubles import InvalidFeed

MOST_KEPT = 1000  # peers with a count of refused messages; it is kept while they are away
MOST = 3  # refused messages of one peer. After a restart of the coordinator an honest one may have sent one or two.


def hear(moves: Moves, event: events.FromPeers) -> bool:
    """Whether the event is to be heard. Otherwise it is refused, if it cannot be, and else passed over."""
    if (wrong := misfit(moves.state, event)) is None:
        return not is_late(moves.state, event)
    assert not isinstance(event, events.Joined)
    others = [one for one in moves.conduct.refused.items() if one[0] != event.peer][-MOST_KEPT:]
    moves.conduct = replace(
        moves.conduct, refused=dict([*others, (event.peer, moves.conduct.refused.get(event.peer, 0) + 1)])
    )
    if moves.conduct.refused[event.peer] >= MOST:
        assigning.dismiss(moves, reasons.InvalidMessage(f"{wrong} (message {MOST} of this kind)"), event.peer)
    return False


def misfit(state: State, event: events.FromPeers) -> str | None:
    """Why no honest peer can have said so at any time; None: one can."""
    history = state.history
    match event:
        case events.Trouble(about=None):
            return None  # about the peer alone
        case events.Done() | events.BasisTaken() | events.SubspaceReported() | events.SnapshotLost() | events.Trouble():
            if event.generation > history.generation:
                return f"it is about generation {event.generation}, and the last one is {history.generation}"
        case _:
            return None
    stage = state.stage_of(event.peer)
    if event.generation < history.generation or stage is None:
        return None
    match event:
        case events.SubspaceReported(step=step) if step > history.step:
            return f"it is about step {step}, and the last one is {history.step}"
        case events.BasisTaken(version=version) if version > _newest_basis(state):
            return f"it is about basis {version}, and the last one is {_newest_basis(state)}"
        case events.Trouble(about=about) if about is not None and about not in _others(state, event, stage):
            return f"stage {stage} has no link to stage {about}"
    return None


def is_late(state: State, event: events.FromPeers) -> bool:
    """What an event is about is over."""
    history, stage = state.history, None if isinstance(event, events.Joined) else state.stage_of(event.peer)
    match event:
        case events.Done(_, generation, number):
            now = state.task is not None and state.task.number == number and generation == history.generation
            return stage is None or not now or stage in state.heard
        case events.BasisTaken(_, generation, version):
            new = history.next_basis
            return stage is None or generation < history.generation or new is None or version < new.version
        case events.SubspaceReported(_, generation, step):
            return stage != state.stages - 1 or generation < history.generation or state.owed != step
        case events.SnapshotLost(peer) if peer in state.seats.holds:
            return event.whole_here  # it has built its stage, and its part is as it should be
        case events.Trouble(_, _, about, generation) if about is not None:
            is_away = (
                about < state.stages and history.holders[about] in state.seats.absent and not is_quarrel(event.what)
            )
            return stage is None or generation < history.generation or is_away
        case _:
            return False


def _newest_basis(state: State) -> int:
    new = state.history.next_basis
    return state.history.basis_version if new is None else new.version


def _others(state: State, event: events.Trouble, stage: int) -> set[int]:
    """Stages that the holder of this one can complain about: its neighbours; of token ids, itself."""
    if isinstance(event.what, reasons.PeerReport) and isinstance(event.what.trouble, InvalidFeed):
        return {stage}
    return {stage - 1, stage + 1} & set(range(state.stages))
