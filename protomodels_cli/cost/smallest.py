"""The smallest stage that a peer could be asked to hold: what it must have room for to be of any use. Pure."""

from __future__ import annotations

from collections.abc import Callable

from protomodels_cli.cost.memory import StageMemory
from protomodels_cli.spec.cut import atom, layers_per_stage, spans
from protomodels_cli.spec.schema import RunSpec


def smallest_stage(spec: RunSpec, size_of: Callable[[StageMemory, int, int, int], int]) -> int:
    """By `size_of`: of a stage's first layer, the end of its layers, and the stages behind it."""
    sizes = StageMemory(spec)
    if spec.stages == "auto":
        layers, one = spec.model.layers, atom(spec)  # one of them, or all: then there are no boundaries
        return min(size_of(sizes, *stage, 0) for stage in [*((i, i + one) for i in range(0, layers, one)), (0, layers)])
    cut = spans(layers_per_stage(spec))
    return min(size_of(sizes, span.start, span.stop, len(cut) - 1 - i) for i, span in enumerate(cut))
