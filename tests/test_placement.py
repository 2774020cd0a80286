"""Who holds what, against every possible placement."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise, permutations
from typing import NamedTuple

import pytest
from conftest import make_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from protomodels_cli.coordinator import placement
from protomodels_cli.coordinator.filling import fill
from protomodels_cli.coordinator.placement import Offer, Placement, place
from protomodels_cli.cost.activations import Computation, computations
from protomodels_cli.cost.memory import StageMemory, least_in_flight, recomputations
from protomodels_cli.cost.traffic import boundary_bytes
from protomodels_cli.cost.units import unit_flops
from protomodels_cli.facts import Fact
from protomodels_cli.spec.cut import layers_per_stage
from protomodels_cli.spec.schema import RunSpec

# Placement, against all placements there are.

WAYS = [(form, "fixed") for form in ("reparam", "constrained", "dense", "two_stream")]
WAYS += [("two_stream", "segment"), ("reparam", "segment")]


def cuts(spec: RunSpec, peers: int) -> list[list[int]]:
    if spec.stages != "auto":
        return [layers_per_stage(spec)]
    layers = spec.model.layers
    least = 0 if spec.subspace.form == "dense" else spec.subspace.unconstrained_layers
    found = []
    for stages in range(1, peers + 1):
        for inner in combinations(range(1, layers), stages - 1):
            ends = [0, *inner, layers]
            if layers - ends[-2] >= least and (not spec.has_segments or set(ends) <= set(segment_ends(spec))):
                found.append([b - a for a, b in pairwise(ends)])
    return found


def segment_ends(spec: RunSpec) -> list[int]:
    return [0, *accumulate(spec.model.segments)]


class Measured(NamedTuple):
    memory: int
    on_host: int
    work: float
    sent: float  # bits a step

    def fits(self, offer: Offer) -> bool:
        if offer.host_memory is None:
            return self.memory + self.on_host <= offer.memory
        return self.memory <= offer.memory and self.on_host <= offer.host_memory


def measures(spec: RunSpec, layers: tuple[int, ...] | list[int]) -> list[Measured]:
    """Of each stage of a cut."""
    units, memory, found, start = unit_flops(spec), StageMemory(spec), [], 0
    for i, n in enumerate(layers):
        work = sum(units[f"layers.{j}"] for j in range(start, start + n))
        work += units["embed"] if i == 0 else 0
        work += units["head"] if i == len(layers) - 1 else 0
        total, on_host = memory.total(start, start + n, len(layers) - 1 - i), memory.on_host(start, start + n)
        tokens, sizes = spec.batch.size * spec.model.context, boundary_bytes(spec)
        sent = sizes["forward"] * (i < len(layers) - 1) + sizes["backward"] * (i > 0)
        found.append(Measured(total, on_host, work, 8 * tokens * sent))
        start += n
    return found


def merit(stages: list[Measured], offers: list[Offer], holders: Sequence[int]) -> tuple | None:
    """What is better is smaller: the slowest stage, the number of stages, the last to join, the one before, …"""
    seats = list(zip(stages, (offers[i] for i in holders), strict=True))
    if not all(stage.fits(offer) for stage, offer in seats):
        return None
    slowest = max(max(stage.work / offer.flops, stage.sent / offer.upload) for stage, offer in seats)
    return slowest, len(stages), sorted(holders, reverse=True)


def best_of_all(spec: RunSpec, offers: list[Offer]) -> tuple | None:
    found = None
    for layers in cuts(spec, len(offers)):
        stages = measures(spec, layers)
        for holders in permutations(range(len(offers)), len(stages)):
            value = merit(stages, offers, holders)
            if value is not None and (found is None or value < found):
                found = value
    return found


@st.composite
def runs(draw: st.DrawFn, auto: bool) -> tuple[RunSpec, list[Offer]]:
    """Small runs on peers whose memory is just enough, or one byte too little, for some stage of the run."""
    layers, (form, anchor) = draw(st.sampled_from([4, 5, 6, 1, 2, 3])), draw(st.sampled_from(WAYS))
    free, microbatches = draw(st.integers(0, min(3, layers))), draw(st.sampled_from([8, 3, 1]))
    size = draw(st.sampled_from([n for n in (2, 1, 3) if layers % n == 0])) if auto else 1
    if anchor == "segment":
        free = min(free, size)
    number = draw(st.sampled_from([4, 5, 3, 2, 1]))
    stages: list[int] = []
    if not auto:
        wanted = min(layers, number + draw(st.sampled_from([0, -1, -2, 1])))
        ends = draw(st.permutations(range(1, layers)))[: max(0, wanted - 1)]
        stages = [b - a for a, b in pairwise([0, *sorted(ends), layers])]
        free = min(free, stages[-1])
    spec = make_spec(
        stages="auto" if auto else stages,
        min_peers=1,
        model={
            "layers": layers,
            "width": 16,
            "heads": 2,
            "hidden": 32,
            "context": draw(st.sampled_from([32, 4])),
            "segments": layers // size,
        },
        subspace={
            "form": form,
            "k": 4,
            "anchor": anchor,
            "unconstrained_layers": None if form == "two_stream" else free,
        },
        batch={"size": microbatches, "microbatches": microbatches, "in_flight": draw(st.sampled_from([None, None, 2]))},
        wire={"forward": draw(st.sampled_from(["fp32", "int8+aqsgd"]))},  # the second keeps its memory on the host
    )
    memory = StageMemory(spec)
    if auto:
        longest = draw(st.integers(1, layers))
        whole = range(0, layers + 1, size if spec.has_segments else 1)
        parts = [(a, b) for a, b in combinations(whole, 2) if b - a <= max(longest, size)]
        needs = sorted({memory.total(a, b, n) for a, b in parts for n in range(number) if (n > 0) == (b < layers)})
    else:
        needs = [stage.memory for stage in measures(spec, stages)]
    speed = st.sampled_from([1e9, 2e9, 3e9]) if draw(st.booleans()) else st.floats(1e8, 1e10)
    caps = st.sampled_from([math.inf, math.inf, 1e6, 2e6])  # about as long as computing
    offers = []
    for i in range(number):
        enough = draw(st.sampled_from(needs)) - draw(st.sampled_from([0, 0, 0, 1]))
        on_host = memory.on_host(*draw(st.sampled_from([(0, 1), (0, layers)])))  # of an end, or of the whole model
        on_host = draw(st.sampled_from([None, None, on_host - 1, on_host, 2 * on_host]))
        room = draw(st.sampled_from([enough, enough, enough + memory.on_host(0, 1), 1 << 40]))
        offers.append(Offer(f"peer{i}", room, draw(speed), on_host, upload=draw(caps)))
    return spec, offers


def check_against_all(spec: RunSpec, offers: list[Offer]) -> None:
    found, right = place(spec, offers), best_of_all(spec, offers)
    assert place(spec, list(offers)) == found
    if right is None:
        assert isinstance(found, Fact)
        return
    assert isinstance(found, Placement), found
    assert list(found.layers) in cuts(spec, len(offers))
    assert len(set(found.holders)) == len(found.holders) == len(found.layers)
    by_name = {offer.peer: i for i, offer in enumerate(offers)}
    stages, holders = measures(spec, found.layers), [by_name[p] for p in found.holders]
    assert merit(stages, offers, holders) == right
    for a, b in combinations(range(len(stages)), 2):
        if spec.stages != "auto" and holders[a] > holders[b]:
            swapped = list(holders)
            swapped[a], swapped[b] = holders[b], holders[a]
            assert merit(stages, offers, swapped) != right, "who joined first could have had the earlier stage"
    assert set(found.holders) <= set(by_name)


@settings(max_examples=200)
@given(runs(auto=False))
def test_a_fixed_cut_gets_the_best_holders_there_are(run):
    check_against_all(*run)


@settings(max_examples=200)
@given(runs(auto=True))
def test_the_chosen_cut_and_its_holders_are_the_best_there_are(run):
    check_against_all(*run)


# By hand.


def peers(*flops: float, memory: int = 1 << 40) -> list[Offer]:
    return [Offer(f"p{i}", memory, f) for i, f in enumerate(flops)]


def test_a_capped_line_holds_an_end_which_sends_over_one_boundary_only():
    spec = make_spec(stages=[2, 2, 2], model={"layers": 6})
    free = peers(1e9, 1e9, 1e9)
    capped = [replace(offer, upload=1e5) if offer.peer == "p1" else offer for offer in free]
    assert place(spec, free).holders == ("p0", "p1", "p2")
    assert place(spec, capped).holders[1] != "p1"


@pytest.mark.parametrize(
    ("stages", "flops", "layers", "holders"),
    [
        ([1] * 8, [1e9] * 9, (1,) * 8, "p0 p1 p2 p3 p4 p5 p6 p7"),  # equal peers: in the order they joined
        ([3, 5], [1e9, 2e9], (3, 5), "p0 p1"),
        ([5, 3], [1e9, 2e9], (5, 3), "p1 p0"),
        ([2, 6], [1e9, 2e9, 2e9], (2, 6), "p0 p1"),  # p2 could halve the shorter stage, and nothing would come of it
        ([3, 5], [1e9, 2e9, 2e9], (3, 5), "p1 p2"),
        ("auto", [1e9] * 4, (2, 2, 2, 2), "p0 p1 p2 p3"),
        ("auto", [1e9] * 3, (3, 3, 2), "p0 p1 p2"),
        ("auto", [1e9] * 7, (2, 2, 2, 1, 1), "p0 p1 p2 p3 p4"),  # until there are eight, no more of them help
        ("auto", [1e9, 3e9], (2, 6), "p0 p1"),
        ("auto", [3e9, 1e9], (2, 6), "p1 p0"),  # the head, light as it is, to the faster one
        ("auto", [1e9, 9e9], (8,), "p1"),  # a slow peer would only hold the fast one up
    ],
)
def test_placements_that_one_can_check_by_eye(stages, flops, layers, holders):
    spec = make_spec(
        stages=stages, min_peers=1, model={"layers": 8}, subspace={"form": "dense"}, batch={"in_flight": 1}
    )
    spec = spec.model_copy(update={"tokenizer": spec.tokenizer.model_copy(update={"vocab_size": 1})})  # a light head
    assert place(spec, peers(*flops)) == Placement(layers, tuple(holders.split()))


@pytest.mark.parametrize(
    ("segments", "flops", "layers"),
    [
        (4, [1e9] * 4, (2, 2, 2, 2)),
        (4, [1e9] * 3, (4, 2, 2)),
        (4, [1e9] * 7, (2, 2, 2, 2)),  # there is nothing more to share
        (2, [1e9, 1.5e9], (4, 4)),
        (2, [1e9, 3e9], (8,)),
        (8, [1e9, 3e9], (2, 6)),
        (1, [1e9, 3e9], (8,)),
    ],
)
def test_a_cut_that_is_chosen_is_of_whole_segments(segments, flops, layers):
    spec = make_spec(
        stages="auto",
        min_peers=1,
        model={"layers": 8, "segments": segments},
        subspace={"form": "dense", "anchor": "segment"},
        batch={"in_flight": 1},
    )
    spec = spec.model_copy(update={"tokenizer": spec.tokenizer.model_copy(update={"vocab_size": 1})})
    assert place(spec, peers(*flops)).layers == layers


def test_layers_that_could_go_anywhere_go_to_the_least_busy():
    spec = make_spec(stages="auto", model={"layers": 7}, subspace={"form": "dense"}, tokenizer={"kind": "bytes"})
    units = unit_flops(spec)
    assert units["head"] < units["layers.0"]
    assert place(spec, peers(1e9, 1e9, 1e9)).layers == (3, 2, 2), "and not 3, 3 and 1, which is no slower"


def test_the_earlier_stages_hold_more_microbatches_and_that_decides_who_fits():
    spec = make_spec(stages=[1, 1, 1, 1], batch={"size": 8, "microbatches": 8})
    needs = [stage.memory for stage in measures(spec, [1, 1, 1, 1])]
    assert needs[2] < needs[1] < needs[0], "layers alike, but more and more stages behind them"
    offers = [Offer(f"for {i}", needs[i], 1e9) for i in (2, 0, 3, 1)]
    assert place(spec, offers).holders == ("for 0", "for 1", "for 2", "for 3")
    offers[1] = Offer("too small", needs[1], 1e9)
    assert not isinstance(place(spec, offers), Placement)


def need(spec: RunSpec, first: int, end: int, after: int) -> int:
    return StageMemory(spec).total(first, end, after)


def test_a_peer_offered_twice_is_a_mistake():
    with pytest.raises(ValueError, match="twice"):
        place(make_spec(), peers(1e9) * 4)


@pytest.mark.parametrize("tight", [1.0, 1.3, 4.0])
def test_many_peers_and_layers_are_placed_by_a_part_of_all_forecasts(monkeypatch, tight):
    """Stages of the same layers differ in what is in flight alone, so one forecast serves all places in the row: 6 of
    them (3 ways to recompute, 2 to compute) for each of 127 beginnings, middles and ends. The assignment problem is
    solved near the best time limit alone."""
    spec = make_spec(stages="auto", model={"layers": 128}, batch={"size": 64, "microbatches": 64})
    unit = need(spec, 1, 3, 32)
    offers = [
        Offer(f"p{i}", int(unit * tight * (0.5 + i * 29 % 64 / 40)), 1e12 * (1 + i * 37 % 64 / 10)) for i in range(64)
    ]
    asked, forecast = [], StageMemory.resident
    monkeypatch.setattr(StageMemory, "resident", lambda *stage: asked.append(stage) or forecast(*stage))
    solved, solve = [], placement.best_columns
    monkeypatch.setattr(placement, "best_columns", lambda gain: solved.append(gain) or solve(gain))
    found = place(spec, offers)
    assert 0 < len(asked) <= 3 * 127 * 6
    assert 0 < len(solved) < 40
    assert isinstance(found, Placement), found
    assert sum(found.layers) == 128
    assert len(found.layers) > 30
    memory = {offer.peer: offer.memory for offer in offers}
    assert all(m.memory <= memory[p] for m, p in zip(measures(spec, found.layers), found.holders, strict=True))


@given(runs(auto=True), st.sampled_from([None, Computation("float32", False, False), Computation("bf16", True, True)]))
def test_many_forecasts_at_once_are_those_of_one_stage_each(run, computation):
    spec, _ = run
    layers, memory, afters = spec.model.layers, StageMemory(spec), [0, 1, 2, 7]
    stages = [range(first, end) for first, end in combinations(range(layers + 1), 2)]
    ways = recomputations(spec)
    computed = computations(spec.compute) if computation is None else [computation]
    assert memory.totals(stages, afters, computation).tolist() == [
        [
            max(
                min(memory.with_recompute(s.start, s.stop, way, least_in_flight(spec, after), one) for way in ways)
                for one in computed
            )
            for s in stages
        ]
        for after in afters
    ]


@given(st.data())
def test_empty_seats_are_filled_if_they_can_be_for_the_least_cost(data):
    """Against every way to seat them."""
    wire = {"forward": data.draw(st.sampled_from(["fp32", "int8+aqsgd"]))}
    spec, layers = make_spec(stages=[1, 2, 1], wire=wire), (1, 2, 1)
    stages = measures(spec, layers)
    needs, on_host = [stage.memory for stage in stages], [stage.on_host for stage in stages]
    whole = [stage.memory + stage.on_host for stage in stages]
    rooms = data.draw(st.lists(st.sampled_from([*needs, *whole, min(needs) - 1]), max_size=5))
    hosts = st.sampled_from([None, *on_host, max(0, min(on_host) - 1)])
    offers = [Offer(f"p{i}", room, 1e9, data.draw(hosts)) for i, room in enumerate(rooms)]
    empty = data.draw(st.lists(st.integers(0, 2), unique=True, min_size=1).map(sorted))
    costs = {(o.peer, stage): data.draw(st.integers(0, 5)) for o in offers for stage in range(3)}
    ways = [
        seats
        for seats in permutations(offers, len(empty))
        if all(stages[stage].fits(offer) for offer, stage in zip(seats, empty, strict=True))
    ]
    found = fill(spec, layers, empty, offers, lambda peer, stage: float(costs[peer, stage]))
    assert isinstance(found, dict) == bool(ways)
    if isinstance(found, dict):
        seats = tuple(found[stage] for stage in empty)
        assert seats in [tuple(offer.peer for offer in way) for way in ways]
        least = min(sum(costs[o.peer, stage] for o, stage in zip(way, empty, strict=True)) for way in ways)
        assert sum(costs[peer, stage] for peer, stage in zip(seats, empty, strict=True)) == least
    else:
        assert {s.stage for s in found.stages} <= set(empty)
        assert all((s.need, s.on_host) == (needs[s.stage], on_host[s.stage]) for s in found.stages)
        assert found.stages
