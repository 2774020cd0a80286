"""A model in segments, which no ordinary Llama is: what its config.json says of them, and what follows for its weights.

`export/modeling_pmtrain.py` computes it for transformers, `inference/model.py` for us.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from protomodels_cli.spec.cut import spans
from protomodels_cli.spec.schema import RunSpec


@dataclass(frozen=True)
class Segments:
    layers: tuple[int, ...]  # in each
    anchors: int  # tables: one for all, or one for each
    carried: int | None  # numbers a token that go from segment to segment, beside a stream that does not; None: all
    anchor_tokens: int = 1  # whose rows make up an anchor: a token's own and those before it

    @property
    def starts(self) -> list[int]:
        """The first layer of each."""
        return [span.start for span in spans(self.layers)]

    @property
    def anchored(self) -> list[int]:
        """Layers with an anchor, which is read from there on."""
        return self.starts[: self.anchors]

    def written(self, layer: int, width: int) -> tuple[int, int]:
        """Numbers a token that a layer's W_o and W_down write. In the last segment nothing is carried on, and what the
        last matrix of another writes is all carried on."""
        if self.carried is None or layer >= self.starts[-1]:
            return width, width
        both = width + self.carried
        return both, self.carried if layer + 1 in self.starts else both

    def fields(self) -> dict[str, Any]:
        """Of config.json."""
        return {
            "segments": list(self.layers),
            "num_anchors": self.anchors,
            "anchor_tokens": self.anchor_tokens,
            "carried_width": self.carried,
        }


def segments_of(spec: RunSpec) -> Segments | None:
    """None: what is trained is an ordinary Llama or Qwen3, as with a single segment: nothing ends, and one anchor is a
    part of the embedding."""
    layers = tuple(spec.layers_per_segment)
    if not spec.has_segments or len(layers) == 1:
        return None
    anchors = 1 if spec.subspace.anchor == "fixed" else len(layers)
    carried = spec.boundary_width if spec.form.has_local_stream else None
    return Segments(layers, anchors, carried, spec.anchor_tokens)


def segments_in(config: dict[str, Any], layers: int) -> Segments:
    """What config.json says. Raises ValueError with the name and the value of a field that cannot be."""
    found, anchors, carried = (config.get(name) for name in ("segments", "num_anchors", "carried_width"))
    tokens = config.get("anchor_tokens", 1)
    if not (isinstance(found, list) and all(type(n) is int and n > 0 for n in found) and sum(found) == layers):
        raise ValueError(f"segments = {found!r}, and these are not layers per segment of {layers} layers")
    if carried is not None and (type(carried) is not int or carried < 1):
        raise ValueError(f"carried_width = {carried!r}, and that is not a size")
    if type(anchors) is not int or anchors not in (1, len(found)):
        raise ValueError(
            f"num_anchors = {anchors!r}, and there is one for all of {len(found)} segments, or one for each"
        )
    if type(tokens) is not int or tokens < 1:
        raise ValueError(f"anchor_tokens = {tokens!r}, and that is not a number of tokens")
    return Segments(tuple(found), anchors, carried, tokens)
