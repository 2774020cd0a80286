"""What the machine does when peers, links and itself fail, and when its owner speaks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from conftest import make_spec
from machine_bench import BROKEN, CUT_OFF, Bench, holding, peer, to_step, told

from protomodels_cli import timeouts
from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator import machine, no_placement, notices, reasons
from protomodels_cli.coordinator.history import (
    Decided,
    RolledBack,
)
from protomodels_cli.coordinator.status import describe


def test_who_is_lost_before_the_first_decision_is_replaced_and_the_cut_may_change():
    b = Bench(make_spec(stages=2, steps=3))
    b.join(0, 1, 2)
    b.answer(), b.answer()
    gone = b.state.history.holders[1]
    b.lose(gone)
    assert b.state.history.generation == 2
    assert gone not in b.state.history.holders
    b.finish()


def test_who_is_lost_later_is_replaced_from_the_newest_snapshot():
    b = Bench(make_spec(stages=2, steps=9, snapshots={"interval": 3}))
    b.join(0, 1, 2)
    to_step(b, 6)
    gone, stays = b.state.history.holders
    b.lose(gone)
    [back] = [r for r in b.records if isinstance(r, RolledBack)]
    assert (back.lineage, back.from_lineage, back.step) == (2, 1, 3)
    assert b.state.history.holders == ("p2", stays)
    placed = [c for c in b.commands if isinstance(c, ev.AssignStage)][-2:]
    assert [c.reuse for c in placed] == [False, False], "what the other has in memory is of another history now"
    b.finish()
    assert [r.step for r in b.records if isinstance(r, Decided)] == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 9]
    assert b.state.history.redone == 2


def test_the_speed_of_a_run_that_went_back_is_still_a_speed():
    b = Bench(make_spec(stages=2, steps=9, snapshots={"interval": 3}))
    b.join(0, 1, 2)
    to_step(b, 6)
    b.lose(b.state.history.holders[0])
    to_step(b, 5)
    after = describe(b.state, b.now, 0.0, 0)
    assert after.tokens_per_s > 0
    assert after.eta_s > 0


def test_without_a_spare_it_waits_and_says_for_what_and_the_others_keep_what_they_have():
    b = Bench(make_spec(stages=2, steps=9))
    b.join(0, 1)
    to_step(b, 6)
    gone, stays = b.state.history.holders
    commands = b.lose(gone)
    waits = b.waits()
    assert isinstance(waits, reasons.StagesWithoutPeer)
    assert [s.stage for s in waits.stages] == [0]
    assert [c for c in commands if isinstance(c, ev.Wait)] == [ev.Wait(stays, b.state.work.missing)]
    b.tell(ev.Joined(replace(peer(int(gone[1:])), holding=holding(b, 0))))
    assert [c.reuse for c in b.commands if isinstance(c, ev.AssignStage)][-2:] == [True, True]
    b.finish()
    assert b.state.history.lineage == 1
    assert b.state.history.redone == 0


@pytest.mark.parametrize(
    ("changes", "keeps"),
    [
        ({}, True),
        ({"applied": 4, "prepared": 1}, True),
        ({"applied": 4}, False),
        ({"applied": 4, "prepared": 7}, False),  # prepared for the same step, but in another generation
        ({"applied": 3, "prepared": 1}, False),
        ({"applied": 6}, False),
        ({"lineage": 0}, False),
        ({"layers": (1, 3)}, False),
    ],
)
def test_what_is_in_memory_counts_only_after_exactly_the_decisions_of_this_lineage(changes, keeps):
    b = Bench(make_spec(stages=2, steps=9))
    b.join(0, 1)
    to_step(b, 6)
    back = replace(peer(int(b.state.history.holders[0][1:])), holding=holding(b, 0, **changes))
    b.tell(ev.Joined(back))  # its connection broke, and nobody noticed before
    assert (b.state.history.lineage == 1) == keeps
    b.finish()


def test_a_connection_that_breaks_is_waited_for_before_a_spare_is_asked():
    b = Bench(make_spec(stages=2, steps=9))
    b.join(0, 1, 2)
    to_step(b, 6)
    gone = b.state.history.holders[0]
    b.tell(ev.Left(gone, CUT_OFF))
    assert b.waits() == reasons.HoldersDisconnected((0,))
    b.tell(ev.Tick())
    assert b.state.history.holders[0] == gone
    b.now += timeouts.SESSION_RECONNECT
    b.tell(ev.Tick())
    assert b.state.history.holders[0] == "p2"
    b.finish()


def test_a_coordinator_that_comes_back_goes_on_with_what_its_peers_have():
    b = Bench(make_spec(stages=2, steps=9))
    b.join(0, 1)
    to_step(b, 6)
    history, holders = b.state.history, b.state.history.holders
    b.state = machine.resume(b.state.spec, b.state.t_fixed, history, b.now)
    assert b.waits() == reasons.CoordinatorRestarted()
    one, other = (replace(peer(int(p[1:])), holding=holding(b, i)) for i, p in enumerate(holders))
    b.tell(ev.Joined(replace(other, holding=holding(b, 1, applied=4, prepared=1))))
    b.tell(ev.Joined(one))
    assert b.state.history.generation == 2
    placed = [c for c in b.commands if isinstance(c, ev.AssignStage)][-2:]
    assert [(c.peer, c.reuse) for c in placed] == [(holders[0], True), (holders[1], True)]
    b.finish()
    assert b.state.history.lineage == 1


def test_a_coordinator_whose_peers_do_not_come_back_takes_others():
    b = Bench(make_spec(stages=2, steps=9, snapshots={"interval": 2}))
    b.join(0, 1)
    to_step(b, 6)
    b.state = machine.resume(b.state.spec, b.state.t_fixed, b.state.history, b.now)
    b.join(4, 5)
    assert not b.state.placed
    b.now += 2 * b.state.spec.limits.lease_seconds
    b.tell(ev.Tick())
    assert set(b.state.history.holders) == {"p4", "p5"}
    b.finish()
    assert b.state.history.redone == 1


def test_who_wants_to_leave_goes_after_the_step_with_a_snapshot_and_nothing_is_redone():
    b = Bench(make_spec(stages=2, steps=9))
    b.join(0, 1, 2)
    to_step(b, 4)
    leaver, stays = b.state.history.holders
    b.done(0)
    b.tell(ev.Leaving(leaver))
    assert b.state.task.kind == "step", "the step is finished first"
    b.answer_until(lambda: leaver not in b.state.peers)
    assert b.state.history.newest.step == 4
    assert ev.Dismiss(leaver, reasons.AskedToLeave()) in b.commands
    placed = [c for c in b.commands if isinstance(c, ev.AssignStage)][-2:]
    assert [(c.peer, c.reuse) for c in placed] == [("p2", False), (stays, True)]
    b.finish()
    assert b.state.history.lineage == 1


@pytest.mark.parametrize("spares", [0, 2])
def test_who_cannot_work_with_each_other_is_linked_anew_and_at_last_parted_or_sent_away(spares):
    """All of them are one person's: without a spare, both go."""
    b = Bench(make_spec(stages=3, steps=3))
    b.join(*range(3 + spares))
    blamer, blamed, _ = b.state.history.holders
    for _ in range(2 if spares else 5):
        b.answer(), b.answer()
        b.tell(ev.Trouble(blamer, BROKEN, 1, b.state.history.generation))
        assert b.state.history.holders[:2] == (blamer, blamed)
        b.now += timeouts.LINK_MEND
    b.tell(ev.Trouble(blamer, BROKEN, 1, b.state.history.generation))
    if spares:
        assert blamer in b.state.peers
        assert blamer not in b.state.history.holders
    else:
        assert not {blamer, blamed} & set(b.state.peers)
        b.join(3, 4)
    b.finish()


def test_other_bytes_of_u_are_found_and_what_they_spoilt_is_redone_once():
    b = Bench(make_spec(stages=2, steps=9, subspace={"sync_interval": 4}, snapshots={"interval": 2}))
    b.join(0, 1, 2)

    def to_check() -> None:
        b.answer_until(lambda: b.state.task and b.state.task.kind == "sync" and b.state.task.step == 4)

    to_check()
    suspect = b.state.history.holders[1]
    wrong = replace(b.report().hashes, basis="other")
    b.done(1, hashes=wrong)
    assert b.state.history.lineage == 2
    assert b.state.history.step == 2
    to_check()
    index = b.state.history.holders.index(suspect)
    b.done(index, hashes=wrong)
    assert suspect not in b.state.peers, "twice is no accident"
    b.finish()


def test_the_owner_pauses_resumes_and_stops():
    b = Bench(make_spec(stages=2, steps=9))
    b.join(0, 1)
    to_step(b, 4)
    b.tell(ev.PauseRun())
    assert b.state.task.kind == "step", "the step is finished first"
    for _ in range(9):
        b.answer()
    assert b.state.history.newest.step == 4, "and saved"
    assert b.waits() == reasons.OwnersResume()
    assert told(b.commands, notices.Paused) == [notices.Paused(reasons.ByOwner(), b.state.spec.name)]
    b.tell(ev.ResumeRun())
    assert (b.state.task.kind, b.state.task.step) == ("step", 5)
    b.tell(ev.StopRun())
    b.answer_until(lambda: b.state.stopped)
    assert b.state.history.newest.step == 5
    assert isinstance(b.commands[-1], ev.Quit)
    assert [c.exit_code for c in b.commands if isinstance(c, ev.Dismiss)] == [0, 0]


def test_bad_numbers_may_be_answered_with_an_older_snapshot_once():
    limits = {"nonfinite_steps": 2, "nonfinite_action": "rollback"}
    b = Bench(make_spec(stages=2, steps=9, limits=limits, snapshots={"interval": 2}))
    b.join(0, 1)

    def go_bad() -> None:
        for step in (5, 6):
            to_step(b, step)
            if b.state.history.pending:
                b.answer()
            b.done(0, norms=b.norms(0, math.nan))
            b.done(1)

    go_bad()
    assert (b.state.history.lineage, b.state.history.step) == (2, 4)
    go_bad()
    assert b.state.history.paused is not None
    assert b.state.history.lineage == 2


def test_who_wants_to_leave_and_lost_its_stage_meanwhile_goes_and_the_run_goes_on():
    b = Bench(make_spec(stages=1, steps=6, snapshots={"interval": 0}))
    b.join(0)
    to_step(b, 3)
    b.state = machine.resume(b.state.spec, b.state.t_fixed, b.state.history, b.now)
    b.join(1)
    b.tell(ev.Joined(replace(peer(0), holding=holding(b, 0))))
    b.tell(ev.Leaving("p0"))
    b.done(0, hashes=replace(b.report().hashes, basis="other"))  # back to the beginning
    assert b.state.history.holders == ("p1",)
    b.finish()
    assert ev.Dismiss("p0", reasons.AskedToLeave()) in b.commands


def test_a_spare_leaves_at_once():
    b = Bench(make_spec(stages=2, steps=3))
    b.join(0, 1, 2)
    [spare] = set(b.state.peers) - set(b.state.history.holders)
    b.tell(ev.Leaving(spare))
    assert spare not in b.state.peers
    b.finish()
    assert b.state.history.ended


def test_a_link_that_does_not_come_up_is_given_up():
    b = Bench(make_spec(stages=2, steps=3, limits={"link_seconds": 5.0}))
    b.join(0, 1)
    b.answer()
    assert b.state.task.kind == "link"
    b.now += 4
    b.tell(ev.Tick())
    assert b.state.task.kind == "link"
    b.now += 2
    commands = b.tell(ev.Tick())
    assert len([c for c in commands if isinstance(c, ev.Dismiss)]) == 2
    assert b.waits() == no_placement.TooFewPeers(0, 2)
    assert {n.reason for n in told(commands, notices.PeerDismissed)} == {
        reasons.TooSlow(i, "link", 5.0) for i in (0, 1)
    }
    assert not b.state.placed
    b.join(2, 3)
    b.finish()


def stall(b: Bench, seconds: float) -> reasons.StagesWorking:
    """A task that ends neither shortly before this time nor shortly after it. What is told then."""
    assert b.state.task is not None
    begun, before = b.state.task.started, b.state.history.generation
    b.now = begun + seconds - 2
    b.tell(ev.Tick())
    assert b.state.history.generation == before, "too soon"
    b.now = begun + seconds + 2
    [stalled] = told(b.tell(ev.Tick()), notices.Stalled)
    assert b.state.history.generation == before + 1, "too late"
    return stalled.waiting


def test_a_step_that_does_not_end_is_begun_again_and_a_slow_one_gets_more_time_each_time():
    b = Bench(make_spec(stages=2, steps=5))
    b.join(0, 1)
    for step, first in [(1, 3600), (2, 60)]:  # at first it is not known what is usual
        for times in (1, 2, 4):
            to_step(b, step)
            b.state = replace(b.state, broken=5)  # links that broke are another matter
            b.done(0)  # stage 1 does not answer
            silent = b.state.holders_of([1])
            found = stall(b, first * times)
            assert (found.task, found.step, found.holders) == ("step", step, silent)
    b.finish()
    assert b.state.history.redone == 0


def test_where_steps_take_long_a_task_may_take_five_times_as_long_and_an_evaluation_as_long_as_it_is_large():
    b = Bench(make_spec(stages=2, steps=8, batch={"size": 4}, eval={"interval": 3, "windows": 8}))
    b.join(0, 1)
    to_step(b, 1)
    b.now += 100
    b.answer()
    b.now += 36000  # its owner slept, and so did its peers
    to_step(b, 2)
    stall(b, 501)
    to_step(b, 3)
    b.now += 100
    b.answer_until(lambda: b.state.task.kind == "evaluation")
    b.state = replace(b.state, measured=replace(b.state.measured, step_seconds=(100.0, 100.0, 5.0)))
    stall(b, 1000)  # of two steps' worth of text


def only_tasks(b: Bench) -> None:
    """Nothing that a stage owes beside its tasks."""
    for stage in range(b.state.stages):
        b.done(stage)


@pytest.mark.parametrize("silent_about", [reasons.SubspaceReport, reasons.BasisNotTaken])
def test_what_a_stage_owes_beside_its_tasks_is_not_waited_for_for_ever(silent_about: type[reasons.Blocker]):
    b = Bench(make_spec(stages=2, steps=9, subspace={"update": {"interval": 4, "window": 1, "delay": 1}}))
    b.join(0, 1)
    if silent_about is reasons.BasisNotTaken:
        b.answer_until(lambda: b.state.owed == 4, lambda: only_tasks(b))
        b.tell(ev.SubspaceReported(b.state.history.holders[-1], 1, 4, {}, "new"))
    for times in (1, 2):
        b.answer_until(lambda: b.state.task is None, lambda: only_tasks(b))
        waits, before = b.waits(), b.state.history.generation
        assert isinstance(waits, silent_about)
        b.now += 59 * times
        b.tell(ev.Tick())
        b.now += 2 * times
        [stalled] = told(b.tell(ev.Tick()), notices.Stalled)
        assert (stalled.waiting, b.state.history.generation) == (waits, before + 1)
    b.finish()


def test_who_has_its_stage_in_memory_may_not_take_for_ever_to_say_so():
    """Nor may whoever fetches it, where another is here."""
    b = Bench(make_spec(stages=2, steps=8, snapshots={"interval": 2}, limits={"reuse_seconds": 50.0}))
    b.join(0, 1)
    to_step(b, 4)
    b.tell(ev.Trouble("p0", BROKEN, 1, 1))
    b.done(0)
    b.now += 60
    commands = b.tell(ev.Tick())
    assert [c.peer for c in commands if isinstance(c, ev.Dismiss)] == ["p1"]
    b.join(2)
    assert b.state.task.kind == "build"
    assert b.state.history.lineage == 2
    b.now += 10_000
    assert b.tell(ev.Tick()) == [], "parts of a snapshot are on their way, and nobody else is here"
    b.join(3)
    [late] = told(b.tell(ev.Tick()), notices.StageGivenUp)
    assert (late.reason.stage, late.reason.doing) == (b.state.history.holders.index("p3"), "restore")
    assert late.peer == "p2"
    assert b.state.history.holders[1 - late.stage] == "p0", "it goes on with what it is at"
    assert late.peer in b.state.peers


def who_gave_up(stages: int, late: set[int], new: bool) -> tuple[list[int | None], Bench]:
    """Stages whose holders gave up when these were late with their links, in a run of several people with two spares.
    `new`: stage 1 has another holder since the last step."""
    b = Bench(make_spec(stages=stages, steps=30, snapshots={"interval": 2}))
    for i in range(stages + 2):
        b.tell(ev.Joined(replace(peer(i), token=f"t{i}")))
    to_step(b, 5)
    if new:
        b.lose(b.state.history.holders[1])
    else:
        b.tell(ev.Trouble(b.state.history.holders[0], BROKEN, 1, b.state.history.generation))
    b.answer_until(lambda: b.state.task.kind == "link")
    for stage in set(range(stages)) - late:
        b.done(stage)
    b.now += b.state.measured.linked + 29
    assert not told(b.tell(ev.Tick()), notices.StageGivenUp)
    b.now += 2
    if not told(b.tell(ev.Tick()), notices.StageGivenUp):
        b.now += b.state.spec.limits.link_seconds
        b.tell(ev.Tick())
    return [n.stage for n in told(b.commands, notices.StageGivenUp)], b


@pytest.mark.parametrize(
    ("stages", "late", "new", "gave_up"),
    [
        (4, {0, 1, 2}, True, [1]),  # a new holder opens no link, and its neighbours wait for it
        (4, {0, 1, 2}, False, [1]),  # one that did open links before has more time
        (4, {1}, True, [1]),
        (2, {0, 1}, True, [1]),
        (2, {0, 1}, False, [0]),  # nobody can tell
    ],
)
def test_of_holders_that_are_late_with_their_links_one_gives_up_and_nobody_is_dismissed(stages, late, new, gave_up):
    found, b = who_gave_up(stages, late, new)
    assert found == gave_up
    assert not any(isinstance(c, ev.Dismiss) for c in b.commands)
    b.finish()


def test_without_a_spare_links_of_several_people_are_tried_again_and_nobody_is_dismissed():
    b = Bench(make_spec(stages=2, steps=3, limits={"link_seconds": 5.0}))
    for i in range(2):
        b.tell(ev.Joined(replace(peer(i), token=f"t{i}")))
    for _ in range(9):
        b.answer_until(lambda: b.state.task.kind == "link")
        b.now += 6
        assert told(b.tell(ev.Tick()), notices.Stalled)
    assert len(b.state.peers) == 2
    b.finish()
