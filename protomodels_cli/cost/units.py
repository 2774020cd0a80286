"""How large the units of a model are: parameters, optimizer state and operations of `embed`, `layers.N` and `head`.

What depends on the form of the stream, the form says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from protomodels_cli.forms import Dense, Form, Role, Sizes
from protomodels_cli.spec.cut import anchored_layers, closing_layers, heading_layers, layers_per_stage, spans
from protomodels_cli.spec.groups import settings
from protomodels_cli.spec.schema import RunSpec


class Block(NamedTuple):
    """The sizes every count of a block starts from."""

    inner: int  # width of all query heads together
    kv: int  # of all key heads, or value heads
    hidden: int
    reads: int  # parameters of the matrices that read the stream
    gains: int

    @classmethod
    def of(cls, spec: RunSpec) -> Block:
        m = spec.model
        assert m.kv_heads is not None
        assert m.head_dim is not None
        assert isinstance(m.hidden, int)
        inner, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
        return cls(
            inner=inner,
            kv=kv,
            hidden=m.hidden,
            reads=m.width * (inner + 2 * kv + 2 * m.hidden),
            gains=2 * m.width + (2 * m.head_dim if m.qk_norm else 0),
        )


class Writers(NamedTuple):
    """Form and columns of a layer's two matrices that write to the stream."""

    form: type[Form]
    o: int
    down: int


def _writers(spec: RunSpec) -> list[Writers]:
    """Of every layer. The last, free layers are dense ones in every form."""
    sizes, closing = Sizes.of(spec), closing_layers(spec)
    first_free = spec.model.layers - spec.form.free_layers(sizes)
    forms = [spec.form if i < first_free else Dense for i in range(spec.model.layers)]
    return [
        Writers(form, width := form.state_width(sizes), form.closing_width(sizes) if i in closing else width)
        for i, form in enumerate(forms)
    ]


def _units(
    spec: RunSpec, embed: int, layer: Callable[[Writers], int], head: int, anchor: int = 0, early: int = 0
) -> dict[str, int]:
    """One number for each unit, in layer order. The first layer of a segment has its anchor, where those are trained,
    and the last its early head."""
    layers = {f"layers.{i}": layer(writers) for i, writers in enumerate(_writers(spec))}
    for i in anchored_layers(spec):
        layers[f"layers.{i}"] += anchor
    for i in heading_layers(spec):
        layers[f"layers.{i}"] += early
    return {"embed": embed, **layers, "head": head}


def unit_parameters(spec: RunSpec) -> dict[str, int]:
    """Trainable numbers of each unit, in layer order: `embed`, `layers.0`, …, `head`."""
    b, width, sizes = Block.of(spec), spec.model.width, Sizes.of(spec)
    return _units(
        spec,
        embed=spec.vocab_size * spec.form.embedding_width(sizes),
        layer=lambda w: b.reads + b.gains + b.inner * w.o + b.hidden * w.down,
        head=width + width * spec.vocab_size,
        anchor=spec.vocab_size * spec.anchor_width + _taps(spec),
        early=_early_head(spec),
    )


def anchor_parameters(spec: RunSpec) -> int:
    """Trainable numbers of all anchors."""
    return len(anchored_layers(spec)) * (spec.vocab_size * spec.anchor_width + _taps(spec))


def early_parameters(spec: RunSpec) -> int:
    """Trainable numbers of all early heads, which are there in training alone."""
    return len(heading_layers(spec)) * _early_head(spec)


def block_parameters(spec: RunSpec) -> int:
    """Trainable numbers of all blocks, without the anchors and early heads that they hold."""
    units = unit_parameters(spec)
    all_layers = sum(n for unit, n in units.items() if unit not in ("embed", "head"))
    return all_layers - anchor_parameters(spec) - early_parameters(spec)


def _taps(spec: RunSpec) -> int:
    """Weights of an anchor for the tokens before a token."""
    return (spec.anchor_tokens - 1) * spec.model.width


def _early_head(spec: RunSpec) -> int:
    return spec.boundary_width * (1 + spec.vocab_size)


def unit_gradient_bytes(spec: RunSpec) -> dict[str, int]:
    """Bytes of each unit's gradients. Those of an anchor are of the rows that a step touches, and the place of every
    row among them (model/anchor.py)."""
    number, width = number_bytes(spec), spec.anchor_width
    table = spec.vocab_size * width * number
    touched = touched_rows(spec) * width * number + 8 * spec.vocab_size + 8
    holders = {f"layers.{i}" for i in anchored_layers(spec)}
    return {u: n * number + (touched - table if u in holders else 0) for u, n in unit_parameters(spec).items()}


def touched_rows(spec: RunSpec) -> int:
    """Rows of an anchor's table that a step can touch, at most."""
    return min(spec.vocab_size, spec.batch.size * spec.model.context)


def unit_multiplied(spec: RunSpec) -> dict[str, int]:
    """Numbers of each unit's matrices that are multiplied: all but the gains, and the embedding, which is looked up."""
    b = Block.of(spec)
    return _units(
        spec,
        embed=0,
        layer=lambda w: b.reads + b.inner * w.o + b.hidden * w.down,
        head=spec.model.width * spec.vocab_size,
        early=spec.boundary_width * spec.vocab_size,
    )


def unit_state_bytes(spec: RunSpec) -> dict[str, int]:
    """Bytes of what the optimizer keeps for each unit."""
    b, width, sizes, vocab = Block.of(spec), spec.model.width, Sizes.of(spec), spec.vocab_size
    reads, number = _kept(spec, Dense, "matrix", 1, b.reads), number_bytes(spec)
    return _units(
        spec,
        embed=_kept(spec, spec.form, "embedding", vocab, spec.form.embedding_width(sizes)),
        layer=lambda w: (
            reads
            + 2 * b.gains * number
            + _kept(spec, w.form, "writer", b.inner, w.o)
            + _kept(spec, w.form, "writer", b.hidden, w.down)
        ),
        head=_kept(spec, Dense, "head", vocab, width) + 2 * width * number,
        anchor=_kept(spec, Dense, "anchor", vocab, spec.anchor_width) + 2 * _taps(spec) * number,
        early=_kept(spec, Dense, "head", vocab, spec.boundary_width) + 2 * spec.boundary_width * number,
    )


def lift_numbers(spec: RunSpec) -> int:
    """Of the fixed matrix that lifts the rows of an anchor's table to the stream's width; 0: they have it."""
    return spec.anchor_width * spec.model.width if spec.anchor_width < spec.model.width else 0


def anchor_bytes(spec: RunSpec) -> int:
    """Bytes of one anchor's table and of what the optimizer keeps of it."""
    rows, width = spec.vocab_size, spec.anchor_width
    return rows * width * number_bytes(spec) + _kept(spec, Dense, "anchor", rows, width)


def _kept(spec: RunSpec, form: type[Form], role: Role, rows: int, stored: int) -> int:
    """Bytes that a rule of model/rules.py keeps of a matrix."""
    columns, moment = form.optimizer_columns(Sizes.of(spec), stored), moment_bytes(spec, role)
    match form.chosen_rule(spec.optimizer, role):
        case "muon":
            return rows * columns * moment
        case "adamw":
            return 2 * rows * columns * moment
        case "row_adamw":  # one second moment a row, and no first one where β₁ is 0
            return rows * (columns * moment * keeps_first_of_rows(spec, role) + number_bytes(spec))


def moment_bytes(spec: RunSpec, role: Role) -> int:
    """Bytes of one number of the moments of such a parameter, but of those of which there is one a row."""
    if number_bytes(spec) == 8 or (spec.optimizer.moments == "float32" and role != "anchor"):
        return number_bytes(spec)
    return 2


def keeps_first_of_rows(spec: RunSpec, role: Role) -> bool:
    """Whether row AdamW keeps a first moment of such a parameter."""
    return settings(spec, role).beta1 > 0


def unit_flops(spec: RunSpec) -> dict[str, float]:
    """Floating point operations a token, forward and backward: 6 for each multiply-add of the forward pass.

    Whole numbers, so that sums do not depend on their order. Early heads as long as they count. Left out: what is not a
    product of matrices, and the few products at a boundary.
    """
    b, sizes = Block.of(spec), Sizes.of(spec)
    attention = b.inner * (spec.model.context + 1)  # scores and their use; a token sees half the window on average
    flops = _units(
        spec,
        embed=0,  # a lookup
        layer=lambda w: 6 * (b.reads + b.inner * w.o + b.hidden * w.down + attention) + w.form.reading_flops(sizes),
        head=6 * spec.model.width * spec.vocab_size,
        anchor=4 * lift_numbers(spec),  # which has no gradient
        early=6 * spec.boundary_width * spec.vocab_size,
    )
    return {unit: float(n) for unit, n in flops.items()}


def stage_flops(spec: RunSpec, layers: Sequence[int]) -> list[float]:
    """Operations a token of each stage of this cut."""
    units = unit_flops(spec)
    found = [sum(units[f"layers.{i}"] for i in span) for span in spans(layers)]
    found[0] += units["embed"]
    found[-1] += units["head"]
    return found


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
