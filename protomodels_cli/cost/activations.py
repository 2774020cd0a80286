"""Bytes that a microbatch takes on a stage: what autograd saves of each layer, and what passing work makes.

Follows model/llama.py, model/operators.py and model/loss.py line by line; a test holds it against torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from protomodels_cli.cost.units import Block, lift_numbers, number_bytes
from protomodels_cli.forms import Dense, Form, Sizes
from protomodels_cli.spec.schema import ComputeSpec, RunSpec

TOUCHING = 27  # bytes a token of the vocabulary, of model/anchor.py's passing lists: places and sums, and masks
Recompute = Literal["none", "block", "stage"]


@dataclass(frozen=True)
class Computation:
    """How a peer computes, as model/arithmetic.py chooses it for a device."""

    dtype: Literal["bf16", "float32", "float64"]  # of products
    compiled: bool
    gpu: bool


def computations(compute: ComputeSpec) -> list[Computation]:
    """What peers may take, while nobody has said what they have. bf16 counts as a GPU's."""
    float32, float64 = Computation("float32", False, False), Computation("float64", False, False)
    bf16 = Computation("bf16", False, True)
    here = {
        "auto": [float32, bf16],
        "bf16": [bf16],
        "tf32": [replace(float32, gpu=True)],
        "float32": [float32, replace(float32, gpu=True)],
        "float64": [float64, replace(float64, gpu=True)],
    }[compute.dtype]
    when = {"auto": (False, True), "always": (True, True), "never": (False, False)}[compute.compile]
    return [replace(one, compiled=when[one.gpu]) for one in here]


class Activations:
    """Bytes of one microbatch of a run's size, computed in one way."""

    def __init__(self, spec: RunSpec, computation: Computation):
        m, b, sizes = spec.model, Block.of(spec), Sizes.of(spec)
        stored, product = number_bytes(spec), {"bf16": 2, "float32": 4, "float64": 8}[computation.dtype]
        self.product = product
        tokens = spec.batch.size // spec.batch.microbatches * m.context
        first_free = m.layers - spec.form.free_layers(sizes)
        tied, free = (tokens * _saved(spec, form, computation, stored, product) for form in (spec.form, Dense))
        self.layers = [tied if i < first_free else free for i in range(m.layers)]  # saved by autograd
        widths = (spec.form.state_width(sizes), m.width)
        self.states = [tokens * widths[i >= first_free] * stored for i in range(m.layers)]  # a block's input
        # What each layer reads that is not free: one anchor for all of a segment.
        self.segments = [i for i, n in enumerate(spec.layers_per_segment) for _ in range(n * spec.has_segments)]
        self.segments = (self.segments or [0] * m.layers)[:first_free]
        trained = spec.subspace.anchor != "fixed"
        self.anchor = tokens * m.width * product if spec.form.has_basis or trained else 0  # its rows
        self.unmixed = tokens * m.width * product if spec.anchor_tokens > 1 else 0  # the same before its taps
        message = tokens * spec.boundary_width * stored
        self.out = message + tokens * 16  # what was sent; token ids and targets
        self.came = message  # what the stage got
        # It is the first block's input, which is kept anyway: a compiled norm keeps it as it is.
        self.came_is_input = spec.boundary_width == m.width and not trained and computation.compiled
        self.stream = tokens * m.width * stored  # after the model's last block, for the head
        # A block's backward: gradients of what lies between its products, of the stream and of a trained anchor, which
        # adds up those of its rows by lists of the vocabulary's length.
        wide = max((4 - computation.compiled) * b.hidden, 4 * (b.inner + b.kv))
        self.passing = tokens * (wide * product + 3 * max(widths) * stored) + message + self.anchor
        self.passing += trained * (self.anchor + TOUCHING * spec.vocab_size)
        self.passing += 3 * self.unmixed  # gradients of the rows, and of what they were multiplied with
        if lift_numbers(spec):  # the table's own rows, and their gradients
            self.passing += 2 * tokens * spec.anchor_width * stored
        # A chunk's logits and their gradient, and the gradient of the chunk before; eager operators also make
        # log-probabilities, probabilities, the targets' mask twice and the difference.
        logits = min(spec.compute.loss_chunk, tokens) * spec.vocab_size
        chunk = logits * (3 * product if computation.compiled else 2 * product + 4 * stored + 2)
        # The head's norm, the stream's gradient. Of a segment's own head: its norm, three gradients of what it reads.
        self.loss = chunk + tokens * m.width * (2 * product + 3 * stored) + message
        self.early = chunk + tokens * spec.boundary_width * (2 * product + 3 * stored) + 3 * message + 32 * tokens
        self.evaluation = logits * (product + 2 * stored) + self.passing


def _saved(spec: RunSpec, form: type[Form], computation: Computation, stored: int, product: int) -> int:
    """Bytes a token that autograd saves of a layer."""
    b, m = Block.of(spec), spec.model
    assert m.kv_heads is not None

    def norm(width: int, roots: int, remade: bool) -> int:
        """Its input, one root, and, unless compiled, the scaled input. An input that is there in the products' type
        alone (`remade`) is saved as that, unless an eager operator had to convert it."""
        saved = width * (product if remade and computation.compiled else stored) + roots * stored
        return saved if computation.compiled else saved + width * stored

    block_norms = 2 * (norm(m.width, 1, form.remakes_stream) + m.width * product)  # with what the matrices read
    heads = norm(b.inner, m.heads, True) + norm(b.kv, m.kv_heads, True) if m.qk_norm else 0
    repeated = computation.gpu and computation.dtype == "float32"  # keys and values, for each head
    keys = b.inner if repeated else b.kv
    copies = 1 if computation.gpu else 2  # the CPU's attention gives its result in another order than W_o reads it
    attention = ((1 + copies) * b.inner + 2 * keys) * product + m.heads * stored  # q, result; k, v; row sums
    mlp = (4 - computation.compiled) * b.hidden * product  # gate, silu of it, up, product
    return block_norms + heads + attention + mlp
