"""A peer with several cards: what lies where, what it offers, and what a stage takes there."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest
import torch
from conftest import make_spec

from protomodels_cli.cli.join import _devices
from protomodels_cli.cost.activations import Computation
from protomodels_cli.cost.cards import laid_over, offered
from protomodels_cli.cost.memory import StageMemory, least_in_flight
from protomodels_cli.cost.recompute import RESERVE, pick, pick_over
from protomodels_cli.model.shape import slices
from protomodels_cli.worker import device as devices
from protomodels_cli.worker.cards import Cards
from protomodels_cli.worker.computing import Chooser

CPU = Computation("float32", compiled=False, gpu=False)
GB = 10**9


FORMS = [("reparam", "fixed"), ("dense", "fixed"), ("two_stream", "segment")]


def a_spec(form: str = "reparam", anchor: str = "fixed", layers: int = 9, stages: int = 1, **sections):
    """With segments of three layers, which cards may part."""
    model = {"layers": layers, "segments": layers // 3}
    return make_spec(stages=stages, model=model, subspace={"form": form, "anchor": anchor}, **sections)


def fullness(sizes: StageMemory, layers: list[range], rooms: list[int]) -> float:
    return max(sizes.total(r.start, r.stop, 0, CPU) / room for r, room in zip(layers, rooms, strict=True) if r)


@pytest.mark.parametrize(("form", "anchor"), FORMS)
@pytest.mark.parametrize("rooms", [[GB], [GB, GB], [GB, 3 * GB], [2 * GB, GB, GB], [GB, 1], [1, GB]])
def test_the_fullest_card_is_as_little_full_as_any_cut_makes_it(form, anchor, rooms):
    sizes = StageMemory(a_spec(form, anchor))
    found = laid_over(sizes, range(9), 0, CPU, rooms)
    assert [i for layers in found for i in layers] == list(range(9))
    every = [
        [range(a, b) for a, b in zip((0, *cut), (*cut, 9), strict=True)]
        for cut in combinations_with_replacement(range(10), len(rooms) - 1)
    ]
    assert fullness(sizes, found, rooms) == min(fullness(sizes, layers, rooms) for layers in every)
    if 1 in rooms:
        assert not found[rooms.index(1)], "a card without room has no layers"


def test_a_stage_of_one_layer_is_on_the_first_card():
    assert laid_over(StageMemory(a_spec()), range(3, 4), 0, CPU, [GB, GB]) == [range(3, 4), range(4, 4)]


@pytest.mark.parametrize("rooms", [(4, 4), (3, 9), (2, 2, 2), (5, 1, 1)])
@pytest.mark.parametrize(("form", "anchor"), FORMS)
def test_what_a_peer_offers_fits_on_its_cards(form, anchor, rooms):
    """Any stage of middle layers that takes no more than that, whatever the cards are."""
    spec = a_spec(form, anchor, layers=24, stages=4)
    sizes = StageMemory(spec)
    layer = sizes.total(1, 2, 2, CPU)
    rooms = [int(room * layer * 1.37) for room in rooms]
    promised = offered(sizes, CPU, rooms)
    assert max(rooms) <= promised < sum(rooms)
    fitting = [end for end in range(2, 24) if sizes.total(1, end, 2, CPU) <= promised]
    assert fitting
    for end in fitting:
        layers = laid_over(sizes, range(1, end), 2, CPU, rooms)
        assert all(sizes.total(r.start, r.stop, 2, CPU) <= room for r, room in zip(layers, rooms, strict=True) if r)


def test_the_tightest_card_decides_what_is_computed_again():
    spec = make_spec(
        stages=2, model={"layers": 8, "context": 64}, batch={"size": 32, "microbatches": 16}, subspace={"form": "dense"}
    )
    sizes, halves = StageMemory(spec), [range(2), range(2, 4)]
    need = [sizes.with_recompute(r.start, r.stop, "stage", least_in_flight(spec, 1), CPU) for r in halves]
    ample, tight = 1 << 40, int(max(need) / (1 - RESERVE)) + 1
    assert pick(sizes, 0, 4, 1, CPU, ample) == pick_over(sizes, [(range(4), ample)], 1, CPU)
    assert pick_over(sizes, [(halves[0], ample), (halves[1], ample)], 1, CPU).recompute == "none"
    for rooms in ([ample, tight], [tight, ample]):
        found = pick_over(sizes, list(zip(halves, rooms, strict=True)), 1, CPU)
        assert (found.recompute, found.why, found.memory) == ("stage", "saves", ample + tight)
        each = [sizes.with_recompute(r.start, r.stop, "stage", found.in_flight, CPU) for r in halves]
        assert found.bytes == sum(each)
    assert pick_over(sizes, [(halves[0], ample), (halves[1], 1000)], 1, CPU).why == "tight"


def cards_of(monkeypatch: pytest.MonkeyPatch, names: list[str], most: int | None = None, **sections) -> Cards:
    free = {"cpu": 8 * GB, "cuda:0": 4 * GB, "cuda:1": 12 * GB}
    monkeypatch.setattr(devices, "free_memory", lambda device: free[str(device)])
    monkeypatch.setattr(devices, "card", lambda device: f"GPU-{device.index}")
    spec = a_spec(compute={"dtype": "float32"}, **sections)
    return Cards.of([torch.device(name) for name in names], spec, most)


def test_cards_count_once_and_what_is_allowed_is_shared_out(monkeypatch):
    both = cards_of(monkeypatch, ["cuda:0", "cuda:1"])
    assert (both.free, both.rooms, both.ids) == (16 * GB, (4 * GB, 12 * GB), "GPU-0,GPU-1")
    assert 15 * GB < both.offered < 16 * GB
    limited = cards_of(monkeypatch, ["cuda:0", "cuda:1"], most=8 * GB)
    assert (limited.free, limited.rooms) == (16 * GB, (2 * GB, 6 * GB))
    twice = cards_of(monkeypatch, ["cuda:0", "cuda:0"])
    assert (twice.free, twice.rooms, twice.ids) == (4 * GB, (2 * GB, 2 * GB), "GPU-0")
    one = cards_of(monkeypatch, ["cpu"], most=GB)
    assert (one.free, one.rooms, one.offered) == (8 * GB, (GB,), GB)
    limits: dict[str, int] = {}
    monkeypatch.setattr(devices, "limit_memory", lambda device, most: limits.update({str(device): most}))
    limited.limit_memory()
    assert limits == {"cuda:0": 2 * GB, "cuda:1": 6 * GB}
    cards_of(monkeypatch, ["cuda:0", "cuda:0"], most=GB).limit_memory()
    assert limits["cuda:0"] == GB


def test_a_stage_lies_on_the_same_cards_whatever_its_share(monkeypatch):
    """Or one that is in memory could not be used again."""
    cards = cards_of(monkeypatch, ["cpu", "cpu"], stages=3)
    spec = a_spec(stages=3, compute={"dtype": "float32"})
    chooser, slice_ = Chooser(cards), slices(spec)[1]
    layout = cards.layout(spec, slice_)
    assert [device.type for device, _ in layout] == ["cpu", "cpu"]
    assert [i for _, layers in layout for i in layers] == list(slice_.layers)
    assert chooser.pick(spec, slice_, 0).memory == sum(cards.rooms)
    assert chooser.pick(spec, slice_, cards.offered).memory == sum(cards.rooms)
    half = chooser.pick(spec, slice_, cards.offered // 2)
    assert half.memory == pytest.approx(sum(cards.rooms) / 2)
    assert cards.layout(spec, slice_) == layout


def test_cards_that_take_turns_are_as_fast_as_their_mean(monkeypatch):
    cards = cards_of(monkeypatch, ["cuda:0", "cuda:1"])
    speeds = {"cuda:0": 3e12, "cuda:1": 1e12}
    monkeypatch.setattr(devices, "measure_flops", lambda spec, device: speeds[str(device)])
    assert cards.measure_flops(a_spec()) == pytest.approx(1.5e12)


@pytest.mark.parametrize(
    ("said", "names"),
    [
        (("auto", None), ("auto",)),
        (("CPU", None), ("cpu",)),
        (("auto", "0,1"), ("cuda:0", "cuda:1")),
        (("auto", "cuda:1,0,12"), ("cuda:1", "cuda:0", "cuda:12")),
        (("auto", "cpu,cpu"), ("cpu", "cpu")),
    ],
)
def test_gpus_are_named_by_number_or_in_full(said, names):
    assert _devices(*said) == names


def test_machines_cloned_from_one_image_are_not_one_machine(tmp_path, monkeypatch):
    cpu, (boot, machine) = torch.device("cpu"), (tmp_path / "boot_id", tmp_path / "machine-id")
    assert devices.MACHINE[-1] == "/etc/machine-id", "what clones share comes last"
    monkeypatch.setattr(devices, "MACHINE", (str(boot), str(machine)))
    assert devices.card(cpu) == ""
    machine.write_text("image\n")
    assert devices.card(cpu) == "image"
    boot.write_text("boot\n")
    assert devices.card(cpu) == "boot"
