"""How large a run's parts are, from the spec alone: parameters, operations and bytes. Pure arithmetic, no torch."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from protomodels_cli.cost.traffic import in_flight_of_codecs, kept_by_codecs, staged_by_codecs
from protomodels_cli.spec.cut import layers_per_stage
from protomodels_cli.spec.schema import RunSpec


class _Block(NamedTuple):
    """The sizes every count of a block starts from."""

    inner: int  # width of all query heads together
    kv: int  # of all key heads, or value heads
    hidden: int
    reads: int  # parameters of the matrices that read the stream
    rows: int  # rows of the two matrices that write to it
    columns: int  # stored columns of those, and of the embedding
    gains: int
    free: int  # last layers that store all of their columns

    @classmethod
    def of(cls, spec: RunSpec) -> _Block:
        m, form = spec.model, spec.subspace.form
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
            columns=spec.subspace.k if form == "reparam" else m.width,
            gains=2 * m.width + (2 * m.head_dim if m.qk_norm else 0),
            free=m.layers if form == "dense" else spec.subspace.unconstrained_layers,
        )


def _units(spec: RunSpec, embed: int, tied: int, free: int, head: int) -> dict[str, int]:
    """One number for each unit, in layer order: the last layers, which write outside S, have `free`."""
    first_free = spec.model.layers - _Block.of(spec).free
    layers = {f"layers.{i}": tied if i < first_free else free for i in range(spec.model.layers)}
    return {"embed": embed, **layers, "head": head}


def unit_parameters(spec: RunSpec) -> dict[str, int]:
    """Trainable numbers of each unit, in layer order: `embed`, `layers.0`, …, `head`."""
    b, width = _Block.of(spec), spec.model.width
    return _units(
        spec,
        embed=spec.vocab_size * b.columns,
        tied=b.reads + b.gains + b.rows * b.columns,
        free=b.reads + b.gains + b.rows * width,
        head=width + width * spec.vocab_size,
    )


def unit_state(spec: RunSpec) -> dict[str, int]:
    """Numbers the optimizer keeps for each unit: the table in model/optim.py, in sizes."""
    b, width, k = _Block.of(spec), spec.model.width, spec.subspace.k
    moments = 1 if spec.optimizer.name == "muon" else 2  # of a block's matrix; everything else has AdamW's two
    # A constrained matrix is handled in coordinates: a first moment of k columns, and one second moment a row.
    constrained = spec.subspace.form == "constrained"
    return _units(
        spec,
        embed=spec.vocab_size * (k + 1 if constrained else 2 * b.columns),
        tied=moments * b.reads + 2 * b.gains + b.rows * (k + moments - 1 if constrained else moments * b.columns),
        free=moments * b.reads + 2 * b.gains + moments * b.rows * width,
        head=2 * (width + width * spec.vocab_size),
    )


def unit_flops(spec: RunSpec) -> dict[str, float]:
    """Floating point operations a token, forward and backward: 6 for each multiply-add of the forward pass.

    Whole numbers, so that sums do not depend on their order. Left out: what is not a product of matrices, and the few
    products at a boundary.
    """
    b, width, k = _Block.of(spec), spec.model.width, spec.subspace.k
    attention = b.inner * (spec.model.context + 1)  # scores and their use; a token sees half the window on average
    # Reparametrised, both branches first read x = c·Uᵀ. U has no gradient, so backward costs no more than forward.
    reading = 2 * 4 * k * width if spec.subspace.form == "reparam" else 0
    flops = _units(
        spec,
        embed=0,  # a lookup
        tied=6 * (b.reads + b.rows * b.columns + attention) + reading,
        free=6 * (b.reads + b.rows * width + attention),
        head=6 * width * spec.vocab_size,
    )
    return {unit: float(n) for unit, n in flops.items()}


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


def in_flight_limit(spec: RunSpec, stages_after: int) -> int:
    """Microbatches that a stage with this many stages behind it may hold between their forward and their backward."""
    if stages_after == 0:
        return 1  # the last stage goes straight from forward to backward
    return 2 * (stages_after + 1) if spec.batch.in_flight is None else spec.batch.in_flight


class StageMemory:
    """Bytes of any stage a run can be cut into; made once where many stages are weighed.

    What is kept is exact, what is in flight nearly so (what autograd saves), what passing work takes is a bound.
    More layers, or more stages behind it, never make a stage smaller.
    """

    def __init__(self, spec: RunSpec, windows: int | None = None):
        """`windows`: how many samples the data has, where that is known."""
        self.spec, self.layers = spec, spec.model.layers
        self._towards_previous, self._towards_next = kept_by_codecs(spec, windows)
        b, m, form = _Block.of(spec), spec.model, spec.subspace.form
        assert m.head_dim is not None
        number = {"float32": 4, "float64": 8}[spec.compute.dtype]
        tokens = spec.batch.size // spec.batch.microbatches * m.context  # of a microbatch

        parameters, state = unit_parameters(spec), unit_state(spec)
        self._units_before = [0, *accumulate((2 * parameters[u] + state[u]) * number for u in parameters)]
        self._saved_before = [0, *accumulate((parameters[u] + state[u]) * number for u in parameters)]
        self._basis = 0 if form == "dense" else m.width * spec.subspace.k * number
        self._shared = t_fixed_bytes(spec) + self._basis

        self._layer_saved = tokens * _saved(spec) * number
        # Once a stage: message in, its gradient, message out, the stream, rotary angles; token ids and targets.
        self._ends_saved = tokens * ((3 * spec.boundary_width + m.width + m.head_dim) * number + 16)
        self._ends_saved += 2 * in_flight_of_codecs(spec)  # towards both neighbours
        self._learnt = staged_by_codecs(spec)

        # The optimizer takes one parameter at a time and makes up to six tensors of its size; of a constrained one,
        # six of its coordinates and the update they are multiplied out to.
        matrix, embed, head = m.width * max(b.inner, b.hidden), spec.vocab_size * b.columns, spec.vocab_size * m.width
        embed_step = spec.vocab_size * (6 * spec.subspace.k + m.width) if form == "constrained" else 6 * embed
        self._stepping = (6 * matrix * number, embed_step * number, 6 * head * number)
        # A backward pass makes a layer's gradients, and a parameter's before it is added to those of earlier ones.
        self._gradient = (matrix * number, embed * number, head * number)
        # Log-probabilities of a chunk of the loss, their gradient, and that of the logits.
        self._logits = 3 * min(spec.compute.loss_chunk, tokens) * spec.vocab_size * number
        self._covariance = 0 if form == "dense" else 4 * 8 * m.width**2  # of the stream's gradients, in float64

    def total(self, first_layer: int, end_layer: int, stages_after: int) -> int:
        first, last = first_layer == 0, end_layer == self.layers

        def largest(matrix: int, embed: int, head: int) -> int:
            return max(matrix, embed if first else 0, head if last else 0)

        held = self.in_flight(first_layer, end_layer, stages_after)
        backward = self._layer_saved + largest(*self._gradient) + (self._logits if last else 0)
        # No microbatch is in flight while the optimizer steps: the two never need their memory at one time.
        # What codecs learn in a step lies beside what they knew until it is applied.
        learnt = (not first) * self._learnt.previous + (not last) * self._learnt.next
        working = max(held + backward + learnt, largest(*self._stepping))
        return self.kept(first_layer, end_layer) + working + (self._covariance if last else 0)

    def kept(self, first_layer: int, end_layer: int) -> int:
        """All the time: weights, their gradients, optimizer state; T_fixed and U; what codecs remember."""
        begin, end = first_layer + (first_layer > 0), end_layer + 1 + (end_layer == self.layers)  # embed, …, head
        remembered = (first_layer > 0) * self._towards_previous + (end_layer < self.layers) * self._towards_next
        return self._units_before[end] - self._units_before[begin] + self._shared + remembered

    def saved(self, first_layer: int, end_layer: int) -> int:
        """Its part of a snapshot: weights, optimizer state, U, what codecs remember, and is gathered for the next U."""
        begin, end = first_layer + (first_layer > 0), end_layer + 1 + (end_layer == self.layers)
        remembered = (first_layer > 0) * self._towards_previous + (end_layer < self.layers) * self._towards_next
        gathered = self._covariance // 4 if end_layer == self.layers else 0
        return self._saved_before[end] - self._saved_before[begin] + self._basis + remembered + gathered

    def in_flight(self, first_layer: int, end_layer: int, stages_after: int) -> int:
        """What autograd saves of the microbatches that wait for their backward, and the messages of each."""
        # A step has no more microbatches than this, and none of the next starts before all of them are done.
        held = min(in_flight_limit(self.spec, stages_after), self.spec.batch.microbatches)
        return held * (self._layer_saved * (end_layer - first_layer) + self._ends_saved)


def _saved(spec: RunSpec) -> int:
    """Numbers a token and layer that autograd saves in model/llama.py, with fused attention."""
    b, m = _Block.of(spec), spec.model
    assert m.kv_heads is not None
    norms = 2 * (3 * m.width + 1)  # of each: input, scaled input, output, and one root
    attention = 5 * b.inner + m.heads  # q, k, v (repeated to all heads), the result, its rows for W_o; row sums
    normed = 2 * (b.inner + b.kv) + m.heads + m.kv_heads if m.qk_norm else 0
    return norms + attention + normed + 4 * b.hidden  # gate, silu of it, up, their product
