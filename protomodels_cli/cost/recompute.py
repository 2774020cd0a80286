"""What a peer computes again and how many microbatches it holds, from the bytes of its stage and its memory. Pure."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

from protomodels_cli.cost.activations import Path, Recompute
from protomodels_cli.cost.memory import StageMemory, in_flight_limit, least_in_flight, recomputations

# The spec says so; the fastest there is; anything faster takes too much; all of them do.
Why = Literal["asked", "fits", "saves", "tight"]
AMPLE = 4  # microbatches for each stage from this one to the last: with fewer, waiting costs more than recomputing
RESERVE = 0.05  # share of the memory that is left to the allocator's gaps and the libraries' workspaces


@dataclass(frozen=True)
class Picked:
    recompute: Recompute
    in_flight: int  # microbatches
    bytes: int  # that the stage then takes on its device, at most
    memory: int  # that the peer has for it
    why: Why
    kept_bytes: int  # that it would take if nothing were computed again


def pick(
    sizes: StageMemory, first_layer: int, end_layer: int, stages_after: int, path: Path | None, memory: int
) -> Picked:
    """The fastest way of recomputing that fits, with as many microbatches in flight as fit then. Keeping everything is
    the fastest only if enough of them fit to hide the links' latency. `path` None: whatever takes most."""
    spec = sizes.spec
    least, ways = least_in_flight(spec, stages_after), recomputations(spec)
    most = max(least, min(in_flight_limit(spec, stages_after), spec.batch.microbatches))
    usable = int(memory * (1 - RESERVE))

    def need(way: Recompute, held: int) -> int:
        return sizes.with_recompute(first_layer, end_layer, way, held, path)

    ample = min(most, AMPLE * (stages_after + 1)) if len(ways) > 1 else least
    fitting = [way for way in ways if need(way, ample if way == "none" else least) <= usable]
    way = fitting[0] if fitting else min(ways, key=lambda way: need(way, least))
    held = max(least, bisect_right(range(most + 1), usable, key=lambda held: need(way, held)) - 1)
    why: Why = "asked" if len(ways) == 1 else "fits" if way == ways[0] else "saves"
    return Picked(way, held, need(way, held), memory, why if fitting else "tight", need("none", ample))
