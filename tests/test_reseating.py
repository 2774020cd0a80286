"""A stage of a slow holder is given to a faster spare at a snapshot: whether that pays, and that nothing is redone."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import pytest
from conftest import make_spec
from hypothesis import given
from hypothesis import strategies as st
from machine_bench import CUT_OFF, SILENT, Bench, holding, peer, preparing, to_step, told

from protomodels_cli.coordinator import assigning, readiness, reasons, speeds
from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator.history import Decided, RolledBack
from protomodels_cli.coordinator.notices import StageGivenUp
from protomodels_cli.coordinator.reseat_notices import StageNotReseated, StageReseated, StageReseating
from protomodels_cli.coordinator.seats import Preparation
from protomodels_cli.coordinator.snapshots.failures import NotWritten
from protomodels_cli.coordinator.status import phase_of
from protomodels_cli.cost.memory import stage_memory
from protomodels_cli.cost.saving import PEER_SECONDS
from protomodels_cli.spec import RunSpec
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.troubles import OutOfMemory
from protomodels_cli.wire.usage import Usage

SLOW, FAST = 10.0, 1.0  # seconds that a stage computes in a step


@pytest.mark.parametrize(
    ("step", "expected", "pause", "left", "verdict"),
    [
        (160.0, 40.0, 780.0, 10_000, "reseat"),  # an 8B run, twelve minutes for parts of 3.6 GiB
        (160.0, 120.0, 780.0, 10_000, "reseat"),  # a quarter shorter
        (160.0, 121.0, 780.0, 10_000, "gains_too_little"),
        (160.0, 200.0, 0.0, 10_000, "gains_too_little"),
        (160.0, 40.0, 780.0, 13, "reseat"),  # 26 minutes, twice the pause
        (160.0, 40.0, 781.0, 13, "pause_too_long"),
        (160.0, 40.0, 780.0, 0, "pause_too_long"),  # the last step
        (0.2, 0.1, 3.0, 50, "pause_too_long"),
        (1e5, 7e4, 1e5, 10**9, "pause_too_long"),  # who knows whether the spare stays for so long
    ],
)
def test_what_is_saved_against_the_pause(step, expected, pause, left, verdict):
    assert speeds.decide(speeds.Weighed(step, expected, pause, left)) == verdict


SECONDS = st.floats(1e-3, 1e5)


@given(SECONDS, SECONDS, SECONDS, st.integers(0, 10**6))
def test_of_two_peers_only_one_can_be_worth_a_change(a, b, pause, left):
    """So that they never take turns, as long as what was measured of both stands."""
    there, back = (speeds.decide(speeds.Weighed(*pair, pause, left)) for pair in ((a, b), (b, a)))
    assert "gains_too_little" in (there, back)
    if there == "reseat":
        assert (a - b) * min(left, PEER_SECONDS / b) >= 2 * pause
        assert b <= 0.75 * a


class Slow(Bench):
    """A bench whose peers compute for as long as they need."""

    def __init__(self, spec: RunSpec, compute: dict[str, float]):
        super().__init__(spec)
        self.compute = compute

    def done(self, stage: int, **changes: Any) -> list[ev.Command]:
        holder = self.state.history.holders[stage]
        self.now += self.compute.get(holder, FAST)
        return super().done(stage, usage=Usage(compute_s=self.compute.get(holder, FAST)), **changes)

    def answer(self) -> None:
        """A spare that is asked builds the stage."""
        spare = self.state.seats.handover.spare if self.state.seats.handover is not None else ""
        if spare in self.state.seats.preparing:
            self.tell(ev.Ready(spare, self.state.seats.preparing[spare].part))
        else:
            super().answer()

    @property
    def decided(self) -> list[int]:
        return [r.step for r in self.records if isinstance(r, Decided)]

    @property
    def asked(self) -> ev.PrepareStage:
        [asked] = [c for c in self.commands if isinstance(c, ev.PrepareStage)]
        return asked


def a_run(steps: int = 60, **sections: Any) -> Slow:
    """p1 has stage 1 and is slow; p2 is a spare with the same benchmark as all the others."""
    spec = make_spec(stages=2, steps=steps, snapshots={"interval": 6}, **sections)
    b = Slow(spec, {"p1": SLOW})
    b.join(0, 1, 2)
    return b


def about_to_change() -> Slow:
    """At the second snapshot, which has not arrived yet."""
    b = a_run()
    to_step(b, 12)
    b.answer_until(lambda: b.state.seats.handover, lambda: [b.done(i) for i in range(2)])
    return b


def saved() -> Slow:
    """The spare was asked."""
    b = about_to_change()
    b.answer_until(lambda: b.state.seats.preparing)
    return b


def goes_on(b: Slow) -> None:
    """Where it stood, in the same generation, and to the end."""
    assert b.state.seats.handover is None
    assert b.state.task is not None
    assert (b.state.task.kind, b.state.task.step, b.state.history.generation) == ("step", 13, 1)
    b.finish()
    assert b.decided == list(range(1, 61))


def test_the_stage_goes_to_the_spare_and_no_step_is_redone():
    b = about_to_change()
    [begun] = told(b.commands, StageReseating)
    assert (begun.step, begun.reason.stage, begun.reason.holder, begun.reason.spare) == (12, 1, "name-1", "name-2")
    assert b.waits() == begun.reason
    assert phase_of(b.state) == pb.RunStatus.ASSIGNING
    assert not b.state.seats.preparing, "there is nothing to fetch yet"
    before = b.state.history.holders
    b.answer_until(lambda: b.state.seats.preparing)
    assert (b.asked.peer, b.asked.part) == ("p2", b.state.history.newest.as_parts()[1])
    assert b.state.history.newest.step == b.state.history.step == 12
    b.tell(ev.Tick())
    assert b.state.history.holders == before, "nothing is given up before the spare is ready"
    commands = b.tell(ev.Ready("p2", b.asked.part))
    assert [(c.peer, c.reuse) for c in commands if isinstance(c, ev.AssignStage)] == [("p0", True), ("p2", False)]
    assert ev.Wait("p1", reasons.StageTried(1, "name-2")) in commands
    assert ev.MakeSpare("p1", reasons.AllStagesHeld(2)) not in commands
    [done] = told(commands, StageReseated)
    assert (done.stage, done.peer, done.before) == (1, "p2", "p1")
    to_step(b, 14)
    assert ev.MakeSpare("p1", reasons.AllStagesHeld(2)) in b.commands, "its stage was not given up before a step"
    to_step(b, 24)
    assert (b.state.history.lineage, b.state.history.generation) == (1, 2)
    b.finish()
    assert b.decided == list(range(1, 61))
    assert not any(isinstance(r, RolledBack) for r in b.records)
    assert len(told(b.commands, StageReseated)) == 1, "p1's benchmark is as good as p2's, and it was measured"


def test_who_is_slower_than_it_said_gives_the_stage_back_and_is_not_asked_again():
    b = saved()
    b.compute["p2"] = 5 * SLOW
    b.finish()
    assert [n.peer for n in told(b.commands, StageReseated)] == ["p2", "p1"]
    assert b.decided == list(range(1, 61))


@pytest.mark.parametrize("why", ["spare_gone", "not_ready", "not_saved", "out_of_memory", "unusable"])
def test_whatever_becomes_of_the_spare_or_the_snapshot_the_holder_goes_on(why):
    b = about_to_change() if why == "not_saved" else saved()
    match why:
        case "spare_gone":
            b.tell(ev.Left("p2", SILENT))
        case "out_of_memory":
            b.tell(ev.Trouble("p2", reasons.PeerReport(OutOfMemory("no room"))))
        case "not_ready":
            b.now += readiness.LEAST
            assert ev.MakeSpare("p2", reasons.AllStagesHeld(2)) in b.tell(ev.Tick())
        case "not_saved":
            b.tell(ev.PartFailed("p0", 1, 12, 0, NotWritten("full")))
        case "unusable":
            b.tell(ev.SnapshotLost("p2", 0, 1, 12, "damaged"))
    [stays] = told(b.commands, StageNotReseated)
    kinds = {"out_of_memory": "spare_gone", "unusable": "not_saved"}
    assert (stays.stage, stays.holder, stays.spare, stays.why) == (1, "p1", "p2", kinds.get(why, why))
    assert "p2" not in b.state.seats.preparing
    goes_on(b)


def test_a_spare_that_was_not_ready_in_time_costs_no_second_pause():
    b = saved()
    b.now += readiness.LEAST
    b.tell(ev.Tick())
    b.finish()
    assert len(told(b.commands, StageReseating)) == 1
    assert b.state.history.holders == ("p0", "p1")


def test_an_upload_that_takes_too_long_is_not_waited_for_and_goes_on_beside_the_steps():
    b = about_to_change()
    b.now += readiness.LEAST
    b.tell(ev.Tick())
    assert [mark.step for mark in b.state.history.pending] == [12]
    assert [n.why for n in told(b.commands, StageNotReseated)] == ["not_saved"]
    goes_on(b)


def test_a_spare_that_reconnects_is_asked_once_more():
    b = saved()
    commands = b.tell(ev.Joined(peer(2)))
    made, asked = [c for c in commands if isinstance(c, ev.MakeSpare | ev.PrepareStage)]
    assert made == ev.MakeSpare("p2", reasons.AllStagesHeld(2)), "it has dropped what it had"
    assert preparing([asked]) == [("p2", b.state.history.newest.as_parts()[1])]


def test_the_slow_holder_may_die_meanwhile():
    b = saved()
    b.lose("p1")
    assert b.state.history.holders == ("p0", "p2")
    b.finish()
    assert b.decided == list(range(1, 61))


def test_another_holder_may_be_away_meanwhile_and_come_back():
    b = saved()
    b.tell(ev.Joined(peer(3)))
    b.tell(ev.Left("p0", SILENT))
    b.tell(ev.Ready("p2", b.asked.part))
    assert ("p3", b.state.history.newest.as_parts()[0]) in preparing(b.commands), "p2 is at work already"
    assert b.state.history.generation == 1
    b.tell(ev.Joined(replace(peer(0), holding=holding(b, 0, generation=1))))
    assert b.state.history.holders == ("p0", "p2")
    b.finish()
    assert b.decided == list(range(1, 61))


def test_a_spare_that_is_needed_for_a_lost_stage_goes_there():
    b = saved()
    b.tell(ev.Left("p0", SILENT))
    b.now += 30.0
    b.tell(ev.Tick())
    part = b.state.history.newest.as_parts()[0]
    assert ("p2", part) in preparing(b.commands)
    assert [n.why for n in told(b.commands, StageNotReseated)] == ["spare_needed"]
    b.tell(ev.Ready("p2", part))
    assert b.state.history.holders == ("p2", "p1")
    b.finish()
    assert b.decided == list(range(1, 61)), "the snapshot is of the last step"


def never(b: Slow) -> None:
    b.finish()
    assert not told(b.commands, StageReseating)


def test_nobody_changes_for_little_or_for_the_last_steps():
    b = a_run()
    b.compute["p1"] = 1.4
    never(b)
    never(a_run(steps=13))


@pytest.mark.parametrize("change", [{"memory": 1}, {"flops": float("nan")}, {"flops": 1e8}])
def test_nobody_changes_without_a_spare_that_has_the_memory_and_the_speed(change):
    b = Slow(make_spec(stages=2, steps=60, snapshots={"interval": 6}), {"p1": SLOW})
    b.join(0, 1)
    b.tell(ev.Joined(replace(peer(2), **change)))
    never(b)


@pytest.mark.parametrize("room", [1, 2])
def test_a_spare_on_the_holders_machine_must_have_room_for_the_stage_beside_it(room):
    spec = make_spec(stages=2, steps=60, snapshots={"interval": 6})
    need = stage_memory(spec).total(2, 4, 0)
    b = Slow(spec, {"p1": SLOW})
    b.join(0)
    for i in (1, 2):
        b.tell(ev.Joined(replace(peer(i), memory=need, cards=("its memory",), card_memory=room * need)))
    assert b.state.history.holders == ("p0", "p1")
    b.finish()
    assert len(told(b.commands, StageReseated)) == room - 1


def test_the_fastest_of_the_spares_is_asked():
    b = Slow(make_spec(stages=2, steps=60, snapshots={"interval": 6}), {"p1": SLOW})
    b.join(0, 1, 2)
    for i, flops in ((3, 3e9), (4, 2e9)):
        b.tell(ev.Joined(replace(peer(i), flops=flops)))
    b.answer_until(lambda: b.state.seats.handover)
    assert b.state.seats.handover is not None
    assert b.state.seats.handover.spare == "p3"


def test_a_step_is_as_long_as_its_slowest_stage_for_all_microbatches_but_one():
    b = a_run()
    to_step(b, 12)
    computed = SLOW + FAST  # with two microbatches: half of both, and half of the slower
    assert speeds.step_now(b.state) >= computed
    gain = (SLOW - FAST) / 2 + (SLOW - FAST) / 2
    assert speeds.step_with(b.state, 1, FAST) == pytest.approx(speeds.step_now(b.state) - gain)
    assert speeds.step_with(b.state, 1, SLOW) == pytest.approx(speeds.step_now(b.state))
    assert speeds.step_with(b.state, 0, 0.0) == pytest.approx(speeds.step_now(b.state) - FAST / 2)


def test_of_two_who_could_take_over_the_faster_is_asked_unless_it_takes_an_hour_longer():
    b = Slow(make_spec(stages=2, steps=60, snapshots={"interval": 6}), {})
    b.join(0, 1)
    for i, flops in ((2, 1e8), (3, 1e9)):
        b.tell(ev.Joined(replace(peer(i), flops=flops)))
    to_step(b, 12)
    longer = speeds.slower(b.state, 0)
    assert longer["p2"] > 1 > longer["p3"] == 0
    left = replace(b.state, peers={i: p for i, p in b.state.peers.items() if i != "p0"})
    assert assigning.fill(left, {1: "p1"}, b.now) == {0: "p3"}
    late = Preparation(readiness.wanted(b.state.history, 0), b.now - readiness.LATE, None)
    assert assigning.fill(replace(left, seats=left.seats.prepared("p3", late)), {1: "p1"}, b.now) == {0: "p2"}


def tried(*more: int) -> Slow:
    """p2 has said that it is ready, and got stage 1 for a step. Every peer has its own token."""
    b = Slow(make_spec(stages=2, steps=60, snapshots={"interval": 6}), {"p1": SLOW})
    for i in (0, 1, 2, *more):
        b.tell(ev.Joined(replace(peer(i), token=f"t{i}", flops=1e11 if i == 2 else 1e9)))
    b.answer_until(lambda: b.state.history.generation == 2)
    assert b.state.history.holders == ("p0", "p2")
    return b


@pytest.mark.parametrize("at", ["build", "link", "step"])
def test_a_claim_of_speed_unseats_nobody_who_stands_still_gives_the_stage_back(at):
    """Within 30 s more than what is usual, from memory, with nothing redone."""
    b = tried()
    b.answer_until(lambda: b.state.task and b.state.task.kind == at)
    begun, usual = b.now, speeds_of(b)
    b.done(0)
    while b.state.history.holders == ("p0", "p2"):
        b.tell(ev.Tick())
        b.now += 0.4
        assert b.now - begun < 31 + 2 * usual
    assert b.state.history.holders == ("p0", "p1")
    assert [(c.peer, c.reuse) for c in b.commands if isinstance(c, ev.AssignStage)][-2:] == [("p0", True), ("p1", True)]
    [given_up] = told(b.commands, StageGivenUp)
    assert (given_up.peer, given_up.stage, given_up.reason.kind) == ("p2", 1, "too_slow")
    assert b.state.peers.keys() == {"p0", "p1", "p2"}, "nobody is dismissed"
    b.finish()
    assert b.decided == list(range(1, 61))
    assert len(told(b.commands, StageReseating)) == 1, "it had its turn"


def speeds_of(b: Slow) -> float:
    return statistics.median(b.state.measured.step_seconds)


def test_whoever_stood_still_is_asked_last_under_any_id_of_its_token():
    """A token gives 64 ids, and each of them claims to be the fastest; p1 is honest, and its token has had no turn."""
    b = tried()
    for i in range(10, 20):
        b.tell(ev.Joined(replace(peer(i), token="t2", flops=1e11)))
    honest = ("p0", "p1")
    b.now += 100
    b.tell(ev.Tick())
    assert b.state.history.holders == honest
    b.lose("p1")
    b.join(3)
    seen = {b.state.history.holders[1]}
    while b.state.history.holders[1] not in ("p1", "p3"):
        b.done(0)
        b.now += 40
        b.tell(ev.Tick())
        seen.add(b.state.history.holders[1])
    assert len(seen) <= 2
    b.finish()


def test_the_former_holder_may_be_gone_when_the_stage_is_given_back():
    b = tried(3)
    b.tell(ev.Left("p1", CUT_OFF))
    b.tell(ev.Joined(peer(1)))  # with nothing in memory
    b.now += 200
    b.tell(ev.Tick())
    assert b.state.history.holders[1] in ("p1", "p3")
    assert not b.state.seats.holds.get("p1")
    b.finish()
    assert b.decided == list(range(1, 61)), "the snapshot is of the last step"


@pytest.mark.parametrize("seated", [False, True])
def test_who_cannot_prove_that_it_has_the_part_had_its_turn(seated):
    """As a spare that prepares the stage, and as a holder that builds it."""
    b = saved()
    b.join(3)
    part = b.asked.part
    if seated:
        b.lose("p1")
        assert b.state.history.holders == ("p0", "p2")
    b.tell(ev.Lacking("p2", part, disproved=True))
    [given_up] = told(b.commands, StageGivenUp)
    assert (given_up.peer, given_up.reason) == ("p2", reasons.PartNotProved(1, 12))
    if not seated:
        assert [n.why for n in told(b.commands, StageNotReseated)] == ["not_ready"]
        assert b.state.history.holders == ("p0", "p1")
    else:
        assert b.state.history.holders == ("p0", "p3")
    b.finish()
    assert b.decided == list(range(1, 61))
