"""Attacks from within: how a run is judged, messages at the edges of their fields, and short attacks on real runs."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from conftest import make_spec
from door_tools import needs_two_addresses

from protomodels_cli.bench import insider
from protomodels_cli.bench.edges import BODIES, Edges, Heard
from protomodels_cli.bench.insider import ATTACKS, PAUSE_BOUND, Setting, judge, measure
from protomodels_cli.coordinator.message_fields import check
from protomodels_cli.wire.pb import pmtrain_pb2 as pb


def a_row(attack: str, **fields: Any) -> dict[str, Any]:
    right = {
        "attack": attack,
        "longest_pause_s": 5.0 + PAUSE_BOUND,
        "honest_dismissed": 0,
        "named_in": ["peer_dismissed"],
        "attacker": {"lies": 3, "ids": 1, "failed": ""},
        "join_s": None,
        "slowed": None,
        "coordinator_up": True,
        "tracebacks": 0,
        "weights_right": True,
    }
    return right | fields


@pytest.mark.parametrize(
    ("attack", "fields", "broken"),
    [
        ("stands-still", {}, []),
        ("leaves", {"named_in": [], "attacker": {}}, []),
        ("stands-still", {"longest_pause_s": 5.1 + PAUSE_BOUND}, ["paused"]),
        ("stands-still", {"honest_dismissed": 1}, ["honest_dismissed"]),
        (
            "stands-still",
            {"coordinator_up": False, "weights_right": None},
            ["coordinator_ended", "weights_not_compared"],
        ),
        ("stands-still", {"weights_right": False}, ["weights_differ"]),
        ("stands-still", {"tracebacks": 1}, ["tracebacks"]),
        ("stands-still", {"named_in": []}, ["not_named"]),
        ("stands-still", {"attacker": {"ids": 3, "failed": ""}}, ["nothing_done"]),
        ("stands-still", {"attacker": {"lies": 3, "failed": "KeyError()"}}, ["attacker_failed"]),
        ("reads-others", {"named_in": []}, ["not_named"]),
        ("reads-others", {"attacker": {"lies": 3, "stolen bytes": 1}}, ["stolen"]),
        ("holds-calls", {"join_s": 29.0}, []),
        ("holds-calls", {"join_s": None}, ["locked_out"]),
        ("holds-calls", {"join_s": 31.0}, ["locked_out"]),
        ("edges", {"slowed": 0.09}, []),
        ("edges", {"slowed": 0.11}, ["slowed"]),
    ],
)
def test_a_run_holds_against_an_attack_if_nothing_is_broken(attack: str, fields: dict[str, Any], broken: list[str]):
    row = a_row(attack, **fields)
    judge(row, forecast=5.0)
    assert row["broken"] == broken
    assert row["within"] is not broken


def test_edges_fill_every_field_of_every_message_and_most_are_within_range():
    spec, draw, seen, out_of_range = make_spec(stages=2), random.Random(1), Counter[str](), 0
    edges, heard = Edges(draw, spec), Heard(3, 17, 9, 1, ("ab" * 32,))
    fields = {
        f.full_name for name in BODIES for f in pb.PeerMessage.DESCRIPTOR.fields_by_name[name].message_type.fields
    }
    for _ in range(3000):
        message = edges.message(heard)
        body = getattr(message, message.WhichOneof("body"))
        seen.update(field.full_name for field, _ in body.ListFields())
        try:
            check(message, spec)
        except ValueError:
            out_of_range += 1
    assert set(seen) == fields
    assert 30 < out_of_range < 1500


def test_the_fuzzer_knows_where_the_run_is():
    heard = Heard()
    heard.hear(pb.CoordinatorMessage(assignment=pb.Assignment(generation=4, task=7, step=30, lineage=2)))
    heard.hear(pb.CoordinatorMessage(turn=pb.Turn(generation=5, task=9, step=pb.Step(step=31))))
    assert (heard.generation, heard.task, heard.step, heard.lineage) == (5, 9, 31, 2)
    heard.hear(pb.CoordinatorMessage(keep=pb.Keep(newest=[pb.Part(lineage=3, step=20, sha256="ab" * 32)])))
    assert (heard.lineage, heard.step, heard.hashes) == (3, 20, ("ab" * 32,))
    edges, near = Edges(random.Random(1), make_spec(stages=2)), 0
    for _ in range(300):
        near += edges.message(heard).done.generation == heard.generation
    assert near > 5


def held(seconds: float, *attacks: str, spares: int = 1) -> None:
    """One after another in one run. A pause is bounded by the test's own patience alone: a busy machine is slow."""
    setting = Setting(attacks, seconds, leaves=seconds, per_second=30.0, spares=spares, forecast=0.0, together=True)
    found = measure(setting, lambda text: None)
    for row in found["attacks"]:
        excused = {"paused", "slowed"}
        if row["attack"] == "stands-still":
            excused |= {"nothing_done", "not_named"}  # in seconds it may be asked for no stage: others come first
        broken = set(row["broken"]) - excused
        assert not broken, row


@pytest.mark.full
@needs_two_addresses
@pytest.mark.waiting
@pytest.mark.timeout(900)
def test_nothing_is_read_or_held_by_clients_with_the_token():
    held(5.0, "reads-others", "holds-calls", spares=0)


@pytest.mark.full
@pytest.mark.waiting
@pytest.mark.timeout(900)
def test_peers_without_a_model_do_not_stop_a_run():
    held(15.0, "stands-still", "lies-about-parts", "edges")


@pytest.mark.full
@pytest.mark.waiting
@pytest.mark.timeout(900)
@pytest.mark.parametrize("attack", ["false-hashes", "impossible-times", "no-record"])
def test_holders_that_lie_are_sent_away_and_the_run_goes_on(attack: str):
    held(10.0, attack)


def test_every_attack_of_the_page_is_one_of_the_benchmark():
    """SECURITY.md names each of them."""
    page = (insider.Path(__file__).parent.parent / "SECURITY.md").read_text()
    assert [name for name in ATTACKS if f"`{name}`" not in page] == []
