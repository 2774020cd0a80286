"""What a stage's part of a snapshot holds: every tensor's name, type and shape, from the spec alone.

The worker makes parts and loads them, the coordinator takes them in without torch: both hold them against this list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from protomodels_cli.codecs.base import Kept
from protomodels_cli.cost.traffic import memories_of_codecs
from protomodels_cli.cost.units import Block, keeps_first_of_rows, moment_bytes
from protomodels_cli.forms import Dense, Form, Role, Sizes
from protomodels_cli.protocol import steps
from protomodels_cli.safetensors_file import DTYPES, SafetensorsFile
from protomodels_cli.spec.cut import anchored_layers, closing_layers, heading_layers
from protomodels_cli.spec.schema import RunSpec

APPLIED = "optimizer/applied"
Tensors = Mapping[str, Kept]


class Described(Protocol):
    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class Flaw(NamedTuple):
    """What is wrong with a part: one tensor of it, as it is and as it must be; empty: not there."""

    tensor: str
    found: str
    right: str


@dataclass(frozen=True)
class PartContents:
    always: Tensors
    together: tuple[Tensors, ...] = ()  # each is there whole, or not at all

    def flaw_in(self, found: Mapping[str, Described]) -> Flaw | None:
        """The first difference between these tensors and what must be there."""
        expected = dict(self.always)
        for group in self.together:
            if not found.keys().isdisjoint(group):
                expected |= group
        for name, right in expected.items():
            if name not in found:
                return Flaw(name, "", _described(right))
            if not _fits(found[name], right):
                return Flaw(name, _described(found[name]), _described(right))
        for group in self.together:
            rows = {found[name].shape[0]: name for name, right in group.items() if right.at_most and name in found}
            if len(rows) > 1:
                few, many = min(rows), max(rows)
                return Flaw(rows[few], f"{few} rows", f"{many} rows")
        unknown = next((name for name in found if name not in expected), None)
        return None if unknown is None else Flaw(unknown, _described(found[unknown]), "")


def _fits(found: Described, right: Kept) -> bool:
    if not right.at_most:
        return (found.dtype, found.shape) == (right.dtype, right.shape)
    rest = found.dtype, found.shape[1:], len(found.shape)
    return rest == (right.dtype, right.shape[1:], len(right.shape)) and 0 < found.shape[0] <= right.shape[0]


def _described(tensor: Described) -> str:
    """`F32 [8, 4]`; `≤` before rows of which there may be fewer."""
    most = "≤" if isinstance(tensor, Kept) and tensor.at_most else ""
    return f"{tensor.dtype} [{most}{', '.join(map(str, tensor.shape))}]"


def flaw_of_numbers(part: SafetensorsFile) -> Flaw | None:
    """The first parameter that is not finite. Moments may be: a gradient's square can be too large for its type."""
    for name in part.tensors:
        if name.startswith("weights/") and not part.is_finite(name):
            return Flaw(name, "not finite", "finite")
    return None


def has_applied(part: SafetensorsFile) -> bool:
    """Whether it says that a step was applied before it."""
    info = part.tensors.get(APPLIED)
    return info is not None and (info.dtype, info.shape) == ("I64", ()) and bool(part.array(APPLIED))


def part_contents(spec: RunSpec, layers: range, step: int, applied: bool) -> PartContents:
    """Of the stage with these layers after this step. `spec` has the run's own cut in `stages`. `applied`: whether any
    step so far was applied, and not skipped: an optimizer has no moments before that."""
    number, m = DTYPES[spec.compute.stored], spec.model
    always = {APPLIED: Kept("I64", ())}
    for name, role, form, shape in _parameters(spec, layers):
        always[f"weights/{name}"] = Kept(number, shape)
        if applied:
            always |= {f"optimizer/{name}/{key}": kept for key, kept in _moments(spec, role, form, shape).items()}
    if spec.form.has_basis:
        always |= {"basis/u": Kept(number, (m.width, spec.subspace.k)), "basis/version": Kept("I64", ())}
    together = list[Tensors]()
    for memory in _memories(spec, layers):
        if applied and not spec.subspace.update.interval:  # nothing has made it forget
            always |= memory
        else:
            together.append(memory)
    total = {"gathered/total": Kept("F64", (m.width, m.width))}
    if layers.stop == m.layers and steps.gathers(spec.subspace, step) and not steps.reports(spec.subspace, step):
        always |= total
    elif layers.stop == m.layers and steps.gathers(spec.subspace, step + 1):
        together.append(total)  # that step was begun in a generation before
    return PartContents(always, tuple(together))


def _memories(spec: RunSpec, layers: range) -> Iterator[Tensors]:
    for (side, leg), memory in memories_of_codecs(spec).items():
        is_there = layers.start > 0 if side == "previous" else layers.stop < spec.model.layers
        if is_there and memory:
            yield {f"codecs/{side}/{leg}/{name}": kept for name, kept in memory.items()}


def _parameters(spec: RunSpec, layers: range) -> Iterator[tuple[str, Role, type[Form], tuple[int, ...]]]:
    """Name, role, form (of a matrix that writes to the stream; dense for all others) and shape of each parameter."""
    m, sizes, b = spec.model, Sizes.of(spec), Block.of(spec)
    anchored, closing, first_free = anchored_layers(spec), closing_layers(spec), m.layers - spec.form.free_layers(sizes)
    heading = heading_layers(spec)
    assert m.head_dim is not None
    if layers.start == 0:
        yield "embed.weight", "embedding", spec.form, (spec.vocab_size, spec.form.embedding_width(sizes))
    for i in layers:
        form = spec.form if i < first_free else Dense
        if i in anchored:
            yield f"layers.{i}.anchor.weight", "anchor", Dense, (spec.vocab_size, spec.anchor_width)
            if spec.anchor_tokens > 1:
                yield f"layers.{i}.anchor.taps.weight", "gain", Dense, (spec.anchor_tokens - 1, m.width)
        if i in heading:
            yield f"layers.{i}.early.norm.weight", "gain", Dense, (spec.boundary_width,)
            yield f"layers.{i}.early.out.weight", "head", Dense, (spec.vocab_size, spec.boundary_width)
        gains = {"attn_norm": m.width, "mlp_norm": m.width}
        gains |= {"attn.q_norm": m.head_dim, "attn.k_norm": m.head_dim} if m.qk_norm else {}
        for name, width in gains.items():
            yield f"layers.{i}.{name}.weight", "gain", Dense, (width,)
        rows = {"attn.q": b.inner, "attn.k": b.kv, "attn.v": b.kv, "mlp.gate": b.hidden, "mlp.up": b.hidden}
        for name, outputs in rows.items():
            yield f"layers.{i}.{name}.weight", "matrix", Dense, (outputs, m.width)
        down = form.closing_width(sizes) if i in closing else form.state_width(sizes)
        yield f"layers.{i}.attn.o.weight", "writer", form, (b.inner, form.state_width(sizes))
        yield f"layers.{i}.mlp.down.weight", "writer", form, (b.hidden, down)
    if layers.stop == m.layers:
        yield "head.norm.weight", "gain", Dense, (m.width,)
        yield "head.out.weight", "head", Dense, (spec.vocab_size, m.width)


def _moments(spec: RunSpec, role: Role, form: type[Form], shape: tuple[int, ...]) -> dict[str, Kept]:
    """What a rule of model/rules.py keeps of a parameter, as model/moments.py makes it."""
    number = DTYPES[spec.compute.stored]
    narrow = role != "gain" and moment_bytes(spec, role) == 2
    columns = form.optimizer_columns(Sizes.of(spec), shape[-1])
    moment = Kept(DTYPES["bfloat16"] if narrow else number, (*shape[:-1], columns))
    match form.chosen_rule(spec.optimizer, role):
        case "muon":
            return {"first": moment}
        case "adamw":
            return {"first": moment, "second": moment}
        case "row_adamw":
            first = {"first": moment} if keeps_first_of_rows(spec, role) else {}
            return first | {"second": Kept(number, (shape[0], 1))}
