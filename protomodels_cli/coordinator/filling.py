"""Who takes the stages of a cut that stands which nobody holds, from what the others offer. Pure, and exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from protomodels_cli.coordinator import reasons
from protomodels_cli.coordinator.placement import Offer, best_columns
from protomodels_cli.cost.memory import stage_memory
from protomodels_cli.spec.cut import spans
from protomodels_cli.spec.schema import RunSpec

MOST_COST, COST_STEP = 2.5e7, 0.1  # seconds: what a seat counts as at most, and what makes a difference


def fill(
    spec: RunSpec,
    layers: Sequence[int],
    empty: Sequence[int],
    offers: Sequence[Offer],
    cost: Callable[[str, int], float],
) -> dict[int, str] | reasons.StagesWithoutPeer:
    """A peer for each empty stage of a cut that stands, or what is missing.

    All stages get a peer if that can be, and a peer has the memory for its stage. Of all ways to do that, the one that
    costs the least in all (seconds); among equals those who joined first, the first of them to the earlier stages.
    """
    ranges, memory = spans(layers), stage_memory(spec)
    needs = {i: memory.total(ranges[i].start, ranges[i].stop, len(layers) - 1 - i) for i in empty}
    on_host = {i: memory.on_host(ranges[i].start, ranges[i].stop) for i in empty}
    able = [[o.fits(memory, ranges[i], len(layers) - 1 - i) for o in offers] for i in empty]
    costs = [
        [min(cost(o.peer, i), MOST_COST) if fits else math.inf for o, fits in zip(offers, row, strict=True)]
        for i, row in zip(empty, able, strict=True)
    ]
    seats = _cheapest(costs) if empty else []
    without = [i for i, seat in zip(empty, seats, strict=True) if seat is None]
    if without:
        too_small = len(offers) - (len(empty) - len(without))
        return reasons.StagesWithoutPeer(tuple(reasons.StageNeed(i, needs[i], on_host[i]) for i in without), too_small)
    return {i: offers[seat].peer for i, seat in zip(empty, seats, strict=True) if seat is not None}


def _cheapest(costs: Sequence[Sequence[float]]) -> list[int | None]:
    """A column for each row, all different; as many as can be where the cost is finite, and for the least in all."""
    rows = len(costs)
    padded = np.array([[*row, *[math.inf] * rows] for row in costs])  # whoever finds none takes one of the last
    columns = padded.shape[1]
    ties = np.arange(columns) * rows - np.outer(np.arange(rows), np.arange(columns))
    possible = np.isfinite(padded)
    scaled = np.where(possible, np.round(np.where(possible, padded, 0.0) / COST_STEP), 0).astype(np.int64)
    gain = -(scaled * (rows * rows * columns + 1) + ties)
    gain = np.where(possible, gain, gain.min(axis=1).sum() - 1)  # worse than all the others together
    return [seat if possible[row, seat] else None for row, seat in enumerate(best_columns(gain))]
