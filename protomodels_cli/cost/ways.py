"""The ways to cross a boundary that `plan` compares, and what each was measured to cost in loss."""

from __future__ import annotations

from typing import NamedTuple

from protomodels_cli.spec.schema import RunSpec

SOURCE = "d = 512, 26 M tokens; docs/benchmarks.md, “Loss at a larger size”"


class Way(NamedTuple):
    form: str
    share: int  # of the width's numbers, one in so many crosses
    codec: str  # both ways
    anchor: str
    loss: float | None  # above dense's, as a share of it, by SOURCE; None: not measured there
    single: float | None = None  # the same in segments of one layer, where there are segments

    def k(self, width: int) -> int:
        return max(1, width // self.share)


# The first cost least. One number in six was measured with k = 86; an eighth in int8 has as many bytes. Both are means
# over seeds (−0.17 and −0.05 %) whose gaps lie between −1.1 and +0.6 %: more numbers than these are not worth their
# bytes. Trained anchors had the defaults (`_as_measured`). The rates of reparam, here as there, were not tuned.
WAYS = (
    Way("dense", 1, "bf16", "fixed", 0.0),
    Way("dense", 1, "int8", "fixed", 0.0),
    Way("two_stream", 8, "int8", "segment", 0.0),
    Way("two_stream", 6, "eden:6", "segment", 0.0, 0.020),
    Way("two_stream", 15, "eden:3 then eden:5", "segment", 0.008, 0.048),
    Way("dense", 1, "eden:4", "fixed", 0.010),
    Way("two_stream", 32, "int8", "segment", 0.020),
    Way("reparam", 8, "int8", "fixed", 0.122),
    Way("reparam", 16, "int8", "fixed", None),
    Way("reparam", 32, "int8", "fixed", None),
    Way("reparam", 64, "int8", "fixed", None),
    Way("reparam", 100, "int8", "fixed", None),
)


def expected_loss(spec: RunSpec) -> float | None:
    """What this way of crossing cost where it was measured; None where it was not."""
    sub, wire = spec.subspace, spec.wire
    for way in WAYS:
        alike = (way.form, way.anchor, way.codec, way.codec) == (sub.form, sub.anchor, wire.forward, wire.backward)
        if alike and (not spec.form.has_basis or way.k(spec.model.width) == sub.k):
            if way.anchor == "fixed":
                return way.loss
            if not _as_measured(spec):
                return None
            return way.loss if min(spec.layers_per_segment) > 1 else way.single
    return None


WORST = max(way.loss for way in WAYS if way.loss is not None)


def assumed_loss(spec: RunSpec) -> float:
    """What is reckoned with: as measured; where nobody measured it, as the worst that was measured."""
    loss = expected_loss(spec)
    return WORST if loss is None else loss


def _as_measured(spec: RunSpec) -> bool:
    """Whether segments have what they were measured with: taps, early losses, anchors of the full width."""
    return spec.anchor_tokens > 1 and spec.early_loss > 0 and spec.subspace.anchor_rank is None
