"""Bytes of any stage that a run can be cut into: what is resident, what is in flight, and working memory."""

from __future__ import annotations

from itertools import accumulate

from protomodels_cli.cost.traffic import in_flight_of_codecs, remembered_by_codecs, staged_by_codecs
from protomodels_cli.cost.units import Block, number_bytes, t_fixed_bytes, unit_parameters, unit_state_bytes
from protomodels_cli.forms import Sizes
from protomodels_cli.spec.schema import RunSpec


def in_flight_limit(spec: RunSpec, stages_after: int) -> int:
    """Microbatches that a stage with this many stages behind it may hold between their forward and their backward."""
    if stages_after == 0:
        return 1  # the last stage goes straight from forward to backward
    return 2 * (stages_after + 1) if spec.batch.in_flight is None else spec.batch.in_flight


class StageMemory:
    """Bytes of any stage a run can be cut into; made once where many stages are weighed.

    What is resident is exact, what is in flight nearly so (what autograd saves), what passing work takes is a bound.
    More layers, or more stages behind it, never make a stage smaller.
    """

    def __init__(self, spec: RunSpec, windows: int | None = None):
        """`windows`: how many samples the data has, where that is known."""
        self.spec, self.layers = spec, spec.model.layers
        self._remembered, self._staged = remembered_by_codecs(spec, windows), staged_by_codecs(spec)
        b, m, form, sizes = Block.of(spec), spec.model, spec.form, Sizes.of(spec)
        assert m.head_dim is not None
        number = number_bytes(spec)
        tokens = spec.batch.size // spec.batch.microbatches * m.context  # of a microbatch

        parameters, state = unit_parameters(spec), unit_state_bytes(spec)
        self._units_before = [0, *accumulate(2 * parameters[u] * number + state[u] for u in parameters)]
        self._saved_before = [0, *accumulate(parameters[u] * number + state[u] for u in parameters)]
        self._basis = m.width * spec.subspace.k * number if form.has_basis else 0
        self._shared = t_fixed_bytes(spec) + self._basis

        self._layer_saved = tokens * _saved(spec) * number
        # Once a stage: message in, its gradient, message out, the stream, rotary angles; token ids and targets.
        self._ends_saved = tokens * ((3 * spec.boundary_width + m.width + m.head_dim) * number + 16)
        self._ends_saved += 2 * in_flight_of_codecs(spec)  # towards both neighbours

        # The optimizer takes one parameter at a time and makes up to six tensors of its size as it sees it; then the
        # update may be multiplied out.
        matrix, head = m.width * max(b.inner, b.hidden), spec.vocab_size * m.width
        embed = spec.vocab_size * form.state_width(sizes)
        embed_step = spec.vocab_size * (6 * form.optimizer_columns(sizes) + form.lifted_columns(sizes))
        self._stepping = (6 * matrix * number, embed_step * number, 6 * head * number)
        # A backward pass makes a layer's gradients, and a parameter's before it is added to those of earlier ones.
        self._gradient = (matrix * number, embed * number, head * number)
        # Log-probabilities of a chunk of the loss, their gradient, and that of the logits.
        self._logits = 3 * min(spec.compute.loss_chunk, tokens) * spec.vocab_size * number
        self._covariance = 4 * 8 * m.width**2 if form.has_basis else 0  # of the stream's gradients, in float64

    def total(self, first_layer: int, end_layer: int, stages_after: int) -> int:
        """At most, on its device. `on_host` comes on top, of the same memory where the device is the host."""
        first, last = first_layer == 0, end_layer == self.layers

        def largest(matrix: int, embed: int, head: int) -> int:
            return max(matrix, embed if first else 0, head if last else 0)

        held = self.in_flight(first_layer, end_layer, stages_after)
        backward = self._layer_saved + largest(*self._gradient) + (self._logits if last else 0)
        # No microbatch is in flight while the optimizer steps: the two never need their memory at one time.
        # What codecs learn in a step lies beside what they knew until it is applied.
        learnt = self._staged.device.at(first, last)
        working = max(held + backward + learnt, largest(*self._stepping))
        return self.resident(first_layer, end_layer) + working + (self._covariance if last else 0)

    def on_host(self, first_layer: int, end_layer: int) -> int:
        """What codecs keep in the machine's own memory, whatever the stage's device."""
        first, last = first_layer == 0, end_layer == self.layers
        return self._remembered.host.at(first, last) + self._staged.host.at(first, last)

    def resident(self, first_layer: int, end_layer: int) -> int:
        """On its device all the time: weights, gradients, optimizer state; T_fixed and U; what codecs remember."""
        remembered = self._remembered.device.at(first_layer == 0, end_layer == self.layers)
        return self._units(self._units_before, first_layer, end_layer) + self._shared + remembered

    def saved(self, first_layer: int, end_layer: int) -> int:
        """Its part of a snapshot: weights, optimizer state, U, what codecs remember, and is gathered for the next U."""
        first, last = first_layer == 0, end_layer == self.layers
        remembered = sum(sides.at(first, last) for sides in self._remembered)
        gathered = self._covariance // 4 if last else 0
        return self._units(self._saved_before, first_layer, end_layer) + self._basis + remembered + gathered

    def _units(self, before: list[int], first_layer: int, end_layer: int) -> int:
        """Bytes of the stage's units, from those of all units `before` each: the embedding, the layers, the head."""
        return before[end_layer + 1 + (end_layer == self.layers)] - before[first_layer + (first_layer > 0)]

    def in_flight(self, first_layer: int, end_layer: int, stages_after: int) -> int:
        """What autograd saves of the microbatches that wait for their backward, and the messages of each."""
        # A step has no more microbatches than this, and none of the next starts before all of them are done.
        held = min(in_flight_limit(self.spec, stages_after), self.spec.batch.microbatches)
        return held * (self._layer_saved * (end_layer - first_layer) + self._ends_saved)


def _saved(spec: RunSpec) -> int:
    """Numbers a token and layer that autograd saves in model/llama.py, with fused attention."""
    b, m = Block.of(spec), spec.model
    assert m.kv_heads is not None
    norms = 2 * (3 * m.width + 1)  # of each: input, scaled input, output, and one root
    attention = 5 * b.inner + m.heads  # q, k, v (repeated to all heads), the result, its rows for W_o; row sums
    normed = 2 * (b.inner + b.kv) + m.heads + m.kv_heads if m.qk_norm else 0
    return norms + attention + normed + 4 * b.hidden  # gate, silu of it, up, their product
