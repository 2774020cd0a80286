"""How soon a peer could go on with a stage: with its part fetched and the stage built. Pure."""

from __future__ import annotations

from protomodels_cli.coordinator.history import History
from protomodels_cli.coordinator.state import State
from protomodels_cli.cost.memory import stage_memory
from protomodels_cli.protocol.parts import Part
from protomodels_cli.spec.cut import spans

FETCH_RATE = 10e6  # bytes a second that a part is expected to be fetched with: 80 Mbit/s
ASKING = 1.0  # seconds that a fetch takes, however small the part
TIMES, LEAST = 3, 60.0  # a peer that takes so many times what is expected, and so many seconds, comes after all others
LATE = 1e6  # seconds: longer than anything that is expected


def wanted(history: History, stage: int) -> Part:
    """What somebody who takes this stage over begins with; a part without a hash: the seed."""
    mark = history.newest
    return mark.as_parts()[stage] if mark.parts else Part(mark.lineage, mark.step, stage, "")


def fetch_seconds(state: State, stage: int) -> float:
    span = spans(state.history.layers)[stage]
    return ASKING + stage_memory(state.spec).saved(span.start, span.stop) / FETCH_RATE


def build_seconds(state: State) -> float:
    """As measured last."""
    return state.pace.build or 0.0


def expected(state: State, peer: str, stage: int) -> float:
    """Seconds from when this peer is told to prepare the stage until it is ready."""
    part = wanted(state.history, stage)
    fetch = 0.0 if not part.sha256 or part in state.peers[peer].parts else fetch_seconds(state, stage)
    return fetch + build_seconds(state)


def seconds_left(state: State, peer: str, stage: int, now: float) -> float:
    """Until this peer could go on with the stage, as far as one can tell."""
    usual, preparation = expected(state, peer, stage), state.preparing.get(peer)
    if preparation is None or preparation.part != wanted(state.history, stage):
        return usual
    if preparation.ready:
        return 0.0
    passed = now - preparation.asked
    return max(0.0, usual - passed) if passed <= max(LEAST, TIMES * usual) else LATE
