"""How soon a peer could go on with a stage: with its part fetched and the stage built. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from protomodels_cli.coordinator.history import History
from protomodels_cli.coordinator.reasons import TaskKind
from protomodels_cli.coordinator.state import State
from protomodels_cli.cost.memory import stage_memory
from protomodels_cli.protocol.parts import Part
from protomodels_cli.spec.cut import spans
from protomodels_cli.spec.schema import RunSpec

FETCH_RATE = 10e6  # bytes a second that a part is expected to be fetched with: 80 Mbit/s
ASKING = 1.0  # seconds that a fetch takes, however small the part
SLOW_LINE = 8e6  # bits a second that a fetch must reach on average, where the emulated link does not make it slower
TIMES, LEAST = 3, 60.0  # a peer that takes so many times what is expected, and so many seconds, comes after all others
BEYOND = 30.0  # seconds that a peer may take longer than expected, before another is asked as well or in its place
SLOWDOWN = 5.0  # times the usual step: what one slow step may add to what is expected of the next
LATE = 5e5  # seconds: longer than anything that is expected


def wanted(history: History, stage: int) -> Part:
    """What somebody who takes this stage over begins with; a part without a hash: the seed."""
    mark = history.newest
    return mark.as_parts()[stage] if mark.parts else Part(mark.lineage, mark.step, stage, "")


def is_here(state: State, peer: str, part: Part) -> bool:
    """Whether this peer need not fetch it."""
    known = state.peers.get(peer)
    return not part.sha256 or (known is not None and part in known.parts)


def is_ready(state: State, peer: str, stage: int) -> bool:
    """Whether it has built this stage, as far as it has said and could prove."""
    preparation = state.seats.preparing.get(peer)
    return preparation is not None and preparation.ready and preparation.part == wanted(state.history, stage)


def cap_of(state: State, peer: str | None) -> float:
    """Bits a second that a peer receives at most."""
    known = state.peers.get(peer or "")
    return math.inf if known is None else known.download


def fetch_seconds(state: State, stage: int, cap: float = math.inf) -> float:
    """`cap`: bits a second."""
    span = spans(state.history.layers)[stage]
    rate = min(FETCH_RATE, cap / 8)
    return ASKING + stage_memory(state.spec).saved(span.start, span.stop) / rate


def build_seconds(state: State) -> float:
    """As measured last."""
    return state.saving.pace.build or 0.0


def restoring(state: State, stage: int, peer: str | None = None) -> float:
    """Seconds that a peer without the part takes; one that is named, under its cap."""
    return fetch_seconds(state, stage, cap_of(state, peer)) + build_seconds(state)


def restore_seconds(spec: RunSpec, layers: Sequence[int], stage: int, fetches: int = 1, cap: float = math.inf) -> float:
    """How long a peer may take to fetch a stage's part and build the stage, while so many parts are fetched at once.
    `cap`: bits a second that it receives at most."""
    if spec.limits.restore_seconds is not None:
        return spec.limits.restore_seconds
    span = spans(layers)[stage]
    bits = 8 * stage_memory(spec).saved(span.start, span.stop)
    return spec.limits.build_seconds + max(1, fetches) * bits / min(
        SLOW_LINE, spec.wire.link.bits_per_second / 2, cap / 2
    )


def patience(state: State, stage: int, usual: float) -> float:
    """Seconds after which a peer that prepares a stage is not counted on any more, where so many are usual."""
    unknown = state.saving.pace.build is None
    limit = max(LEAST, TIMES * usual) if unknown else usual + BEYOND
    return min(restore_seconds(state.spec, state.history.layers, stage), limit)


def expected(state: State, peer: str, stage: int) -> float:
    """Seconds from when this peer is told to prepare the stage until it is ready."""
    here = is_here(state, peer, wanted(state.history, stage))
    return (0.0 if here else fetch_seconds(state, stage, cap_of(state, peer))) + build_seconds(state)


def usual_seconds(state: State, kind: TaskKind) -> float:
    """What such a task takes, as long as no stage is slower than of late."""
    usual = statistics.median(state.measured.step_seconds)
    usual = max(usual, min(state.measured.step_seconds[-1], SLOWDOWN * usual))  # it may have become slower just now
    return usual * max(1.0, state.spec.eval.windows / state.spec.batch.size) if kind == "evaluation" else usual


def seconds_left(state: State, peer: str, stage: int, now: float) -> float:
    """Until this peer could go on with the stage, as far as one can tell."""
    usual, preparation = expected(state, peer, stage), state.seats.preparing.get(peer)
    if preparation is None:
        return usual
    is_it, at = preparation.part == wanted(state.history, stage), preparation.part.stage
    usual += 0.0 if is_it else ASKING  # what it prepares may be wanted: who is idle comes first
    if preparation.ready:
        return 0.0 if is_it else usual
    passed = now - preparation.asked
    if passed > patience(state, at, expected(state, peer, at)):
        return LATE if is_it else 2 * LATE  # it would be no faster with another
    return max(0.0, usual - passed) if is_it else usual
