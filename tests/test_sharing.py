"""Peers that share a card: its memory is one budget, whatever the stages on it take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import make_spec

from protomodels_cli.bench.month_size import SPEC as MONTH
from protomodels_cli.coordinator.no_placement import StageTooLarge
from protomodels_cli.coordinator.peers import Peer
from protomodels_cli.coordinator.placement import Placement, place
from protomodels_cli.coordinator.reasons import StagesWithoutPeer
from protomodels_cli.coordinator.sharing import fill_on_cards, needs, offers, place_on_cards, share_of
from protomodels_cli.cost.activations import Computation
from protomodels_cli.spec.load import spec_from
from protomodels_cli.spec.schema import RunSpec

GPU = Computation("bf16", compiled=True, gpu=True)
GIB = 1 << 30


def a_peer(name: str, memory: int, card: str = "", free: int = 0, host: int | None = 99) -> Peer:
    cards = tuple(filter(None, card.split(",")))
    return Peer(name, name, "gpu", memory, 8e9, "", 0, 0.0, host_memory=host, cards=cards, card_memory=free)


def by_id(peers: list[Peer]) -> dict[str, Peer]:
    return {peer.id: peer for peer in peers}


@pytest.mark.parametrize(
    ("peers", "memory", "flops"),
    [
        ([("a", 80, "x", 80)], [80], [8e9]),
        ([("a", 80, "x", 80), ("b", 80, "x", 80)], [40, 40], [4e9, 4e9]),
        ([("a", 80, "x", 80), ("b", 80, "y", 80)], [80, 80], [8e9, 8e9]),
        ([("a", 80), ("b", 80)], [80, 80], [8e9, 8e9]),  # not known
        ([("a", 16, "x", 80), ("b", 16, "x", 80)], [16, 16], [4e9, 4e9]),  # --memory, and there is room for both
        ([("a", 80, "x", 80), ("b", 16, "x", 80)], [64, 16], [4e9, 4e9]),
        ([("a", 80, "x", 80), ("b", 50, "x", 50), ("c", 10, "x", 50)], [35, 35, 10], [8e9 / 3] * 3),
        ([("a", 80, "x", 80, None), ("b", 80, "x", 80, None)], [40, 40], [8e9, 8e9]),  # cores of their own
        ([("a", 80, "x,y", 80), ("b", 40, "y", 40), ("c", 40, "z", 40)], [60, 20, 40], [6e9, 4e9, 8e9]),
        ([("a", 80, "x,y", 80), ("b", 80, "y,x", 80)], [40, 40], [4e9, 4e9]),
    ],
)
def test_a_card_is_counted_once(peers, memory, flops):
    found = offers([a_peer(*peer) for peer in peers])
    assert [offer.peer for offer in found] == [name for name, *_ in peers], "in the order they joined"
    assert [offer.memory for offer in found] == memory
    assert [offer.flops for offer in found] == pytest.approx(flops)


# A card as one budget


def llama_8b() -> RunSpec:
    return spec_from({**MONTH, "stages": 8})


def on_card(count: int, memory: int, first: int = 0, card: str = "x") -> list[Peer]:
    peers = [a_peer(f"p{i}", memory, card, memory, 1 << 50) for i in range(first, first + count)]
    return [replace(peer, computation=GPU) for peer in peers]


def holdings(spec: RunSpec, peers: list[Peer]) -> tuple[tuple[int, ...], dict[str, int], int]:
    """The cut, each holder's need, and their sum, however little memory there is."""
    found = place(spec, [replace(offer, memory=1 << 50) for offer in offers(peers)])
    assert isinstance(found, Placement)
    taken = needs(spec, peers, found.layers, found.holders)
    return found.layers, dict(taken), sum(taken.values())


def test_stages_of_different_sizes_share_a_card_that_holds_them_all():
    """Eight peers on one card of 139 GiB: the last stage alone needs more than an eighth of it."""
    spec, memory = llama_8b(), 139 * GIB
    peers = on_card(8, memory)
    layers, taken, together = holdings(spec, peers)
    assert together < 110 * GIB
    assert max(taken.values()) > memory // 8
    assert isinstance(place(spec, offers(peers)), StageTooLarge), "of equal shares"
    found = place_on_cards(spec, peers)
    assert isinstance(found, Placement)
    assert found.layers == layers

    shares = [share_of(spec, by_id(peers), found.layers, found.holders, stage) for stage in range(8)]
    assert memory - 8 <= sum(shares) <= memory
    beyond = {share - taken[holder] for share, holder in zip(shares, found.holders, strict=True)}
    assert max(beyond) - min(beyond) <= 1
    with_spares = [*peers, *on_card(3, memory, first=8)]
    assert [share_of(spec, by_id(with_spares), found.layers, found.holders, stage) for stage in range(8)] == shares


@pytest.mark.parametrize(
    ("missing", "spares", "fits"),
    [(0, 0, True), (0, 4, True), (1, 0, False), (1, 4, False)],
    ids=["to the byte", "spares take nothing", "a byte too few", "a byte too few, and spares"],
)
def test_a_card_is_full_when_its_stages_together_fill_it(missing, spares, fits):
    spec = llama_8b()
    *_, together = holdings(spec, on_card(8, 1))
    peers = on_card(8 + spares, together - missing)
    found = place_on_cards(spec, peers)
    assert isinstance(found, Placement) == fits
    if isinstance(found, Placement):
        taken = needs(spec, peers, found.layers, found.holders)
        shares = [share_of(spec, by_id(peers), found.layers, found.holders, stage) for stage in range(8)]
        assert shares == [taken[holder] for holder in found.holders]


@pytest.mark.parametrize(("missing", "fits"), [(0, True), (1, False)])
def test_a_lost_stage_goes_where_those_that_stay_leave_room(missing, fits):
    spec = llama_8b()
    layers, _, together = holdings(spec, on_card(8, 1))
    peers = on_card(10, together - missing)  # of whom two are spares: one for the lost stage
    held = {stage: f"p{stage}" for stage in range(7)}
    found = fill_on_cards(spec, layers, held, peers, lambda *_: 0.0)
    assert isinstance(found, dict) == fits
    if isinstance(found, dict):
        assert found.keys() == {7}
    else:
        assert isinstance(found, StagesWithoutPeer)
    elsewhere = [*peers, *on_card(1, together, first=10, card="y")]
    assert fill_on_cards(spec, layers, held, elsewhere, lambda *_: 0.0) == {7: "p10"}


def test_a_stage_that_fits_no_card_waits_for_one():
    spec = make_spec(stages=2)
    apart = [a_peer("a", 10, "x", 10), a_peer("b", 10, "y", 10)]
    assert isinstance(place_on_cards(spec, apart), StageTooLarge)
    assert isinstance(place_on_cards(spec, [replace(peer, memory=1 << 40) for peer in apart]), Placement)
