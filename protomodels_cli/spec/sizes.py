"""How large a run's parts are, from the spec alone: parameters and bytes. Pure arithmetic, no torch."""

from __future__ import annotations

from protomodels_cli.spec.cut import layers_per_stage
from protomodels_cli.spec.schema import RunSpec

WIRE_BITS = {"fp32": 32, "bf16": 16}


def unit_parameters(spec: RunSpec) -> dict[str, int]:
    """Trainable numbers of each unit, in layer order: `embed`, `layers.0`, …, `head`."""
    m, form = spec.model, spec.subspace.form
    assert m.kv_heads is not None
    assert m.head_dim is not None
    assert m.hidden is not None
    stored = spec.subspace.k if form == "reparam" else m.width  # columns of what writes to the stream
    free = m.layers if form == "dense" else spec.subspace.unconstrained_layers
    inner, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    reads = m.width * (inner + 2 * kv + 2 * m.hidden) + 2 * m.width + (2 * m.head_dim if m.qk_norm else 0)
    units = {"embed": spec.vocab_size * stored}
    for i in range(m.layers):
        columns = m.width if i >= m.layers - free else stored
        units[f"layers.{i}"] = reads + (inner + m.hidden) * columns
    units["head"] = m.width + m.width * spec.vocab_size
    return units


def stage_parameters(spec: RunSpec) -> list[int]:
    """Trainable numbers of each stage."""
    units = unit_parameters(spec)
    counts = layers_per_stage(spec)
    sizes, layer = [], 0
    for n in counts:
        sizes.append(sum(units[f"layers.{i}"] for i in range(layer, layer + n)))
        layer += n
    sizes[0] += units["embed"]
    sizes[-1] += units["head"]
    return sizes


def t_fixed_bytes(spec: RunSpec) -> int:
    """T_fixed on every stage: one bit an entry."""
    return 0 if spec.subspace.form == "dense" else spec.vocab_size * -(-spec.model.width // 8)


def boundary_bytes(spec: RunSpec) -> dict[str, float]:
    """Bytes a token over one boundary: numbers each way, and the token id on the way forward."""
    numeral = spec.boundary_width / 8
    id_bytes = 2 if spec.vocab_size <= 1 << 16 else 3
    return {
        "forward": numeral * WIRE_BITS[spec.wire.forward] + id_bytes,
        "backward": numeral * WIRE_BITS[spec.wire.backward],
        "dense_bf16_each_way": 2.0 * spec.model.width,
    }
