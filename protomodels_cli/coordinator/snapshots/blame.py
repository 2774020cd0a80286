"""Who keeps snapshots from being complete: parts that do not come in time, or are not what they should be. Pure.

A snapshot whose parts are not all here in time is given up, so that the next can be begun. A holder for whose part two
in a row were given up is replaced where somebody can take its stage: once may be an accident, and replacing a holder
costs the steps since the newest snapshot. Without anybody to take over, steps without snapshots are better than none.
"""

from __future__ import annotations

import math
from dataclasses import replace

from protomodels_cli.coordinator import assigning, reasons
from protomodels_cli.coordinator.events import PartFailed, PartsArrived
from protomodels_cli.coordinator.history import Mark
from protomodels_cli.coordinator.moves import Moves
from protomodels_cli.coordinator.snapshots import policy
from protomodels_cli.coordinator.snapshots.failures import Overdue
from protomodels_cli.coordinator.state import State
from protomodels_cli.cost.saving import largest_part, part_seconds

MOST_SPOILT = 2  # snapshots in a row
MOST_LATE = 3  # times in a row that there is twice the time


def hear_arrived(moves: Moves, event: PartsArrived) -> None:
    snapshot = event.lineage, event.step
    if snapshot in [mark.key for mark in moves.state.history.pending]:
        moves.saving = replace(moves.saving, arrived={**moves.saving.arrived, snapshot: event.stages})


def hear_failed(moves: Moves, event: PartFailed) -> None:
    if policy.give_up(moves, event) and event.peer is not None:
        _blame(moves, event)


def watch(moves: Moves) -> None:
    """Give up what is overdue. The time runs while all holders are here: who is not is no slow uploader."""
    state, history = moves.state, moves.state.history
    awaited = [m for m in history.pending if m.step not in state.saving.whole and not state.stands_still]
    due = {m.key: state.saving.due[m.key] for m in awaited if m.key in state.saving.due}
    if len(due) < len(awaited):
        until = moves.now + _limit(state)
        due = dict.fromkeys((m.key for m in awaited), until) | due
    if due != state.saving.due:
        moves.saving = replace(moves.saving, due=due)
    for mark in awaited:
        if due[mark.key] <= moves.now:
            _give_up_overdue(moves, mark)


def _limit(state: State) -> float:
    largest = largest_part(state.spec, state.history.layers)
    caps = [peer.upload for id_, peer in state.peers.items() if id_ in state.history.holders]
    return part_seconds(state.spec, largest, min(caps, default=math.inf)) * 2.0 ** min(state.saving.late, MOST_LATE)


def _give_up_overdue(moves: Moves, mark: Mark) -> None:
    """Those who are late are at fault where at least half have delivered; otherwise the coordinator's own line may be
    slow. Where that does not change who is to deliver, there is twice the time the next time."""
    state, history = moves.state, moves.state.history
    here = state.saving.arrived.get(mark.key, frozenset())
    why = Overdue(_limit(state))
    late = [
        PartFailed(holder, *mark.key, stage, why) for stage, holder in enumerate(history.holders) if stage not in here
    ]
    holders = [history.holders[failed.stage] for failed in late]
    if not late or not policy.give_up(moves, *late):
        return
    if 2 * len(late) <= state.stages:
        for failed in late:
            _blame(moves, failed)
        if any(moves.conduct.spoilt[holder] < MOST_SPOILT or holder not in moves.state.peers for holder in holders):
            return
    moves.saving = replace(moves.saving, late=state.saving.late + 1)


def _blame(moves: Moves, failed: PartFailed) -> None:
    state, peer = moves.state, failed.peer
    assert peer is not None
    many = state.conduct.spoilt.get(peer, 0) + 1
    moves.conduct = replace(moves.conduct, spoilt={**state.conduct.spoilt, peer: many})
    if many >= MOST_SPOILT and assigning.are_replaceable(state, moves.now, peer):
        assigning.dismiss(moves, reasons.SpoiltSnapshots(failed.stage, many, failed.why), peer)
