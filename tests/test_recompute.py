"""What a peer computes again, how many microbatches it holds, and what it has for that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import make_spec

from protomodels_cli.coordinator.messages import peer_of
from protomodels_cli.coordinator.placement import Offer, Placement, place
from protomodels_cli.cost.activations import Computation, computations
from protomodels_cli.cost.forecast import _costs, _wires, forecast
from protomodels_cli.cost.memory import MOST_WAITING, StageMemory, in_flight_limit, least_in_flight
from protomodels_cli.cost.pipeline import play
from protomodels_cli.cost.recompute import AMPLE, RESERVE, pick
from protomodels_cli.model.shape import slices
from protomodels_cli.spec.cut import layers_per_stage, spans
from protomodels_cli.spec.link import parse_link
from protomodels_cli.spec.schema import LinkSpec, RunSpec
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.worker.cards import Cards
from protomodels_cli.worker.computing import Chooser
from protomodels_cli.worker.device import computation_of
from protomodels_cli.worker.notices import Building, Computing

CPU = Computation("float32", compiled=False, gpu=False)
GPU = Computation("bf16", compiled=True, gpu=True)
HUGE = 1 << 62


def deep(stages: int = 4, form: str = "reparam", **sections) -> RunSpec:
    return make_spec(
        stages=stages,
        model={"layers": 2 * stages, "width": 64, "heads": 4, "hidden": 160, "context": 32},
        subspace={"form": form},
        optimizer={"name": "row_adamw" if form == "constrained" else "adamw"},
        batch={"size": 64, "microbatches": 32, **sections.pop("batch", {})},
        **sections,
    )


def test_the_fastest_way_that_fits_is_picked_and_then_as_many_microbatches_as_fit():
    sizes = StageMemory(deep())
    spec, least, ample = sizes.spec, least_in_flight(sizes.spec, 3), AMPLE * 4

    def need(way, held):
        return sizes.with_recompute(0, 2, way, held, CPU)

    def picked(need):
        return pick(sizes, 0, 2, 3, CPU, int(need / (1 - RESERVE)) + 1)

    assert need("block", least) < need("stage", least) < need("none", ample)
    found = picked(HUGE)
    assert (found.recompute, found.in_flight, found.why) == ("none", 32, "fits")
    found = picked(need("none", ample))
    assert (found.recompute, found.in_flight, found.why) == ("none", ample, "fits")
    found = picked(need("none", ample) - 10)
    assert (found.recompute, found.in_flight, found.why) == ("stage", 32, "saves"), "what waits costs next to nothing"
    assert found.kept_bytes == need("none", ample)
    found = picked(need("stage", least))
    assert (found.recompute, found.in_flight, found.bytes) == ("stage", least, need("stage", least))
    found = picked(need("stage", least) - 10)
    assert (found.recompute, found.why) == ("block", "saves")
    found = picked(need("block", least) - 10)
    assert (found.recompute, found.in_flight, found.why) == ("block", least, "tight")
    asked = StageMemory(spec.model_copy(update={"compute": spec.compute.model_copy(update={"recompute": "none"})}))
    assert pick(asked, 0, 2, 3, CPU, HUGE).why == "asked"
    assert pick(asked, 0, 2, 3, CPU, 10).why == "tight"


@pytest.mark.parametrize("form", ["reparam", "constrained", "dense"])
def test_placement_weighs_a_stage_with_the_least_that_auto_can_reach(form):
    spec = deep(form=form)
    sizes = StageMemory(spec)
    for first, end, after in ((0, 2, 3), (2, 4, 2), (6, 8, 0)):
        least = sizes.total(first, end, after, CPU)
        held = least_in_flight(spec, after)
        ways = [sizes.with_recompute(first, end, way, held, CPU) for way in ("none", "stage", "block")]
        assert least == min(ways)
        assert pick(sizes, first, end, after, CPU, int(least / (1 - RESERVE)) + 1).why != "tight"


def test_auto_is_counted_as_whatever_takes_more():
    spec = deep()
    assert spec.compute.dtype == "auto"
    assert set(computations(spec.compute)) == {CPU, GPU}
    sizes = StageMemory(spec)
    assert sizes.total(0, 2, 3) == max(sizes.total(0, 2, 3, CPU), sizes.total(0, 2, 3, GPU))
    assert sizes.total(0, 2, 3, CPU) != sizes.total(0, 2, 3, GPU)


def test_a_peer_is_weighed_by_how_it_computes():
    spec = deep(2)
    sizes = StageMemory(spec)
    needs = [sizes.total(0, 2, 1, GPU), sizes.total(2, 4, 0, GPU)]
    gpus = [Offer(f"p{i}", need, 1e9, HUGE, GPU) for i, need in enumerate(needs)]
    assert isinstance(place(spec, gpus), Placement)
    assert not isinstance(place(spec, [gpus[0], replace(gpus[1], computation=CPU)]), Placement)
    register = pb.Register(dtype="bf16", compiled=True, host_memory=5, memory=7, card="GPU-1,GPU-2", card_memory=9)
    peer = peer_of("p1", register, "127.0.0.1", reached=(), now=0.0)
    assert (peer.computation, peer.cards, peer.card_memory) == (GPU, ("GPU-1", "GPU-2"), 9)
    assert peer_of("p1", pb.Register(dtype="fp8"), "127.0.0.1", reached=(), now=0.0).computation is None


# In flight


def test_as_many_are_in_flight_as_a_step_has_unless_told_or_their_messages_take_too_much():
    spec = deep()
    assert [in_flight_limit(spec, after) for after in (0, 1, 3)] == [1, 32, 32]
    assert in_flight_limit(deep(batch={"in_flight": 3}), 3) == 3
    model = {"layers": 8, "width": 4096, "heads": 32, "context": 4096}
    large = make_spec(stages=8, model=model, subspace={"form": "dense"}, batch={"size": 256, "microbatches": 256})
    messages = 4096 * (2 * 4 * 4096 + 16)
    assert [in_flight_limit(large, after) for after in (1, 7)] == [max(4, MOST_WAITING // messages), 16]
    assert [least_in_flight(spec, after) for after in (0, 1, 3)] == [1, 4, 8]
    assert least_in_flight(deep(batch={"in_flight": 3}), 3) == 3
    assert least_in_flight(deep(batch={"size": 2, "microbatches": 2}), 3) == 2


@pytest.mark.parametrize("stages", [2, 8, 32])
@pytest.mark.parametrize("link", [LinkSpec(), parse_link("80mbit,25ms")], ids=["no link", "80mbit,25ms"])
@pytest.mark.parametrize(("form", "codec"), [("reparam", "int8"), ("dense", "bf16")])
def test_the_default_in_flight_is_as_good_as_no_limit(stages, link, form, codec):
    """The paper's 2B shape at 32 × 1024 tokens a step, on peers of 200 TFLOP/s."""
    spec = make_spec(
        stages=stages,
        model={"layers": 32, "width": 4096, "heads": 32, "hidden": 11008, "context": 1024},
        subspace={"form": form, "k": 40},
        optimizer={"name": "adamw"},
        batch={"size": 32, "microbatches": 32},
        wire={"forward": codec, "backward": codec},
    )
    cut, sizes, wires = spans(layers_per_stage(spec)), StageMemory(spec), _wires(spec, link)
    picked = [pick(sizes, s.start, s.stop, stages - 1 - i, GPU, HUGE) for i, s in enumerate(cut)]
    ours = _costs(spec, cut, 2e14, picked)
    seconds = play(ours, 32, wires).seconds
    assert seconds <= 1.03 * play([replace(cost, limit=32) for cost in ours], 32, wires).seconds
    if stages == 8 and link.emulated and form == "reparam":
        before = [replace(cost, limit=2 * (stages - i)) for i, cost in enumerate(ours)]
        assert play(before, 32, wires).seconds > 1.4 * seconds, "what twice the stages behind would cost"


def test_computing_a_stage_again_takes_a_third_more_except_on_the_last():
    plain, again = (deep(compute={"recompute": way}) for way in ("none", "stage"))
    before, after = (forecast(spec, LinkSpec(), 1e9).stages for spec in (plain, again))
    assert [b.compute / a.compute for a, b in zip(before, after, strict=True)] == pytest.approx([4 / 3] * 3 + [1])
    auto = deep()
    small = max(stage.memory for stage in forecast(auto, LinkSpec(), 1e9, computation=CPU).stages)
    found = forecast(auto, LinkSpec(), 1e9, memory=int(1.2 * small), computation=CPU).stages
    assert found[0].recompute != "none"
    assert all(stage.memory <= 1.2 * small for stage in found)
    assert found[0].compute > forecast(auto, LinkSpec(), 1e9, computation=CPU).stages[0].compute


# On the peer


def test_a_peer_chooses_within_its_share_and_says_what_it_takes():
    spec, device = deep(), torch.device("cpu")
    layers, chooser = slices(spec)[0], Chooser(Cards((device,), HUGE, (HUGE,), HUGE))
    assert computation_of(spec, device) == CPU
    free = chooser.pick(spec, layers, 0)
    assert (free.recompute, free.memory) == ("none", HUGE)
    share = StageMemory(spec).with_recompute(0, 2, "stage", 8, CPU) * 11 // 10
    found = chooser.pick(spec, layers, share)
    assert (found.recompute, found.memory) == ("stage", share)
    used = chooser.memory_used()
    assert used["forecast_memory"] == found.bytes
    assert used["peak_memory"] > 10_000_000, "of the whole process"
    [told] = chooser.notices(spec, found, reuse=False)
    assert isinstance(told, Computing)
    assert (told.dtype, told.dtype_is_own, told.compiled, told.recompute) == ("float32", True, False, "stage")
    remembering = deep(wire={"forward": "int8+aqsgd"})
    on_host = StageMemory(remembering).on_host(0, 2)
    assert chooser.pick(remembering, layers, share).memory == share - on_host, "one memory for both"


def test_a_peer_tells_before_it_compiles_what_it_does_not_have_yet():
    spec, device = deep(compute={"compile": "always"}), torch.device("cpu")
    chooser = Chooser(Cards((device,), HUGE, (HUGE,), HUGE))
    found = chooser.pick(spec, slices(spec)[0], 0)
    assert [type(notice) for notice in chooser.notices(spec, found, reuse=False)] == [Computing, Building]
    assert [type(notice) for notice in chooser.notices(spec, found, reuse=True)] == [Computing]
