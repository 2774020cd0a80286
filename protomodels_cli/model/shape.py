"""The model's sizes with every default filled in, and its cut into stages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protomodels_cli.forms import Sizes
from protomodels_cli.spec.cut import heading_layers, layers_per_stage, segment_starts, spans
from protomodels_cli.spec.schema import RunSpec


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab_size: int
    qk_norm: bool
    rope_theta: float
    norm_eps: float
    dtype: torch.dtype
    sizes: Sizes  # what the form's own sizes follow from
    free_layers: int  # last layers that read and write x itself
    segment_starts: frozenset[int]  # layers where a segment begins; none where segments do not matter
    trains_anchors: bool
    anchor_width: int
    anchor_tokens: int
    heading_layers: frozenset[int]  # with an early head
    boundary_width: int
    t_fixed_seed: int
    tokens_in_step: int

    @classmethod
    def of(cls, spec: RunSpec) -> Shape:
        m = spec.model
        assert m.kv_heads is not None
        assert m.head_dim is not None
        assert isinstance(m.hidden, int)
        return cls(
            layers=m.layers,
            width=m.width,
            heads=m.heads,
            kv_heads=m.kv_heads,
            head_dim=m.head_dim,
            hidden=m.hidden,
            vocab_size=spec.vocab_size,
            qk_norm=m.qk_norm,
            rope_theta=m.rope_theta,
            norm_eps=m.norm_eps,
            dtype=getattr(torch, spec.compute.stored),
            sizes=Sizes.of(spec),
            free_layers=spec.form.free_layers(Sizes.of(spec)),
            segment_starts=segment_starts(spec),
            trains_anchors=spec.subspace.anchor != "fixed",
            anchor_width=spec.anchor_width,
            anchor_tokens=spec.anchor_tokens,
            heading_layers=heading_layers(spec),
            boundary_width=spec.boundary_width,
            t_fixed_seed=spec.subspace.t_fixed.seed,
            tokens_in_step=spec.batch.size * spec.model.context,
        )


@dataclass(frozen=True)
class Slice:
    """The contiguous layers one stage holds."""

    index: int
    first_layer: int
    end_layer: int
    is_first: bool
    is_last: bool

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)


def slices(spec: RunSpec) -> list[Slice]:
    cut = spans(layers_per_stage(spec))
    return [Slice(i, span.start, span.stop, i == 0, i == len(cut) - 1) for i, span in enumerate(cut)]
