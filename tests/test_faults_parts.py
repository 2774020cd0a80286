"""Holders that keep snapshots from being complete, or of use: real processes; the weights are the reference's."""

from __future__ import annotations

from typing import Any

import pytest
from scene import Scene, a_spec

pytestmark = pytest.mark.waiting

LIMIT = 15.0  # seconds for parts to arrive: on a busy machine honest ones take some


def replaced(s: Scene, stage: int) -> dict[str, Any]:
    """The run ends well without the peer that was sent away: the reason that was given for that."""
    [sent_away] = s.wait_for(lambda: s.events("peer_dismissed"), "nobody was sent away")
    assert sent_away["stage"] == stage
    gone = int(sent_away["name"].removeprefix("peer-"))
    ended = s.pool.peers[gone].result()
    assert (ended["exit"], ended["reason"]) == (3, "dismissed")
    s.peers.remove(gone)
    failed = s.events("snapshot_failed", name=sent_away["name"])
    assert {event["stage"] for event in failed} == {stage}
    assert len(failed) == 2
    s.ends_well()
    assert s.records("Saved")[-1]["step"] == s.spec.steps
    return sent_away["reason"]


@pytest.mark.full
def test_who_never_hands_its_part_in_is_named_and_replaced(scene):
    s = scene(a_spec(limits={"part_seconds": LIMIT}))
    s.start(4, {"kind": "withholds_its_part", "stage": 1})
    reason = replaced(s, 1)
    assert (reason["kind"], reason["snapshots"], reason["reason"]["kind"]) == ("spoilt_snapshots", 2, "overdue")


def test_who_saves_another_shape_is_named_and_replaced(scene):
    s = scene(a_spec())
    s.start(4, {"kind": "saves_nonsense", "stage": 1, "what": "shape"})
    reason = replaced(s, 1)["reason"]
    assert (reason["kind"], reason["found"], reason["right"]) == ("wrong_tensor", "F32 [1]", "F32 [32]")
    assert reason["tensor"].endswith("attn_norm.weight")


@pytest.mark.full
def test_a_part_that_nobody_can_build_from_costs_its_snapshot_and_no_spare(scene):
    """What is not finite shows in no header. The last snapshot but this one is used, or the beginning."""
    s = scene(a_spec())
    s.start(4, {"kind": "saves_nonsense", "stage": 1, "what": "nan"})
    s.wait_for(lambda: s.records("Saved"), "no snapshot")
    s.kill(s.holder(1))
    summary = s.ends_well()
    assert s.events("snapshot_unusable")
    assert not s.events("peer_dismissed")
    assert any(row["unusable"] for row in s.records("Forgot"))
    assert summary["lineage"] >= 2
