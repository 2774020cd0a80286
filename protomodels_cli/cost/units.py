"""How large the units of a model are: parameters, optimizer state and operations of `embed`, `layers.N` and `head`.

What depends on the form of the stream, the form says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from protomodels_cli.forms import Dense, Form, Role, Sizes
from protomodels_cli.spec.cut import layers_per_stage, spans
from protomodels_cli.spec.schema import RunSpec


class Block(NamedTuple):
    """The sizes every count of a block starts from."""

    inner: int  # width of all query heads together
    kv: int  # of all key heads, or value heads
    hidden: int
    reads: int  # parameters of the matrices that read the stream
    rows: int  # rows of the two matrices that write to it
    gains: int

    @classmethod
    def of(cls, spec: RunSpec) -> Block:
        m = spec.model
        assert m.kv_heads is not None
        assert m.head_dim is not None
        assert m.hidden is not None
        inner, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
        return cls(
            inner=inner,
            kv=kv,
            hidden=m.hidden,
            reads=m.width * (inner + 2 * kv + 2 * m.hidden),
            rows=inner + m.hidden,
            gains=2 * m.width + (2 * m.head_dim if m.qk_norm else 0),
        )


def _units(spec: RunSpec, embed: int, layer: Callable[[type[Form]], int], head: int) -> dict[str, int]:
    """One number for each unit, in layer order. The last, free layers are dense ones in every form."""
    first_free = spec.model.layers - spec.form.free_layers(Sizes.of(spec))
    tied, free = layer(spec.form), layer(Dense)
    layers = {f"layers.{i}": tied if i < first_free else free for i in range(spec.model.layers)}
    return {"embed": embed, **layers, "head": head}


def unit_parameters(spec: RunSpec) -> dict[str, int]:
    """Trainable numbers of each unit, in layer order: `embed`, `layers.0`, …, `head`."""
    b, width, sizes = Block.of(spec), spec.model.width, Sizes.of(spec)
    return _units(
        spec,
        embed=spec.vocab_size * spec.form.state_width(sizes),
        layer=lambda form: b.reads + b.gains + b.rows * form.state_width(sizes),
        head=width + width * spec.vocab_size,
    )


def unit_multiplied(spec: RunSpec) -> dict[str, int]:
    """Numbers of each unit's matrices that are multiplied: all but the gains, and the embedding, which is looked up."""
    b, sizes = Block.of(spec), Sizes.of(spec)
    return _units(
        spec,
        embed=0,
        layer=lambda form: b.reads + b.rows * form.state_width(sizes),
        head=spec.model.width * spec.vocab_size,
    )


def unit_state_bytes(spec: RunSpec) -> dict[str, int]:
    """Bytes of what the optimizer keeps for each unit."""
    b, width, sizes, vocab = Block.of(spec), spec.model.width, Sizes.of(spec), spec.vocab_size
    wide = number_bytes(spec)
    narrow = {"float32": wide, "bf16": 2}[spec.optimizer.moments]

    def matrix(form: type[Form], role: Role, rows: int, columns: int) -> int:
        """What a rule of model/rules.py keeps."""
        match form.chosen_rule(spec.optimizer, role):
            case "muon":
                return rows * columns * narrow
            case "adamw":
                return 2 * rows * columns * narrow
            case "row_adamw":  # one second moment a row
                return rows * (columns * narrow + wide)

    reads, gains = matrix(Dense, "matrix", 1, b.reads), 2 * b.gains * wide
    return _units(
        spec,
        embed=matrix(spec.form, "embedding", vocab, spec.form.optimizer_columns(sizes)),
        layer=lambda form: reads + gains + matrix(form, "writer", b.rows, form.optimizer_columns(sizes)),
        head=matrix(Dense, "head", vocab, width) + 2 * width * wide,
    )


def unit_flops(spec: RunSpec) -> dict[str, float]:
    """Floating point operations a token, forward and backward: 6 for each multiply-add of the forward pass.

    Whole numbers, so that sums do not depend on their order. Left out: what is not a product of matrices, and the few
    products at a boundary.
    """
    b, sizes = Block.of(spec), Sizes.of(spec)
    attention = b.inner * (spec.model.context + 1)  # scores and their use; a token sees half the window on average
    flops = _units(
        spec,
        embed=0,  # a lookup
        layer=lambda form: 6 * (b.reads + b.rows * form.state_width(sizes) + attention) + form.reading_flops(sizes),
        head=6 * spec.model.width * spec.vocab_size,
    )
    return {unit: float(n) for unit, n in flops.items()}


def stage_parameters(spec: RunSpec) -> list[int]:
    """Trainable numbers of each stage."""
    units = unit_parameters(spec)
    sizes = [sum(units[f"layers.{i}"] for i in span) for span in spans(layers_per_stage(spec))]
    sizes[0] += units["embed"]
    sizes[-1] += units["head"]
    return sizes


def number_bytes(spec: RunSpec) -> int:
    """Bytes of a number as a stage computes with it."""
    return {"float32": 4, "float64": 8}[spec.compute.stored]


def t_fixed_bytes(spec: RunSpec) -> int:
    """T_fixed on every stage: one bit an entry."""
    return spec.vocab_size * -(-spec.model.width // 8) if spec.form.has_basis else 0
