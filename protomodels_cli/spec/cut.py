"""Where the model is cut: layers per stage, and which layers those are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from protomodels_cli.spec.schema import RunSpec


def even_cut(layers: int, stages: int) -> list[int]:
    """Layers per stage, as even as possible. Earlier stages take the remainder: the last one has the head."""
    base, rest = divmod(layers, stages)
    return [base + (i < rest) for i in range(stages)]


def layers_per_stage(spec: RunSpec) -> list[int]:
    """The cut a spec asks for. `auto` is one stage until peers have joined and been measured."""
    if isinstance(spec.stages, list):
        return list(spec.stages)
    return even_cut(spec.model.layers, 1 if spec.stages == "auto" else spec.stages)


def spans(layers: Sequence[int]) -> list[range]:
    """The layers of each stage of a cut."""
    return [range(end - n, end) for n, end in zip(layers, accumulate(layers), strict=True)]
