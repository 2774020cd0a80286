"""Whatever happens, the weights are those of a run to which nothing happened: real processes, real kills."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time

import pytest
from scene import a_spec, expected
from tiers import first

from protomodels_cli.launch.cable import cable

pytestmark = pytest.mark.waiting

KILLS = [
    pytest.param("fp32", "forward", 0, 5, id="first"),
    pytest.param("two streams", "prepared", 1, 8, id="middle, prepared, two streams"),
    pytest.param("int8", "switch", 0, 6, id="at the switch, int8"),
    pytest.param("fp32", "backward", 1, 7, id="middle"),
    pytest.param("fp32", "decided", 2, 8, id="last"),
    pytest.param("int8", "prepared", 1, 8, id="middle, prepared, int8"),
    pytest.param("fp32", "saving", 1, 6, id="while it saves"),
    pytest.param("fp32", "basis", 1, 1, id="between the broadcast of U and its switch"),
    pytest.param("fp32", "prepared", 2, 6, id="behind a switch, which is undone"),
]


@pytest.mark.parametrize(("method", "phase", "stage", "step"), first(2, KILLS))
def test_a_killed_peer_is_replaced_by_a_spare(scene, method, phase, stage, step):
    s = scene(a_spec(method))
    s.start(4, s.fail_at(phase, stage, step))
    s.wait_for_fault("fail_at")
    summary = s.ends_well()
    assert len(s.dead()) == 1
    assert summary["generations"] >= 2


def test_a_peer_whose_device_hangs_goes_and_says_so(scene):
    """Its process lives, and sends heartbeats."""
    s = scene(a_spec(limits={"device_seconds": 30.0}))  # more than any piece of work takes on a busy machine
    s.start(4, {"kind": "stuck_device", "stage": 1, "step": 8})
    [sent_away] = s.wait_for(lambda: s.events("peer_dismissed"), "nobody noticed")
    assert sent_away["reason"]["trouble"] == {"kind": "device_stuck", "seconds": 30.0}
    assert sent_away["stage"] == 1
    gone = int(sent_away["name"].removeprefix("peer-"))
    ended = s.pool.peers[gone].result()
    assert (ended["exit"], ended["reason"]) == (3, "device_stuck")
    s.peers.remove(gone)
    assert s.ends_well()["generations"] >= 2


def test_a_step_that_stands_still_is_begun_again(scene):
    s = scene(a_spec())
    s.start(3, {"kind": "lose_message", "step": 8}, {"kind": "impatient", "seconds": 3})
    [stalled] = s.wait_for(lambda: s.events("stalled"), "nobody noticed")
    assert (stalled["waiting"]["task"], stalled["waiting"]["step"]) == ("step", 8)
    summary = s.ends_well()
    assert summary["generations"] >= 2
    assert summary["steps_redone"] == 0, "all that was decided is in memory"


def test_ids_that_come_out_of_order_are_asked_for_again(scene):
    s = scene(a_spec())
    s.start(3, coordinator_fault={"kind": "feed_out_of_order", "step": 8})
    relinking = s.wait_for(lambda: s.events("relinking", stage=0), "nobody noticed")[0]
    assert relinking["reason"]["trouble"]["kind"] == "invalid_feed"
    assert s.ends_well()["steps_redone"] == 0


@pytest.mark.full
def test_two_adjacent_peers_are_killed_at_once(scene):
    s = scene(a_spec())
    s.start(3, {"kind": "slow", "seconds": 0.05})
    s.wait_for_step(7)
    two = [s.holder(0), s.holder(1)]
    for i in two:
        s.kill(i)
    for i in two:
        s.join(i)
    assert s.ends_well()["generations"] >= 2


@pytest.mark.parametrize("method", first(1, ["int8", "two streams"]))
def test_all_peers_are_killed(scene, method):
    s = scene(a_spec(method))
    s.start(3, {"kind": "slow", "seconds": 0.05})
    s.wait_for_step(5)
    for i in s.peers:
        s.kill(i)
    for i in s.peers:
        s.join(i)
    assert s.ends_well()["generations"] >= 2


@pytest.mark.parametrize("phase", first(2, ["commit", "ended", "grant", "ready", "adopted"]))
def test_the_coordinator_is_killed(scene, phase):
    """Its peers keep what they have: nothing is redone. What was not copied before the end is copied after it."""
    store = {"copy_to": "store"} if phase == "ended" else {}  # relative to the spec file's folder
    s = scene(a_spec("int8" if phase == "commit" else "fp32", **store))
    peers = 4 if phase == "ended" else 3  # a spare has to hear of the end too
    s.start(peers, coordinator_fault=s.fail_at(phase, 0, {"adopted": 4, "ended": -1}.get(phase, 7)))
    s.wait_for_fault("fail_at")
    s.wait_for(lambda: s.pool.coordinator.gone, "the signal did not end it")
    shutil.rmtree(s.run_dir / "store", ignore_errors=True)
    s.restart_coordinator()
    summary = s.ends_well()
    assert summary["steps_redone"] == 0
    if store:
        kept = {p.name for p in (s.run_dir / "snapshots").iterdir()}
        assert {p.name for p in s.run_dir.glob("store/*/[0-9]*")} == kept
    rows = [json.loads(line) for line in (s.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["event"] == "step"]
    assert [row["step"] for row in steps] == list(range(1, 13)), "each has its row"
    assert all(math.isfinite(row["loss"]) for row in steps)
    took = sum(row["seconds"] or 0.0 for row in steps)
    assert summary["seconds"] >= took - 0.1, "of the whole run, not since the coordinator was started again"


@pytest.mark.full
def test_the_coordinator_and_a_peer_are_killed_together(scene):
    s = scene(a_spec())
    s.start(3, {"kind": "slow", "seconds": 0.05})
    s.wait_for_step(7)
    victim = s.holder(1)
    s.kill_coordinator()
    s.kill(victim)
    s.restart_coordinator()
    s.join(victim)
    assert s.ends_well()["generations"] >= 2


def test_everything_is_killed(scene):
    s = scene(a_spec())
    s.start(3, {"kind": "slow", "seconds": 0.05})
    s.wait_for_step(8)
    s.kill_coordinator()
    for i in s.peers:
        s.kill(i)
    s.restart_coordinator()
    for i in s.peers:
        s.join(i)
    assert s.ends_well()["generations"] >= 2


@pytest.mark.parametrize("spares", first(1, [1, 0]))
def test_a_peer_that_is_stopped_for_longer_than_its_lease(scene, spares):
    """Without a spare it goes on with what it has; with one it comes back to find its place taken."""
    s = scene(a_spec())
    s.start(3 + spares, s.fail_at("forward", 1, 8, "SIGSTOP"))
    s.wait_for_fault("fail_at")
    s.wait_for(lambda: "no_heartbeat" in s.reasons("peer_lost"), "nobody noticed")
    if spares:
        s.wait_for(lambda: s.events("rolled_back"), "nobody took over")
        kinds = [event["kind"] for event in s.events()]
        assert kinds.index("stage_prepared") < kinds.index("rolled_back"), "not before the spare could take over"
    s.go_on()
    assert s.ends_well()["lineage"] == 1 + spares


@pytest.mark.parametrize("spares", first(1, [1, 0]))
def test_a_peer_whose_line_is_cut_for_longer_than_its_lease(scene, spares):
    """As with one that is stopped; but it goes on computing, and finds out by itself."""
    s = scene(a_spec())
    with cable() as line:
        s.start(2, {"kind": "slow", "seconds": 0.08})
        s.join(2, through=line)
        s.wait_for_step(1)
        if spares:
            s.join(3)
            s.wait_for(lambda: len(s.status().peers) == 4, "the spare did not come")
        s.cut(line)
        s.wait_for(lambda: "no_heartbeat" in s.reasons("peer_lost"), "nobody noticed")
        if spares:
            s.wait_for(lambda: s.events("stages_assigned", generation=2), "nobody took over")
        line.mend()
        assert s.ends_well()["generations"] == 1 + spares


@pytest.mark.parametrize(
    ("phase", "stage", "step"),
    first(1, [("forward", 1, 11), ("forward", 0, 11), ("decided", 0, 4), ("prepared", 2, 10)]),
)
def test_a_silent_holder_is_waited_for_while_that_costs_less_than_a_rollback(scene, phase, stage, step):
    """A spare is there, and would have to begin at the beginning. Nothing is done again, nor is the step under way."""
    s = scene(a_spec(interval=0))
    s.start(4, s.fail_at(phase, stage, step, "SIGSTOP"))
    s.wait_for_fault("fail_at")
    s.wait_for(lambda: s.events("holder_away"), "nobody noticed")
    s.go_on()  # after more than its lease, and well before what a rollback would cost
    summary = s.ends_well()
    assert (summary["steps_redone"], summary["generations"]) == (0, 1)


@pytest.mark.full
def test_a_spare_that_cannot_build_the_stage_of_a_silent_holder_costs_nothing(scene):
    """Nothing is given up before a spare has built the stage: the holder comes back to it, minutes later if need be."""
    s = scene(a_spec())
    s.start(3, s.fail_at("forward", 1, 8, "SIGSTOP"))
    s.wait_for_step(2)
    s.join(3, fault={"kind": "cannot_build"})
    s.wait_for_fault("fail_at")
    s.wait_for(lambda: "peer_report" in s.reasons("peer_dismissed"), "it did not say so")
    assert s.pool.peers[3].result()["reason"] == "out_of_memory"
    s.peers.remove(3)
    time.sleep(3.0)  # in all longer than two leases
    s.go_on()
    summary = s.ends_well()
    assert (summary["steps_redone"], summary["generations"]) == (0, 1)


def test_a_peer_that_claims_the_stage_of_a_silent_holder_is_named_and_sent_away(scene):
    s = scene(a_spec())
    s.start(3, s.fail_at("forward", 1, 8, "SIGSTOP"))
    s.wait_for_fault("fail_at")
    s.wait_for(lambda: s.events("holder_away"), "nobody noticed")
    s.join(3, fault={"kind": "false_claim", "stage": 1})
    [sent_away] = s.wait_for(lambda: s.events("peer_dismissed"), "nobody found out")
    assert (sent_away["name"], sent_away["reason"]) == ("peer-3", {"kind": "false_claim", "stage": 1})
    assert s.pool.peers[3].result()["exit"] == 3
    s.peers.remove(3)
    s.go_on()
    summary = s.ends_well()
    assert (summary["steps_redone"], summary["generations"]) == (0, 1)


def test_a_peer_that_is_silent_for_less_than_its_lease_is_not_missed(scene):
    s = scene(a_spec(limits={"lease_seconds": 30.0}))
    s.start(4, s.fail_at("forward", 1, 8, "SIGSTOP"))
    s.wait_for_fault("fail_at")
    time.sleep(2.0)  # less than its lease
    s.go_on()
    assert s.ends_well()["generations"] == 1


def test_a_spare_that_cannot_build_the_stage_says_so_and_the_next_is_asked(scene):
    s = scene(a_spec())
    s.start(4, {"kind": "cannot_build"})
    s.wait_for_step(7)
    victim = s.holder(1)
    s.kill(victim)
    s.wait_for_fault("cannot_build")
    s.wait_for(lambda: "peer_report" in s.reasons("peer_dismissed"), "it did not say so")
    s.join(victim)
    led = s.pool.coordinator.result()
    assert led["exit"] == 0, led
    results = [s.pool.peers[i].result() for i in s.peers]
    [failed] = [r for r in results if r["exit"]]
    assert failed["reason"] == "out_of_memory"
    assert json.loads((s.run_dir / "summary.json").read_text())["weights_sha256"] == expected(s.spec)
    s.check_faults()


def test_a_commit_that_does_not_reach_a_live_peer_is_told_again(scene):
    s = scene(a_spec())
    s.start(3, coordinator_fault={"kind": "lose_turn", "stage": 1, "step": 7})
    summary = s.ends_well()
    assert summary["steps_redone"] == 0
    assert s.events("peer_returned")


@pytest.mark.parametrize("what", first(1, ["u", "t_fixed"]))
def test_a_flipped_bit_is_found_mended_and_what_it_spoilt_is_redone(scene, what):
    s = scene(a_spec())
    s.start(3, {"kind": "flip_bit", "what": what, "after_step": 6})
    summary = s.ends_well()
    [back] = s.events("rolled_back")
    assert (back["reason"]["kind"], back["reason"]["what"]) == ("stage_diverged", {"u": "U"}.get(what, "T_fixed"))
    assert summary["lineage"] == 2


@pytest.mark.full
def test_bad_numbers_that_do_not_come_back_are_redone(scene):
    """A gradient that is not finite, once: the run returns to before it, if its spec says so."""
    s = scene(a_spec(limits={"nonfinite_steps": 1, "nonfinite_action": "rollback"}))
    bad = {"step": 8, "microbatch": 1, "boundary": 1, "leg": "backward"}
    s.start(3, {"kind": "poison", "once": True, **bad})
    summary = s.ends_well()
    assert (summary["lineage"], summary["steps_redone"]) == (2, 2), "back to step 6"


def test_a_peer_that_leaves_hands_its_state_over(scene):
    s = scene(a_spec())
    s.start(4, {"kind": "slow", "seconds": 0.05})
    s.wait_for_step(5)
    os.kill(s.pool.peers[s.holder(1)].pid, signal.SIGINT)
    led = s.pool.coordinator.result()
    assert led["exit"] == 0, led
    assert sorted(s.pool.peers[i].result()["exit"] for i in s.peers) == [0, 0, 0, 130]
    summary = json.loads((s.run_dir / "summary.json").read_text())
    assert summary["weights_sha256"] == expected(s.spec)
    assert summary["steps_redone"] == 0
