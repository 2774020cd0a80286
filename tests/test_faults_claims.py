"""Spares that say they have what they have not, or never build a stage: named, passed over, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scene import Scene, a_spec

from protomodels_cli.spec import RunSpec

pytestmark = pytest.mark.waiting

LIMIT = 15.0  # seconds to restore a stage: on a busy machine an honest spare takes some


def dismissed(s: Scene, *names: str) -> dict[str, Any]:
    """The reason for which one of these was sent away."""
    [sent_away] = s.wait_for(lambda: s.events("peer_dismissed"), "nobody was sent away")
    assert sent_away["name"] in names
    gone = int(sent_away["name"].removeprefix("peer-"))
    assert s.pool.peers[gone].result()["exit"] == 3
    s.peers.remove(gone)
    return sent_away["reason"]


def given_up(s: Scene, name: str) -> dict[str, Any]:
    """The reason for which this one had to give its stage up."""
    [told] = s.wait_for(lambda: s.events("stage_given_up"), "nobody gave a stage up")
    assert told["name"] == name
    assert not s.events("peer_dismissed")
    return told["reason"]


def a_run(scene: Callable[[RunSpec], Scene], fault: dict[str, Any], signal: str, both: bool = False) -> Scene:
    """The holder of stage 1 gets a signal in step 8; the first spare has a fault, and with `both` the other one too."""
    s = scene(a_spec(limits={"restore_seconds": LIMIT}).model_copy(update={"stages": 2}))
    s.start(2, s.fail_at("forward", 1, 8, signal))
    s.wait_for(lambda: s.events("stages_assigned"), "nobody holds a stage")
    s.join(2, fault=fault)
    s.wait_for(lambda: s.events("peer_joined", name="peer-2"), "the first spare did not come")
    s.join(3, fault=fault if both else None)
    s.wait_for_fault("fail_at")
    return s


def test_a_spare_that_never_restores_its_stage_is_named_and_the_next_is_asked(scene):
    s = a_run(scene, {"kind": "never_ready"}, "SIGKILL")
    assert given_up(s, "peer-2") == {"kind": "too_slow", "stage": 1, "doing": "restore", "seconds": LIMIT}
    assert s.ends_well()["lineage"] == 2
    assert s.events("stages_assigned")[-1]["holders"][1]["name"] == "peer-3"


@pytest.mark.full
def test_a_spare_that_never_builds_the_stage_of_a_silent_holder_is_named_and_nothing_is_given_up_for_it(scene):
    """Which of the two is asked first, their measured speeds decide."""
    s = a_run(scene, {"kind": "never_ready"}, "SIGSTOP", both=True)
    reason = {"kind": "too_slow", "stage": 1, "doing": "restore", "seconds": LIMIT}
    assert dismissed(s, "peer-2", "peer-3") == reason
    assert not s.events("rolled_back")
    s.go_on()
    assert s.ends_well()["lineage"] == 1


@pytest.mark.full
def test_a_spare_that_claims_parts_is_found_out_and_gives_its_stage_up_when_it_does_not_build(scene):
    """Its claims count no more, before anybody needs them; it came first, so it is asked first all the same."""
    s = a_run(scene, {"kind": "claims_parts"}, "SIGKILL")
    reason = given_up(s, "peer-2")
    assert (reason["kind"], reason["stage"]) == ("part_not_proved", 1)
    assert s.ends_well()["lineage"] == 2
    refuted = s.events("part_not_there")
    assert {event["name"] for event in refuted} == {"peer-2"}
    assert {event["stage"] for event in refuted} == {0, 1}
    assert s.events("stages_assigned")[-1]["holders"][1]["name"] == "peer-3"
