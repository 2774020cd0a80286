"""Where the model is cut: layers per stage and per segment, and which layers those are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


def cut_evenly(spec: RunSpec, stages: int) -> int | list[int]:
    """What `stages` has to be for so many of them, as even as possible: whole segments, where those matter. Where there
    are not enough of them, the number, for which the checks have a rule and a fix."""
    segments = spec.layers_per_segment
    if not spec.has_segments or stages > len(segments):
        return stages
    return [sum(segments[span.start : span.stop]) for span in spans(even_cut(len(segments), stages))]


def layers_per_segment(spec: RunSpec) -> list[int]:
    """The segments a spec asks for: the stages, unless it says otherwise."""
    segments = spec.model.segments
    if segments is None:
        return layers_per_stage(spec)
    return list(segments) if isinstance(segments, list) else even_cut(spec.model.layers, segments)


def segment_starts(spec: RunSpec) -> frozenset[int]:
    """The layers where a segment begins; none where segments do not matter."""
    return frozenset(span.start for span in spans(spec.layers_per_segment) if spec.has_segments)


def closing_layers(spec: RunSpec) -> frozenset[int]:
    """The last layer of each segment but the last; none where segments do not matter."""
    return frozenset(start - 1 for start in segment_starts(spec) if start)


def anchored_layers(spec: RunSpec) -> frozenset[int]:
    """The layers that hold the trained change of an anchor."""
    return segment_starts(spec) if spec.subspace.anchor != "fixed" else frozenset()


def heading_layers(spec: RunSpec) -> frozenset[int]:
    """The layers with an early head: the last of each segment but the last."""
    return closing_layers(spec) if spec.early_loss else frozenset()


def atom(spec: RunSpec) -> int:
    """Layers that a cut which is still to be chosen keeps together: a segment's, where segments matter; all of them
    have as many then."""
    return spec.layers_per_segment[0] if spec.has_segments else 1


def spans(layers: Sequence[int]) -> list[range]:
    """The layers of each stage of a cut, or of each segment."""
    return [range(end - n, end) for n, end in zip(layers, accumulate(layers), strict=True)]


def is_whole(stages: Sequence[int], segments: Sequence[int]) -> bool:
    """Whether every stage of a cut is made of whole segments."""
    return set(accumulate(stages)) <= set(accumulate(segments))
