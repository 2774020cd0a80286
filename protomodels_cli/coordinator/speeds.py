"""How fast peers compute, and whether a faster one at the slowest stage is worth a pause. Pure.

A step takes what the stages compute for one microbatch, one after the other, and what the slowest of them computes for
all the others. So only the slowest stage is worth a thought. What stages compute is measured in every step. What a
spare would compute is not: its benchmark counts for as much as the other holders' benchmarks are worth in this run, and
for nothing once it has held a stage, since it was measured then.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from protomodels_cli.coordinator.sharing import offers
from protomodels_cli.coordinator.state import State
from protomodels_cli.cost.saving import PEER_SECONDS
from protomodels_cli.cost.units import stage_flops
from protomodels_cli.spec.schema import RunSpec

KEPT, ENOUGH = 20, 5  # steps of a generation whose medians count: the last, and at least
SHORTER = 0.75  # of what a step takes: it must not take more than this with the spare
SAYS_NOTHING = 1.01  # times the slowest: who says that it computes in no time is taken for slower still
WORTH = 2.0  # times the pause: what must be saved

Verdict = Literal["reseat", "gains_too_little", "pause_too_long"]


@dataclass(frozen=True)
class Weighed:
    """Seconds, but for the last."""

    step: float  # as measured
    expected: float  # … with the spare
    pause: float  # until the spare has the stage
    left: int  # steps of the run


def decide(w: Weighed) -> Verdict:
    """What is saved counts for two days at most: nobody knows how long the spare stays."""
    if w.expected > SHORTER * w.step:
        return "gains_too_little"
    steps = min(w.left, PEER_SECONDS / max(w.expected, 1e-9))
    return "reseat" if steps * (w.step - w.expected) >= WORTH * w.pause else "pause_too_long"


def busy(state: State) -> tuple[float, ...]:
    """Seconds that each stage computes in a step; empty: too little was measured in this generation."""
    if len(state.measured.timed) < ENOUGH:
        return ()
    found = [statistics.median(stage) for stage in zip(*(t.compute for t in state.measured.timed), strict=True)]
    if not (slowest := max(found)):
        return ()
    return tuple(seconds or SAYS_NOTHING * slowest for seconds in found)


def step_now(state: State) -> float:
    return statistics.median(t.seconds for t in state.measured.timed)


def step_with(state: State, stage: int, seconds: float) -> float:
    """What a step would take if this stage computed for so long. Whatever else a step takes, it will take then too."""
    now, microbatches = busy(state), state.spec.batch.microbatches
    before, after = (_pipelined(of, microbatches) for of in (now, (*now[:stage], seconds, *now[stage + 1 :])))
    return max(after, step_now(state) - before + after)


def _pipelined(compute: Sequence[float], microbatches: int) -> float:
    return (sum(compute) + (microbatches - 1) * max(compute)) / microbatches


def measured(state: State) -> dict[str, float]:
    """Operations a second of the holders."""
    if not (seconds := busy(state)):
        return {}
    work = _work(state.spec, state.history.layers)
    return {peer: work[stage] / seconds[stage] for stage, peer in enumerate(state.history.holders)}


def at_stage(state: State, stage: int) -> dict[str, float]:
    """Seconds that each peer without a stage would compute in a step, if it held this one."""
    holders, now = state.history.holders, measured(state)
    offered = {o.peer: o.flops for o in offers(state.peers.values()) if 1 <= o.flops < math.inf}
    others = [peer for peer in holders if peer != holders[stage]] or holders
    worth = [now[peer] / offered[peer] for peer in others if peer in offered]
    if not now or not worth:
        return {}
    by_benchmark = {p: flops * statistics.median(worth) for p, flops in offered.items() if p not in holders}
    work = _work(state.spec, state.history.layers)[stage]
    return {peer: work / state.conduct.speeds.get(peer, speed) for peer, speed in by_benchmark.items()}


def slower(state: State, stage: int) -> dict[str, float]:
    """The share by which steps would take longer with each peer without a stage, if it held this one."""
    if not busy(state):
        return {}
    now = step_now(state)
    return {p: max(0.0, step_with(state, stage, s) / now - 1) for p, s in at_stage(state, stage).items()}


def _work(spec: RunSpec, layers: Sequence[int]) -> list[float]:
    """Operations of each stage in a step."""
    return [flops * spec.batch.size * spec.model.context for flops in stage_flops(spec, layers)]
