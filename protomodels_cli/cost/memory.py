"""Bytes of any stage that a run can be cut into: what is resident, what is in flight, and working memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from protomodels_cli.cost.activations import Activations, Computation, Recompute, computations
from protomodels_cli.cost.traffic import in_flight_of_codecs, remembered_by_codecs, staged_by_codecs
from protomodels_cli.cost.units import (
    Block,
    keeps_first_of_rows,
    lift_numbers,
    moment_bytes,
    number_bytes,
    t_fixed_bytes,
    unit_gradient_bytes,
    unit_multiplied,
    unit_parameters,
    unit_state_bytes,
)
from protomodels_cli.forms import Dense, Form, Role, Sizes
from protomodels_cli.spec.cut import anchored_layers, heading_layers
from protomodels_cli.spec.optimizer import STEP_NUMBERS
from protomodels_cli.spec.schema import RunSpec

MUON = 6  # numbers for one that Muon moves: what its iteration has at one time
ROUNDING = 3  # numbers for one that is rounded at random: 16 random bits and what they come from, masks and copies
MOST_WAITING = 1 << 30  # bytes of messages that may wait at a stage for their gradients, where nobody says how many


def in_flight_limit(spec: RunSpec, stages_after: int) -> int:
    """Microbatches that a stage with this many stages behind it may hold between their forward and their backward, at
    most: the window of its link to the next stage. What the peer's memory allows may be less (cost/recompute.py)."""
    if stages_after == 0:
        return 1  # the last stage goes straight from forward to backward
    if spec.batch.in_flight is not None:
        return spec.batch.in_flight
    a = Activations(spec, computations(spec.compute)[0])
    messages = a.came + a.out + in_flight_of_codecs(spec)
    return min(spec.batch.microbatches, max(least_in_flight(spec, stages_after), MOST_WAITING // messages))


def least_in_flight(spec: RunSpec, stages_after: int) -> int:
    """Microbatches in flight that a stage must have the memory for: with fewer, stages would wait for each other even
    if links took no time."""
    most = spec.batch.microbatches if spec.batch.in_flight is None else spec.batch.in_flight
    return min(most, spec.batch.microbatches, 2 * (stages_after + 1)) if stages_after else 1


def recomputations(spec: RunSpec) -> list[Recompute]:
    """What the spec lets a peer choose from, the fastest first."""
    return ["none", "stage", "block"] if spec.compute.recompute == "auto" else [spec.compute.recompute]


class Forecast(NamedTuple):
    """Bytes that a stage takes on its device with one way of recomputing, by how many microbatches are in flight."""

    each: int  # of a microbatch in flight
    training: int  # of all the rest while the stage computes
    least: int  # while the optimizer steps, or in an evaluation: nothing is in flight then

    def bytes(self, held: int) -> int:
        return max(self.least, self.training + held * self.each)


class StageMemory:
    """Bytes of any stage a run can be cut into; made once where many stages are weighed.

    What is resident is exact, what is in flight nearly so (what autograd saves), what passing work takes is a bound.
    More layers, or more stages behind it, never make a stage smaller.
    """

    def __init__(self, spec: RunSpec, windows: int | None = None):
        """`windows`: how many samples the data has, where that is known."""
        self.spec, self.layers = spec, spec.model.layers
        self._remembered, self._staged = remembered_by_codecs(spec, windows), staged_by_codecs(spec)
        m, number = spec.model, number_bytes(spec)
        assert m.head_dim is not None
        parameters, multiplied = unit_parameters(spec), unit_multiplied(spec)
        state = unit_state_bytes(spec)
        self._gradients_before = [0, *accumulate(unit_gradient_bytes(spec).values())]
        self._saved_before = [0, *accumulate(parameters[u] * number + state[u] for u in parameters)]
        self._multiplied_before = [0, *accumulate(multiplied.values())]
        self._basis = m.width * spec.subspace.k * number if spec.form.has_basis else 0
        self._shared = t_fixed_bytes(spec) + self._basis + m.context * m.head_dim * number  # the last: rotary tables
        self._codecs_in_flight = in_flight_of_codecs(spec)
        self._stepping, self._anchored, self._heading = _stepping(spec), anchored_layers(spec), heading_layers(spec)
        b, columns = Block.of(spec), max(m.width, spec.form.state_width(Sizes.of(spec)))
        # A layer's matrix, the head's and an early head's.
        self._largest = columns * max(b.inner, b.hidden), *(spec.vocab_size * w for w in (m.width, spec.boundary_width))
        self._covariance = 4 * 8 * m.width**2 if spec.form.has_basis else 0  # of the stream's gradients, in float64
        self._computations = computations(spec.compute)
        self._activations: dict[Computation, Activations] = {}
        # A thousand peers ask for the same few, and most stages of all cuts differ in how much is in flight alone.
        self._forecasts: dict[tuple[int, int, Computation | None], list[list[Forecast]]] = {}

    def total(self, first_layer: int, end_layer: int, stages_after: int, computation: Computation | None = None) -> int:
        """At most, on its device, with the least that recomputation can reach. `computation`: how the peer computes;
        None: of all that are possible, the one that takes most. `on_host` comes on top, of the same memory where the
        device is the host."""
        held, possible = least_in_flight(self.spec, stages_after), self._possible(first_layer, end_layer, computation)
        return max(min(way.bytes(held) for way in ways) for ways in possible)

    def totals(
        self, stages: Sequence[range], stages_after: Sequence[int], computation: Computation | None = None
    ) -> np.ndarray:
        """The same for many: a row for each number of stages behind, a column for each stage (its layers)."""
        held = np.array([least_in_flight(self.spec, n) for n in stages_after], np.int64).reshape(-1, 1, 1, 1)
        possible = [self._possible(stage.start, stage.stop, computation) for stage in stages]
        each, training, least = np.moveaxis(np.array(possible, np.int64), -1, 0)
        return np.maximum(least, training + held * each).min(axis=3).max(axis=2)

    def _possible(self, first_layer: int, end_layer: int, computation: Computation | None) -> list[list[Forecast]]:
        """For each computation that is possible, a forecast for each way of recomputing."""
        if (asked := (first_layer, end_layer, computation)) not in self._forecasts:
            among, ways = self._computations if computation is None else [computation], recomputations(self.spec)
            self._forecasts[asked] = [[self.forecast(first_layer, end_layer, w, one) for w in ways] for one in among]
        return self._forecasts[asked]

    def with_recompute(
        self, first_layer: int, end_layer: int, recompute: Recompute, held: int, computation: Computation | None = None
    ) -> int:
        """The same with one way of recomputing and this many microbatches in flight."""
        among = self._computations if computation is None else [computation]
        return max(self.forecast(first_layer, end_layer, recompute, one).bytes(held) for one in among)

    def forecast(self, first_layer: int, end_layer: int, recompute: Recompute, computation: Computation) -> Forecast:
        a, first, last = self._of(computation), first_layer == 0, end_layer == self.layers
        # What codecs learn in a step lies beside what they knew until it is applied.
        training = self._working(first_layer, end_layer, recompute, computation) + self._staged.device.at(first, last)
        # Nothing is in flight while the optimizer steps, nor in an evaluation, which has no gradients either.
        gradients = self._units(self._gradients_before, first_layer, end_layer)
        own = range(first_layer, end_layer)
        holds = (True, first, last, not self._anchored.isdisjoint(own), not self._heading.isdisjoint(own))
        stepping = max(bytes_ for bytes_, there in zip(self._stepping, holds, strict=True) if there)
        always = self.resident(first_layer, end_layer, computation) + (self._covariance if last else 0)
        each = self._each_in_flight(first_layer, end_layer, recompute, computation)
        return Forecast(each, always + training, always + max(stepping, a.evaluation * last - gradients))

    def on_host(self, first_layer: int, end_layer: int) -> int:
        """What codecs keep in the machine's own memory, whatever the stage's device."""
        first, last = first_layer == 0, end_layer == self.layers
        return self._remembered.host.at(first, last) + self._staged.host.at(first, last)

    def resident(self, first_layer: int, end_layer: int, computation: Computation) -> int:
        """On its device all the time: weights, copies of matrices in the products' type, gradients, optimizer state;
        T_fixed, U, rotary tables; what codecs remember."""
        units = self._units(self._saved_before, first_layer, end_layer)
        units += self._units(self._gradients_before, first_layer, end_layer)
        product, number = self._of(computation).product, number_bytes(self.spec)
        if product < number:
            units += product * self._units(self._multiplied_before, first_layer, end_layer)
            units += self._basis * product // number
        lifts = len(self._anchored.intersection(range(first_layer, end_layer))) * lift_numbers(self.spec) * number
        return units + lifts + self._shared + self._remembered.device.at(first_layer == 0, end_layer == self.layers)

    def saved(self, first_layer: int, end_layer: int) -> int:
        """Its part of a snapshot: weights, optimizer state, U, what codecs remember, and is gathered for the next U."""
        first, last = first_layer == 0, end_layer == self.layers
        remembered = sum(sides.at(first, last) for sides in self._remembered)
        gathered = self._covariance // 4 if last else 0
        return self._units(self._saved_before, first_layer, end_layer) + self._basis + remembered + gathered

    def for_microbatches(self, first_layer: int, end_layer: int, stages_after: int) -> int:
        """What of the total is for microbatches: in flight, and while one of them is worked on."""
        ways, held = recomputations(self.spec), least_in_flight(self.spec, stages_after)
        span = first_layer, end_layer
        return max(
            min(self.in_flight(*span, way, held, one) + self._working(*span, way, one) for way in ways)
            for one in self._computations
        )

    def _working(self, first_layer: int, end_layer: int, recompute: Recompute, computation: Computation) -> int:
        """While a microbatch is worked on, at most."""
        a, last = self._of(computation), end_layer == self.layers
        layers = a.layers[first_layer:end_layer]
        whole = sum(layers) + self._besides_layers(a, range(first_layer, end_layer))
        again = {"none": 0, "block": max(layers), "stage": 0 if last else whole}[recompute]
        backward = again + a.passing
        early = not self._heading.isdisjoint(range(first_layer, end_layer))
        if a.product < number_bytes(self.spec) and not computation.gpu:  # the CPU adds a matrix's gradient by a copy
            there = (True, last, early)
            backward += a.product * max(n for n, is_there in zip(self._largest, there, strict=True) if is_there)
        before = again if recompute == "stage" else 0  # the first gradient
        return max(backward, a.loss * last, (before + a.early) * early)

    def _of(self, computation: Computation) -> Activations:
        if computation not in self._activations:
            self._activations[computation] = Activations(self.spec, computation)
        return self._activations[computation]

    def _units(self, before: list[int], first_layer: int, end_layer: int) -> int:
        """Of the stage's units, from that of all units `before` each: the embedding, the layers, the head."""
        return before[end_layer + 1 + (end_layer == self.layers)] - before[first_layer + (first_layer > 0)]

    def in_flight(
        self, first_layer: int, end_layer: int, recompute: Recompute, held: int, computation: Computation
    ) -> int:
        """What is kept of this many microbatches that wait for their backward, and their messages."""
        return held * self._each_in_flight(first_layer, end_layer, recompute, computation)

    def _each_in_flight(self, first_layer: int, end_layer: int, recompute: Recompute, computation: Computation) -> int:
        a, span = self._of(computation), slice(first_layer, end_layer)
        each = a.out + 2 * self._codecs_in_flight  # towards both neighbours
        each += a.stream if end_layer == self.layers else 0
        if recompute == "block":
            kept = sum(a.states[span]) + a.anchor * len(set(a.segments[span]))
        else:
            kept = sum(a.layers[span]) if recompute == "none" or end_layer == self.layers else 0
        if kept:
            kept += self._besides_layers(a, range(first_layer, end_layer))
        if first_layer and not (kept and a.came_is_input):
            each += a.came
        return each + kept

    def _besides_layers(self, a: Activations, layers: range) -> int:
        """What autograd saves between them: of anchors, and of what segments within would have sent."""
        anchors, ends = self._anchored.intersection(layers), self._heading.intersection(layers[:-1])
        return a.unmixed * len(anchors) + a.came * len(ends)


_newest: tuple[RunSpec, StageMemory] | None = None


def stage_memory(spec: RunSpec) -> StageMemory:
    """One and the same for a spec that is asked for again, as a coordinator does with every change of holders: what it
    has found out is not computed again. A spec does not change."""
    global _newest
    if _newest is None or _newest[0] is not spec:
        _newest = spec, StageMemory(spec)
    return _newest[1]


def _stepping(spec: RunSpec) -> tuple[int, ...]:
    """Bytes that the optimizer makes of passing tensors: for a layer's matrix, the embedding, the head, an anchor and
    an early head. It takes one parameter at a time, and of that some rows (Muon: all); AdamW's fused step makes none.
    Left out: small matrices that Muon moves together on a GPU, at most TOGETHER_NUMBERS."""
    b, sizes, number = Block.of(spec), Sizes.of(spec), number_bytes(spec)

    def one(form: type[Form], role: Role, rows: int, stored: int) -> int:
        columns, lifted = form.optimizer_columns(sizes, stored), form.lifted_columns(sizes)
        rule, rounding = form.chosen_rule(spec.optimizer, role), ROUNDING * (moment_bytes(spec, role) < number)
        if rule == "muon":
            return number * rows * ((MUON + rounding) * columns + lifted)
        if rule == "adamw" and not rounding and not lifted:
            return 0
        if rule == "row_adamw" and not keeps_first_of_rows(spec, role):
            rounding = 0
        own = role == "anchor"  # the gradient of the rows that are stepped
        return number * min(rows, max(1, STEP_NUMBERS // stored)) * ((4 + rounding + own) * columns + lifted)

    wide, width, vocab = max(b.inner, b.hidden), spec.model.width, spec.vocab_size
    return (
        max(one(Dense, "matrix", wide, width), one(spec.form, "writer", wide, spec.form.state_width(sizes))),
        one(spec.form, "embedding", vocab, spec.form.embedding_width(sizes)),
        one(Dense, "head", vocab, width),
        one(Dense, "anchor", vocab, spec.anchor_width),
        one(Dense, "head", vocab, spec.boundary_width),
    )
