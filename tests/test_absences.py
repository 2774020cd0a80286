"""Holders that are away: what waiting costs against what a rollback costs, and what the machine makes of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from conftest import make_spec
from hypothesis import given
from hypothesis import strategies as st
from machine_bench import SILENT, Bench, holding, peer, preparing, to_step, told

from protomodels_cli.coordinator import assigning, notices, reasons
from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator.history import Forgot, Placed, RolledBack
from protomodels_cli.coordinator.readiness import LEAST
from protomodels_cli.coordinator.recovery import FETCH_AFTER, Costs, decide, patience
from protomodels_cli.wire.troubles import OutOfMemory

LEASE = 5.0


@pytest.mark.parametrize(
    ("redo", "fetch", "away", "longest", "ready", "action"),
    [
        (600.0, 400.0, 6.0, 0.0, True, "wait"),  # a blip, ten minutes after the newest snapshot
        (600.0, 400.0, 6.0, 0.0, False, "wait"),  # most are over before a fetch would pay
        (600.0, 400.0, 30.0, 0.0, False, "fetch"),
        (600.0, 400.0, 599.0, 0.0, True, "wait"),
        (600.0, 400.0, 600.0, 0.0, True, "replace"),
        (600.0, 400.0, 601.0, 0.0, False, "fetch"),  # nobody can take over yet
        (600.0, 400.0, 700.0, 400.0, True, "wait"),  # it was away for long before, and came back
        (600.0, 400.0, 900.0, 400.0, True, "replace"),  # … but never for as long
        (600.0, 400.0, 1000.0, 900.0, True, "replace"),
        (0.0, 0.0, 6.0, 0.0, True, "wait"),  # a rollback costs nothing: two leases all the same
        (0.0, 0.0, 10.0, 0.0, True, "replace"),
    ],
)
def test_waiting_and_replacing(redo, fetch, away, longest, ready, action):
    assert decide(Costs(redo, fetch), away, longest, LEASE, ready) == action


SECONDS = st.floats(0.0, 1e5)


@given(SECONDS, SECONDS, st.one_of(SECONDS, st.just(math.inf)), SECONDS)
def test_it_costs_at_most_twice_the_better_choice_and_a_lease_and_a_fetch(redo, fetch, away, longest):
    """`away`: how long the holder would be, if it was waited for; infinite: it does not come back."""
    costs, t, ready = Costs(redo, fetch), 0.0, math.inf
    while True:  # the moments at which the answer may change
        found = decide(costs, t, longest, LEASE, ready=t >= ready)
        if found == "replace" or t >= away:
            break
        if found == "fetch" and ready == math.inf:
            ready = t + fetch
        limits = (patience(costs, t, longest, LEASE), patience(costs, t, 0.0, LEASE), ready, away)
        moments = [m for m in (*limits, min(FETCH_AFTER, limits[0] / 4), 2.0 * longest) if t < m < math.inf]
        t = math.nextafter(min(moments), math.inf) if moments else away
    lost = t + redo if found == "replace" else away
    best = min(away, LEASE + fetch + redo)
    assert lost <= (2 * best + LEASE + fetch) * (1 + 1e-9) + FETCH_AFTER * (fetch > 0)


def a_run(**snapshots: int) -> Bench:
    """At step 6, with a spare; steps take 0.2 s."""
    b = Bench(make_spec(stages=2, steps=9, snapshots={"interval": 3, **snapshots}))
    b.join(0, 1, 2)
    to_step(b, 6)
    return b


def test_a_silent_holder_that_comes_back_goes_on_where_it_was():
    b = a_run()
    gone, task, generation = b.state.history.holders[0], b.state.task, b.state.history.generation
    b.tell(ev.Left(gone, SILENT))
    assert b.waits() == reasons.HoldersDisconnected((0,))
    [away] = told(b.commands, notices.HolderAway)
    assert (away.peer, away.stage, away.steps) == (gone, 0, b.state.history.step - b.state.history.newest.step)
    b.tell(ev.Tick())
    back = replace(peer(int(gone[1:])), holding=holding(b, 0, generation=generation))
    commands = b.tell(ev.Joined(back))
    assert [c.peer for c in commands if isinstance(c, ev.GoOn)] == [gone]
    assert (b.state.task, b.state.history.generation) == (task, generation)
    b.finish()
    assert (b.state.history.redone, b.state.history.generation) == (0, generation)


def test_one_that_does_not_come_back_is_replaced_when_waiting_has_cost_as_much_and_its_stage_is_built():
    b = a_run()
    gone, before = b.state.history.holders[0], len(b.records)
    b.tell(ev.Left(gone, SILENT))
    wanted = b.state.history.newest.as_parts()[0]
    assert preparing(b.tell(ev.Tick())) == [("p2", wanted)]
    assert not any(isinstance(c, ev.PrepareStage) for c in b.tell(ev.Tick())), "once"
    b.now += 50.0
    b.tell(ev.Tick())
    b.tell(ev.Prefetched("p2", wanted))
    assert b.records[before:] == [], "the stage is not built yet, and that may fail"
    b.tell(ev.Ready("p2", replace(wanted, stage=1)))
    assert b.records[before:] == [], "another stage"
    commands = b.tell(ev.Ready("p2", wanted))
    assert [type(r) for r in b.records[before:]] == [RolledBack, Placed]
    assert b.state.history.holders[0] == "p2"
    assert [c.peer for c in commands if isinstance(c, ev.AssignStage) and not c.reuse] == list(b.state.history.holders)
    assert b.state.saving.pace.build == pytest.approx(0.2), "from the part on its disk to its word"
    b.finish()
    assert not b.state.seats.preparing


def test_a_holder_that_comes_back_before_its_time_is_up_finds_its_stage_though_another_has_built_it():
    b = a_run()
    gone, generation = b.state.history.holders[0], b.state.history.generation
    b.state = replace(b.state, measured=replace(b.state.measured, step_seconds=(100.0,) * 5))
    b.tell(ev.Left(gone, SILENT))
    b.now += 30.0
    [asked] = [c for c in b.tell(ev.Tick()) if isinstance(c, ev.PrepareStage)]
    assert told(b.tell(ev.Ready(asked.peer, asked.part)), notices.StagePrepared)
    assert b.state.history.generation == generation
    back = replace(peer(int(gone[1:])), holding=holding(b, 0, generation=generation))
    commands = b.tell(ev.Joined(back))
    assert [c.peer for c in commands if isinstance(c, ev.GoOn)] == [gone]
    assert ev.MakeSpare(asked.peer, reasons.AllStagesHeld(2)) in commands, "it drops what it has built"
    assert not b.state.seats.preparing
    b.finish()
    assert (b.state.history.redone, b.state.history.generation) == (0, generation)


def test_a_spare_that_cannot_build_costs_nothing_and_the_next_is_asked():
    b = a_run()
    b.join(3)
    gone, before = b.state.history.holders[0], len(b.records)
    b.tell(ev.Left(gone, SILENT))
    [first] = [c for c in b.tell(ev.Tick()) if isinstance(c, ev.PrepareStage)]
    b.tell(ev.Trouble(first.peer, reasons.PeerReport(OutOfMemory("no room"))))
    [second] = [c for c in b.tell(ev.Tick()) if isinstance(c, ev.PrepareStage)]
    assert {first.peer, second.peer} == {"p2", "p3"}
    assert b.records[before:] == []
    b.now += 50.0
    b.tell(ev.Ready(second.peer, second.part))
    assert b.state.history.holders[0] == second.peer
    b.finish()


def test_a_snapshot_that_no_spare_can_build_from_gives_way_to_the_one_before_and_nothing_is_rolled_back_yet():
    b = a_run(interval=2)
    gone, before, newest = b.state.history.holders[0], len(b.records), b.state.history.newest
    b.tell(ev.Left(gone, SILENT))
    [first] = [c for c in b.tell(ev.Tick()) if isinstance(c, ev.PrepareStage)]
    b.tell(ev.SnapshotLost("p2", 0, *newest.key, "not a number"))
    assert b.records[before:] == [Forgot(*newest.key, unusable=True)]
    [second] = [c for c in b.tell(ev.Tick()) if isinstance(c, ev.PrepareStage)]
    assert (second.peer, second.part.step) == ("p2", first.part.step - 2)
    lost = ev.SnapshotLost("p2", 0, *second.part.snapshot, "its own disk", whole_here=True)
    for _ in range(assigning.DISMISS_AFTER - 1):
        assert b.tell(lost) == [second], "it may have been a moment's trouble"
    b.tell(lost)
    assert "p2" not in b.state.peers
    back = replace(peer(int(gone[1:])), holding=holding(b, 0, generation=b.state.history.generation))
    b.tell(ev.Joined(back))
    b.finish()
    assert b.state.history.redone == 0


def test_whoever_is_late_comes_after_the_others_and_both_go_on():
    b = a_run()
    b.join(3)
    gone = b.state.history.holders[0]
    b.tell(ev.Left(gone, SILENT))
    [first] = [c for c in b.tell(ev.Tick()) if isinstance(c, ev.PrepareStage)]
    b.now += LEAST
    [second] = [c for c in b.tell(ev.Tick()) if isinstance(c, ev.PrepareStage)]
    assert second.peer != first.peer
    commands = b.tell(ev.Ready(first.peer, first.part))
    assert b.state.history.holders[0] == first.peer, "the first that is ready"
    assert ev.MakeSpare(second.peer, reasons.AllStagesHeld(2)) in commands
    b.finish()


@pytest.mark.parametrize("others", [0, 1])
def test_a_spare_that_is_not_ready_within_the_limit_is_dismissed_where_another_is_here(others):
    b = Bench(make_spec(stages=2, steps=9, snapshots={"interval": 3}, limits={"restore_seconds": 20.0}))
    b.join(0, 1, 2)
    to_step(b, 6)
    gone, before = b.state.history.holders[0], len(b.records)
    b.tell(ev.Left(gone, SILENT))
    [asked] = [c for c in b.tell(ev.Tick()) if isinstance(c, ev.PrepareStage)]
    b.join(*range(3, 3 + others))
    b.now += 20.0
    commands = b.tell(ev.Tick())
    dismissed = [(c.peer, c.why) for c in commands if isinstance(c, ev.Dismiss)]
    assert dismissed == [("p2", reasons.TooSlow(0, "restore", 20.0))] * others
    assert [c.peer for c in commands if isinstance(c, ev.PrepareStage)] == ["p3"] * others
    assert b.records[before:] == []
    b.tell(ev.Ready("p3" if others else "p2", asked.part))
    assert b.state.history.holders[0] == ("p3" if others else "p2")
    b.finish()


def test_a_part_that_is_not_there_after_all_is_no_reason_to_prefer_anybody():
    b = Bench(make_spec(stages=2, steps=9, snapshots={"interval": 3}))
    b.join(0, 1, 2, 3)
    to_step(b, 6)
    part, held = b.state.history.newest.as_parts()[0], {1: b.state.history.holders[1]}
    b.tell(ev.Left(b.state.history.holders[0], SILENT))
    b.tell(ev.Prefetched("p3", part))
    assert assigning.fill(b.state, held, b.now) == {0: "p3"}
    assert [c.notice.kind for c in b.tell(ev.Lacking("p3", part)) if isinstance(c, ev.Tell)] == ["part_not_there"]
    assert assigning.fill(b.state, held, b.now) == {0: "p2"}
    assert b.tell(ev.Lacking("p3", part)) == [], "it is said once"


@pytest.mark.parametrize("built", [False, True])
def test_a_spare_whose_stream_is_replaced_unnoticed_is_told_again_what_to_build(built):
    b = a_run()
    b.state = replace(b.state, measured=replace(b.state.measured, step_seconds=(100.0,) * 5))
    b.tell(ev.Left(b.state.history.holders[0], SILENT))
    b.now += 30
    [asked] = [c for c in b.tell(ev.Tick()) if isinstance(c, ev.PrepareStage)]
    if built:
        b.tell(ev.Ready(asked.peer, asked.part))
    commands = b.tell(ev.Joined(peer(int(asked.peer[1:])))) + b.tell(ev.Tick())
    assert [c for c in commands if isinstance(c, ev.MakeSpare | ev.PrepareStage)][-1] == asked
    assert not b.state.seats.preparing[asked.peer].ready


def test_the_limit_of_who_builds_a_stage_goes_on_while_others_blink():
    b = Bench(make_spec(stages=3, steps=9, snapshots={"interval": 3}, limits={"restore_seconds": 20.0}))
    b.join(0, 1, 2, 3, 4)
    to_step(b, 6)
    b.lose(b.state.history.holders[0])
    never, blinks = b.state.history.holders[:2]
    for pause in (15, 15):
        for stage in (1, 2):
            b.done(stage)
        b.now += pause
        told_again = [c for c in b.tell(ev.Left(blinks, SILENT)) if isinstance(c, ev.PrepareStage)]
        assert [c.peer for c in told_again] == [never]
        b.tell(ev.Joined(replace(peer(int(blinks[1:])), holding=holding(b, 1))))
    assert never not in b.state.history.holders


def test_nobody_is_replaced_by_nobody():
    b = Bench(make_spec(stages=2, steps=9, snapshots={"interval": 3}))
    b.join(0, 1)
    to_step(b, 6)
    gone, generation = b.state.history.holders[0], b.state.history.generation
    b.tell(ev.Left(gone, SILENT))
    b.now += 3600.0
    b.tell(ev.Tick())
    assert b.waits() == reasons.HoldersDisconnected((0,))
    b.tell(ev.Joined(replace(peer(int(gone[1:])), holding=holding(b, 0, generation=generation))))
    b.finish()
    assert b.state.history.redone == 0


def test_where_a_rollback_cannot_be_avoided_the_silent_are_not_waited_for():
    b = Bench(make_spec(stages=2, steps=9, snapshots={"interval": 3}))
    b.join(0, 1, 2, 3)
    to_step(b, 6)
    silent, dead = b.state.history.holders
    b.tell(ev.Left(silent, SILENT))
    b.lose(dead)
    assert set(b.state.history.holders) == {"p2", "p3"}
    b.finish()


def test_only_who_was_given_a_stage_can_have_it():
    b = a_run()
    gone, generation = b.state.history.holders[0], b.state.history.generation
    b.tell(ev.Left(gone, SILENT))
    liar = replace(peer(7), holding=holding(b, 0, generation=generation))
    commands = b.tell(ev.Joined(liar))
    [sent_away] = [c for c in commands if isinstance(c, ev.Dismiss)]
    assert (sent_away.peer, sent_away.why) == ("p7", reasons.FalseClaim(0))
    assert "p7" not in b.state.peers
    b.tell(ev.Joined(replace(peer(int(gone[1:])), holding=holding(b, 0, generation=generation))))
    b.finish()
    assert b.state.history.redone == 0
