"""Peers whose messages were far larger than any of late, as neighbours say: counted, told, and nothing else. Pure.

A neighbour's word is one peer's against another's, and honest training may diverge: nobody is dismissed for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from protomodels_cli.coordinator import notices
from protomodels_cli.coordinator.moves import Moves
from protomodels_cli.coordinator.work import Report

# Times the largest of the last steps: far above what clipped updates do to a message from one step to the next. A run
# that jumps to infinity passes it too, and then every one of its stages is named.
OUTSIZED = 1000.0


def note(moves: Moves, step: int, reports: Sequence[Report]) -> None:
    """Count what the stages say of a step. Told at the first, the tenth, the hundredth time of each peer. Who got such
    numbers itself passes them on: the one to name is where they begin."""
    state = moves.state
    got = [max(report.usage.grown_forward, report.usage.grown_backward) > OUTSIZED for report in reports]
    for stage, report in enumerate(reports):
        for sender, grown in ((stage - 1, report.usage.grown_forward), (stage + 1, report.usage.grown_backward)):
            if not 0 <= sender < len(reports) or not grown > OUTSIZED or got[sender]:
                continue
            peer = state.history.holders[sender]
            many = moves.conduct.outsized.get(peer, 0) + 1
            moves.conduct = replace(moves.conduct, outsized={**moves.conduct.outsized, peer: many})
            if (known := state.peers.get(peer)) is not None and str(many).rstrip("0") == "1":
                said = known.name, sender, stage, step, grown, many
                moves.tell(notices.OutsizedMessages(peer, *said))
