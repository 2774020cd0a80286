"""Whether the run can lose a peer and go on: for every stage somebody else is here with the memory for it. Pure."""

from __future__ import annotations

from dataclasses import replace

from protomodels_cli.coordinator import assigning, notices
from protomodels_cli.coordinator.moves import Moves
from protomodels_cli.coordinator.state import State

MOST_ASKED = 64  # spares that are looked at: of a crowd, these say enough


def watch(moves: Moves, before: State) -> None:
    """Called after every event; `before`: the state ahead of it. Tells when the last spare is gone."""
    state = moves.state
    if state.stands_still or state.history.over or assigning.fresh(state.history):
        return
    same_holders = state.history.stage_holders is before.history.stage_holders and before.placed
    if same_holders and state.replaceable is not None and state.peers is before.peers:
        return
    if same_holders and state.replaceable and before.peers.keys() < state.peers.keys():
        return  # one more takes nothing away, and a crowd may join
    found = _is_replaceable(state)
    if state.replaceable and not found:
        moves.tell(notices.NoSpareLeft())
    moves.state = replace(moves.state, replaceable=found)


def _is_replaceable(state: State) -> bool:
    """Whether any one holder could be lost. Mostly the first spare can hold every stage, which settles it."""
    history, holders = state.history, state.history.holders
    open_stages = set(range(len(holders)))
    seated = {peer: known for peer in holders if (known := state.peers.get(peer)) is not None}
    for spare in [peer for id_, peer in state.peers.items() if id_ not in seated and peer.rest is None][:MOST_ASKED]:
        for stage in sorted(open_stages):
            others = {i: peer for i, peer in enumerate(holders) if i != stage}
            peers = {**{i: p for i, p in seated.items() if i != holders[stage]}, spare.id: spare}
            if isinstance(assigning.fill(replace(state, peers=peers), others, 0.0), dict):
                open_stages.discard(stage)
        if not open_stages:
            return True
    return not history.holders
