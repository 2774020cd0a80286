"""What is missing where peers do not suffice: which kind, and with which figures. test_sentences.py has the words."""

from __future__ import annotations

from dataclasses import replace

from conftest import make_spec

from protomodels_cli.coordinator.no_placement import (
    EndsTooLarge,
    HostMemoryTooSmall,
    InFlight,
    Layers,
    ModelTooLarge,
    StageTooLarge,
    TooFewLargePeers,
    TooFewLayersFit,
    TooFewPeers,
)
from protomodels_cli.coordinator.placement import Offer, Placement, place
from protomodels_cli.cost.memory import StageMemory
from protomodels_cli.spec import RunSpec

FIXED = {"stages": [2, 2], "batch": {"size": 4, "microbatches": 4}}
AUTO = {"stages": "auto", "batch": {"size": 4, "microbatches": 4}}


def peers(*flops: float, memory: int = 1 << 40) -> list[Offer]:
    return [Offer(f"p{i}", memory, speed) for i, speed in enumerate(flops)]


def need(spec: RunSpec, first: int, end: int, after: int) -> int:
    return StageMemory(spec).total(first, end, after)


def test_too_few_peers_are_counted():
    assert place(make_spec(), peers(1e9)) == TooFewPeers(1, 4)
    assert place(make_spec(stages="auto", min_peers=3), peers(1e9, 1e9)) == TooFewPeers(2, 3, at_least=True)
    assert place(make_spec(stages="auto"), []) == TooFewPeers(0, 2, at_least=True)
    broken = [Offer(f"x{i}", 1 << 40, f) for i, f in enumerate((0.0, -1.0, float("nan"), float("inf")))]
    assert place(make_spec(), [*peers(1e9), *broken]) == TooFewPeers(1, 4, unusable=4)
    assert place(make_spec(), [*broken, *peers(1e9, 1e9, 1e9, 1e9)]).holders == ("p0", "p1", "p2", "p3")


def test_a_stage_too_large_for_anyone_is_named_with_what_it_needs():
    spec = make_spec(**FIXED)
    first, last = need(spec, 0, 2, 1), need(spec, 2, 4, 0)
    assert last > first
    for most in (last // 2, last - 1):
        found = place(spec, peers(1e9, 1e9, memory=most))
        assert found == StageTooLarge(1, Layers(2, 4, head=True), last, most)
    several = place(spec, [Offer("big", last, 1e9), Offer("a", 1000, 1e9), Offer("b", 1000, 1e9)])
    assert several == TooFewLargePeers(2, first, 1, 1000)


def test_where_microbatches_take_the_memory_what_to_change_is_said_too():
    spec = make_spec(stages=2, model={"context": 512}, batch={"size": 32, "microbatches": 16})
    held = StageMemory(spec).for_microbatches(2, 4, 0)
    assert place(spec, peers(1e9, 1e9, memory=1 << 19)).in_flight == InFlight(held, True, False)
    batch = {"size": 32, "microbatches": 32}
    spec = make_spec(stages=2, model={"context": 512}, batch=batch)
    assert place(spec, peers(1e9, 1e9, memory=1 << 19)).in_flight is None, "nothing left to change there"
    spec = make_spec(stages=2, model={"context": 512}, batch=batch, compute={"recompute": "none"})
    assert place(spec, peers(1e9, 1e9, memory=1 << 19)).in_flight.recompute


MANY_SAMPLES = {"steps": 5000, "wire": {"forward": "int8+aqsgd"}}  # remembered in host memory


def test_what_codecs_keep_on_the_host_is_asked_of_the_host_and_not_of_the_gpu():
    spec = make_spec(**FIXED, **MANY_SAMPLES)
    device, on_host = need(spec, 2, 4, 0), StageMemory(spec).on_host(2, 4)
    assert device < on_host
    gpu, other = (Offer(f"p{i}", device, 1e9, on_host) for i in range(2))
    assert isinstance(place(spec, [gpu, other]), Placement)
    assert isinstance(place(spec, [gpu, Offer("cpu", device + on_host, 1e9)]), Placement)
    for few in (replace(other, host_memory=on_host - 1), replace(other, host_memory=None)):
        assert place(spec, [gpu, few]) == HostMemoryTooSmall(on_host)
        assert isinstance(place(spec, [gpu, replace(few, memory=10)]), TooFewLargePeers), "the device is too small too"


def test_a_cut_is_chosen_to_fit_the_hosts_too():
    spec = make_spec(**AUTO, **MANY_SAMPLES)
    whole, on_host = need(spec, 0, 4, 0), StageMemory(spec).on_host(0, 1)
    gpus = [Offer(f"p{i}", whole, 1e9, on_host) for i in range(2)]
    assert len(place(spec, gpus).layers) == 2
    assert place(spec, [replace(gpu, host_memory=0) for gpu in gpus]).layers == (4,), "no boundary, nothing to remember"
    short = [replace(gpu, memory=whole - 1, host_memory=0) for gpu in gpus]
    assert place(spec, short) == HostMemoryTooSmall(2 * on_host)


def test_no_cut_at_all_is_explained():
    spec = make_spec(**AUTO, min_peers=1)
    whole, first, last = need(spec, 0, 4, 0), need(spec, 0, 1, 1), need(spec, 3, 4, 0)
    assert first < last
    most = whole - 100_000
    assert place(spec, peers(1e9, memory=most)) == ModelTooLarge(whole, most, more_peers_help=True)
    found = place(spec, peers(1e9, 1e9, memory=last // 2))
    assert found == StageTooLarge("last", Layers(3, 4, head=True), last, last // 2)
    assert place(spec, [Offer("big", last, 1e9), Offer("small", first - 1, 1e9)]) == EndsTooLarge(first, last)
    two = [Offer("a", first, 1e9), Offer("b", last, 1e9)]
    assert place(spec, two) == TooFewLayersFit(2, 2, 4, 2, need(spec, 0, 1, 1))
    assert place(spec, [*two, Offer("c", first, 1e9)]) == TooFewLayersFit(3, 3, 4, 3, need(spec, 0, 1, 2))
    assert place(spec, [*two, *peers(1e9, 1e9, memory=first)]).layers == (1, 1, 1, 1)
    pairs = make_spec(
        stages="auto",
        min_peers=1,
        model={"layers": 6, "segments": 3},
        subspace={"form": "two_stream", "anchor": "segment"},
    )
    two = [Offer("a", need(pairs, 0, 2, 1), 1e9), Offer("b", need(pairs, 4, 6, 0), 1e9)]
    assert place(pairs, two) == TooFewLayersFit(2, 4, 6, 2, need(pairs, 0, 2, 1), first_layers=2)
    found = place(pairs, peers(1e9, 1e9, memory=need(pairs, 0, 2, 1) - 1))
    assert found == StageTooLarge("first", Layers(0, 2, head=False), need(pairs, 0, 2, 1), need(pairs, 0, 2, 1) - 1)
    together = make_spec(**AUTO, subspace={"unconstrained_layers": 4})
    assert isinstance(place(together, peers(1e9, 1e9, memory=whole // 2)), ModelTooLarge)
