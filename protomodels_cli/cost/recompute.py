"""What a peer computes again and how many microbatches it holds, from the bytes of its stage and its memory. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from protomodels_cli.cost.activations import Computation, Recompute
from protomodels_cli.cost.memory import StageMemory, in_flight_limit, least_in_flight, recomputations

# The spec says so; the fastest there is; anything faster takes too much; all of them do.
Why = Literal["asked", "fits", "saves", "tight"]
AMPLE = 4  # microbatches for each stage from this one to the last: with fewer, waiting costs more than recomputing
RESERVE = 0.05  # share of the memory that is left to the allocator's gaps and the libraries' workspaces


@dataclass(frozen=True)
class Picked:
    recompute: Recompute
    in_flight: int  # microbatches
    bytes: int  # that the stage then takes on its device, at most, or on its cards together
    memory: int  # that the peer has for it
    why: Why
    kept_bytes: int  # that it would take if nothing were computed again


def pick(
    sizes: StageMemory,
    first_layer: int,
    end_layer: int,
    stages_after: int,
    computation: Computation | None,
    memory: int,
) -> Picked:
    """The fastest way of recomputing that fits, with as many microbatches in flight as fit then. Keeping everything is
    the fastest only if enough of them fit to hide the links' latency. `computation` None: whatever takes most."""
    return pick_over(sizes, [(range(first_layer, end_layer), memory)], stages_after, computation)


def pick_over(
    sizes: StageMemory, cards: Sequence[tuple[range, int]], stages_after: int, computation: Computation | None
) -> Picked:
    """The same for a stage over several cards, its layers and bytes on each: what does not fit on one does not fit."""
    spec = sizes.spec
    least, ways = least_in_flight(spec, stages_after), recomputations(spec)
    most = max(least, min(in_flight_limit(spec, stages_after), spec.batch.microbatches))

    def needs(way: Recompute, held: int) -> list[int]:
        return [sizes.with_recompute(layers.start, layers.stop, way, held, computation) for layers, _ in cards]

    def lacking(way: Recompute, held: int) -> int:
        """Bytes, on the card that lacks most; not above 0: it fits."""
        there = [int(memory * (1 - RESERVE)) for _, memory in cards]
        return max(need - usable for need, usable in zip(needs(way, held), there, strict=True))

    ample = min(most, AMPLE * (stages_after + 1)) if len(ways) > 1 else least
    fitting = [way for way in ways if lacking(way, ample if way == "none" else least) <= 0]
    way = fitting[0] if fitting else min(ways, key=lambda way: lacking(way, least))
    held = max(least, bisect_right(range(most + 1), 0, key=lambda held: lacking(way, held)) - 1)
    why: Why = "asked" if len(ways) == 1 else "fits" if way == ways[0] else "saves"
    total = sum(memory for _, memory in cards)
    kept = sum(needs("none", ample))
    return Picked(way, held, sum(needs(way, held)), total, why if fitting else "tight", kept)
