"""A registered peer that wants the run to stand still: what it can do costs a wait, and then another has its stage."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import pytest
from conftest import make_spec
from led import Led
from machine_bench import CUT_OFF, Bench, holding, peer, to_step, told
from test_reseating import saved, tried

from protomodels_cli.coordinator import assigning, notices, patience, reasons, speeds, turns
from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator.audit_reasons import MessagesDiffer
from protomodels_cli.coordinator.auditing import Audits
from protomodels_cli.coordinator.contributions import MOST_BYTES, Contribution
from protomodels_cli.coordinator.feed import Feed
from protomodels_cli.coordinator.history import RolledBack
from protomodels_cli.coordinator.peers import Rest
from protomodels_cli.coordinator.readiness import BEYOND, LEAST
from protomodels_cli.coordinator.reseat_notices import StageNotReseated, StageReseating
from protomodels_cli.coordinator.sessions import OPENED, EnrolledPeer
from protomodels_cli.coordinator.snapshots.pace import Pace
from protomodels_cli.protocol.audit import Recorded
from protomodels_cli.protocol.parts import Part


def of_persons(peers: int = 4, stages: int = 2, steps: int = 60, **sections: object) -> Bench:
    """Every peer has a token of its own; the last ones are spares. Some steps were decided."""
    b = Bench(make_spec(stages=stages, steps=steps, **{"snapshots": {"interval": 2}, **sections}))
    for i in range(peers):
        b.tell(ev.Joined(replace(peer(i), token=f"t{i}")))
    to_step(b, 5)
    return b


def again(b: Bench, who: str, **changes: object) -> list[ev.Command]:
    """It opens another session."""
    return b.tell(ev.Joined(replace(b.state.peers.get(who) or peer(int(who[1:])), holding=None, **changes)))


def given_up(b: Bench) -> list[tuple[str, str]]:
    return [(told_of.peer, told_of.reason.kind) for told_of in told(b.commands, notices.StageGivenUp)]


# While a stage is about to change hands


def test_a_spare_that_reconnects_again_and_again_gets_no_more_time():
    b = saved()
    begun = b.now
    while b.state.seats.handover is not None:
        assert b.now - begun < LEAST + 5
        b.now += 3
        again(b, "p2")
        b.tell(ev.Tick())
    assert [n.why for n in told(b.commands, StageNotReseated)] == ["not_ready"]
    b.finish()
    assert len(told(b.commands, StageReseating)) == 1, "it had its turn"


@pytest.mark.parametrize("gone", [ev.Left("p2", CUT_OFF), ev.Rests("p2", Rest())])
def test_a_spare_that_goes_while_the_run_stands_still_for_it_had_its_turn(gone):
    b = saved()
    b.tell(gone)
    assert [n.why for n in told(b.commands, StageNotReseated)] == ["spare_gone"]
    again(b, "p2", rest=None)
    assert turns.weight(b.state, "p2", b.now) > 0
    b.finish()
    assert len(told(b.commands, StageReseating)) == 1


def silent_beside_liars() -> tuple[Bench, float]:
    """A holder is silent for good. The spares of one token say that they are the fastest; p2 is honest."""
    b = of_persons(peers=2)
    b.tell(ev.Joined(replace(peer(2), token="t2")))
    newest = frozenset(b.state.history.newest.as_parts())
    for i in range(10, 14):
        b.tell(ev.Joined(replace(peer(i), token="liar", flops=1e15, parts=newest)))
    b.tell(ev.Left(b.state.history.holders[1], reasons.NoHeartbeat(5.0)))
    return b, b.now


def test_a_spare_that_is_late_is_asked_last_and_so_are_all_ids_of_its_person():
    b, begun = silent_beside_liars()
    while "p2" not in b.state.seats.preparing:
        assert b.now - begun < LEAST + 60
        b.now += 1
        b.tell(ev.Tick())
    assert len({c.peer for c in b.commands if isinstance(c, ev.PrepareStage)} - {"p2"}) <= 1
    b.tell(ev.Ready("p2", b.state.seats.preparing["p2"].part))
    assert b.state.history.holders[1] == "p2"
    b.finish()


def test_a_spare_that_is_late_and_then_ready_takes_the_stage():
    """The other, that was asked meanwhile, has not built it yet."""
    b, _ = silent_beside_liars()
    while "p2" not in b.state.seats.preparing:
        b.now += 1
        b.tell(ev.Tick())
    [late] = b.state.seats.preparing.keys() - {"p2"}
    b.tell(ev.Ready(late, b.state.seats.preparing[late].part))
    assert b.state.history.holders[1] == late


@pytest.mark.parametrize("how", ["stream", "session", "rest"])
def test_a_spare_that_comes_and_goes_while_a_stage_waits_for_it_is_asked_last(how):
    b, begun = silent_beside_liars()
    while "p2" not in b.state.seats.preparing:
        assert b.now - begun < 120
        b.now += 15
        b.tell(ev.Tick())
        for liar in b.state.seats.preparing.keys() - {"p2"}:
            if how == "rest":
                b.tell(ev.Rests(liar, Rest()))
                b.tell(ev.Rests(liar, None))
            else:
                if how == "session":
                    b.tell(ev.Left(liar, CUT_OFF))
                again(b, liar, token="liar", flops=1e15, rest=None)
            b.tell(ev.Tick())
    b.tell(ev.Ready("p2", b.state.seats.preparing["p2"].part))
    assert b.state.history.holders[1] == "p2"


def test_after_a_restart_an_honest_peer_has_the_time_to_build_its_stage():
    """What building takes is not known then, as nobody has built a stage yet; what steps take is."""
    b = of_persons(peers=4)
    b.state = replace(b.state, saving=replace(b.state.saving, pace=Pace()))
    b.lose(b.state.history.holders[1])
    new = b.state.history.holders[1]
    b.now += 120
    b.tell(ev.Tick())
    assert b.state.history.holders[1] == new
    b.now += b.state.spec.limits.build_seconds + BEYOND
    b.tell(ev.Tick())
    assert b.state.history.holders[1] != new
    b.finish()


def test_a_holder_that_says_it_computes_in_no_time_is_taken_for_the_slowest():
    b = tried()
    b.answer_until(lambda: len(b.state.measured.timed) >= speeds.ENOUGH)
    timed = tuple(replace(t, compute=(1.0, 0.0)) for t in b.state.measured.timed)
    b.state = replace(b.state, measured=replace(b.state.measured, timed=timed))
    busy = speeds.busy(b.state)
    assert busy.index(max(busy)) == 1


# While a task is under way


@pytest.mark.parametrize("away", [0.0, 1.5])
@pytest.mark.parametrize("holders", [1, 2])
def test_holders_that_reconnect_again_and_again_do_not_keep_a_task_from_ending(away, holders):
    """In turns, so that one of them is always away: each return was a fresh start for every limit, and nobody's time
    ran while somebody was away."""
    b = of_persons(peers=4, stages=2)
    liars, generation = b.state.history.holders[:holders], b.state.history.generation
    begun, steps = b.now, b.state.history.step
    while set(liars) & set(b.state.history.holders) and b.now - begun < 1000:
        for who in liars:
            b.now += 1.5
            if who not in b.state.history.holders:
                continue
            held = holding(b, b.state.history.holders.index(who), generation=b.state.history.generation)
            b.tell(ev.Left(who, CUT_OFF))
            b.now += away
            b.tell(ev.Tick())
            b.tell(ev.Joined(replace(peer(int(who[1:])), token=f"t{who[1:]}", holding=held)))
            b.tell(ev.Tick())
            for stage, holder in enumerate(b.state.history.holders):  # the honest do as they are told
                if holder not in liars and stage not in b.state.heard and b.state.task is not None and b.state.placed:
                    b.done(stage)
    assert {kind for _, kind in given_up(b)} == {"came_and_went"}
    assert b.now - begun < 100
    assert b.state.history.generation > generation
    b.finish()
    assert b.state.history.step > steps
    assert not [c for c in b.commands if isinstance(c, ev.Dismiss) and not isinstance(c.why, reasons.RunFinished)]


def test_absences_at_the_same_time_are_counted_once():
    """The coordinator's own line was away."""
    b = of_persons(peers=3, stages=3)
    holders, task = b.state.history.holders, b.state.task
    back = [holding(b, i, generation=b.state.history.generation) for i in range(3)]
    for who in holders:
        b.tell(ev.Left(who, reasons.NoHeartbeat(5.0)))
    b.now += 60
    for who, held in zip(holders, back, strict=True):
        b.tell(ev.Joined(replace(peer(int(who[1:])), holding=held)))
    assert b.state.task == task
    assert 60 <= b.state.waited <= b.now - task.started
    b.finish()


def test_one_that_returns_more_often_gives_the_task_no_more_time():
    b = of_persons(peers=2)
    who = b.state.history.holders[0]
    for _ in range(assigning.MOST_RETURNS + 2):
        held = holding(b, 0, generation=b.state.history.generation)
        before = b.state.waited
        b.tell(ev.Left(who, CUT_OFF))
        b.now += 1
        b.tell(ev.Joined(replace(peer(int(who[1:])), holding=held)))
    assert b.state.waited == before
    assert b.state.waited == pytest.approx(assigning.MOST_RETURNS, abs=1.0)


def test_a_run_that_became_slower_is_not_taken_for_one_that_stands_still():
    """Sixteen times, from one step to the next."""
    b = of_persons(peers=3)
    for _ in range(30):
        b.answer_until(lambda: b.state.task and b.state.task.kind == "step")
        b.now += 10
        b.answer()
    b.answer_until(lambda: b.state.task and b.state.task.kind == "step")
    for _ in range(20):
        step, begun = b.state.task.step, b.state.task.started
        while b.state.task is not None and b.state.task.step == step and b.state.task.started == begun:
            b.now += 5
            if b.now - begun >= 160:
                b.answer()
                break
            b.tell(ev.Tick())
        b.answer_until(lambda: b.state.task and b.state.task.kind == "step")
    assert len(told(b.commands, notices.Stalled)) <= 4


def test_a_task_has_as_much_longer_as_a_holder_was_away():
    b = of_persons(peers=2)
    who, started = b.state.history.holders[0], b.state.task.started
    back = holding(b, 0, generation=b.state.history.generation)
    b.tell(ev.Left(who, reasons.NoHeartbeat(5.0)))
    b.now += 10 * patience.STALL_SECONDS
    b.tell(ev.Joined(replace(peer(int(who[1:])), holding=back)))
    assert b.state.waited == pytest.approx(b.now - started, abs=1.0)
    b.now += patience.STALL_SECONDS - 5
    b.tell(ev.Tick())
    assert not told(b.commands, notices.Stalled)
    b.finish()


def test_a_new_holder_on_trial_is_not_given_more_time_by_reconnecting():
    b = tried()
    b.answer_until(lambda: b.state.task and b.state.task.kind == "step")
    begun = b.now
    while b.state.history.holders == ("p0", "p2"):
        assert b.now - begun < BEYOND + 40
        b.now += 5
        back = holding(b, 1, generation=b.state.history.generation)
        b.tell(ev.Joined(replace(b.state.peers["p2"], holding=back)))
        b.tell(ev.Tick())
    assert b.state.history.holders == ("p0", "p1")


def test_who_keeps_a_task_from_ending_for_the_second_time_may_be_any_that_is_silent_and_one_gives_its_stage_up():
    b = of_persons(peers=5, stages=3)
    seen = [b.state.history.holders]
    for _ in range(2):
        b.now = b.state.task.started + patience.patience(b.state, "step") + 1
        b.done(0)
        b.tell(ev.Tick())
        seen.append(b.state.history.holders)
        b.answer_until(lambda: b.state.task.kind == "step")
    assert seen[0] == seen[1], "the first time it may be nobody's fault"
    assert seen[2][0] == seen[1][0], "who has reported is not it"
    assert sum(one != other for one, other in zip(seen[1], seen[2], strict=True)) == 1
    assert [kind for _, kind in given_up(b)] == ["too_slow"]
    b.finish()


def test_the_only_one_that_is_silent_gives_its_stage_up_at_once():
    b = of_persons(peers=4, stages=3)
    silent = b.state.history.holders[1]
    b.done(0)
    b.done(2)
    b.now = b.state.task.started + patience.patience(b.state, "step") + 1
    b.tell(ev.Tick())
    assert given_up(b) == [(silent, "too_slow")]
    assert silent not in b.state.history.holders
    b.finish()


# With its stage


@pytest.mark.parametrize("leaves", [False, True])
def test_a_holder_that_loses_its_stage_again_and_again_gives_it_up(leaves):
    """Once a process may end. What it had in memory is built again from the snapshot, and steps are redone."""
    b = of_persons(peers=3)
    liar = b.state.history.holders[0]
    parts = b.state.peers[liar].parts
    if leaves:
        b.tell(ev.Left(liar, CUT_OFF))
    again(b, liar, parts=parts)
    assert b.state.history.holders[0] == liar
    assert liar in b.state.conduct.untried
    to_step(b, b.state.history.step + 1)
    b.answer()
    if leaves:
        b.tell(ev.Left(liar, CUT_OFF))
    again(b, liar, parts=parts)
    assert liar not in b.state.history.holders
    b.finish()
    assert len([r for r in b.records if isinstance(r, RolledBack)]) <= 2


def test_a_low_cap_gives_nobody_time_for_ever():
    """A new holder that says it receives as little as can be, and never builds the stage."""
    b = of_persons(peers=2)
    gone = b.state.history.holders[1]
    b.tell(ev.Joined(replace(peer(2), token="t2", download=1e6)))
    b.lose(gone)
    assert "p2" in b.state.history.holders
    b.tell(ev.Joined(replace(peer(3), token="t3")))
    begun = b.now
    b.done(0)
    while "p2" in b.state.history.holders:
        assert b.now - begun < LEAST + BEYOND + 10
        b.now += 2
        b.tell(ev.Tick())
    b.finish()


def test_a_holder_that_reconnects_while_it_builds_loses_nothing_by_that():
    """A large part over a line that breaks now and then."""
    b = of_persons(peers=3)
    b.lose(b.state.history.holders[1])
    new = b.state.history.holders[1]
    b.done(0)
    for _ in range(4):
        b.now += 2
        again(b, new)
        assert b.state.history.holders[1] == new
        b.done(0)
    b.finish()


# With what it reports


@pytest.mark.parametrize("spares", [0, 1])
def test_a_stage_whose_numbers_alone_are_not_finite_gives_up_before_the_run_is_paused(spares):
    b = of_persons(peers=2 + spares)
    liar, many = b.state.history.holders[1], b.state.spec.limits.nonfinite_steps
    for _ in range(many):
        b.answer_until(lambda: b.state.task and b.state.task.kind == "step")
        b.done(0)
        b.done(1, norms=b.norms(1, math.nan))
    if spares:
        assert b.state.history.paused is None
        assert given_up(b) == [(liar, "unsound_numbers")]
        assert liar not in b.state.history.holders
        b.finish()
    else:
        assert b.state.history.paused is not None


def test_a_run_that_diverges_at_one_stage_is_paused_after_one_change():
    b = of_persons(peers=5)
    while b.state.history.paused is None:
        b.answer_until(lambda: b.state.task and b.state.task.kind == "step")
        b.done(1)
        b.done(0, norms=b.norms(0, math.nan))
    assert len(given_up(b)) == 1


def test_where_all_numbers_are_not_finite_nobody_is_to_blame():
    b = of_persons(peers=3)
    for _ in range(b.state.spec.limits.nonfinite_steps):
        b.answer_until(lambda: b.state.task and b.state.task.kind == "step")
        for stage in range(2):
            b.done(stage, norms=b.norms(stage, math.nan))
    assert not given_up(b)
    assert b.state.history.paused is not None


def test_what_peers_say_they_sent_has_a_sum_that_a_status_can_show():
    total = Contribution()
    for _ in range(3000):
        total = total.plus(1, 1, 1.0, 2 * 2**53)
    assert total.sent_bytes == MOST_BYTES < 2**64


# Complaints


def test_a_quarrel_counts_though_the_other_is_away_for_a_moment():
    """The one that lied leaves before its neighbour has reported."""
    b = of_persons(peers=3, stages=3)
    history = b.state.history
    away, here = history.holders[1], history.holders[0]
    b.tell(ev.Left(away, reasons.NoHeartbeat(5.0)))
    assert away in b.state.seats.absent
    b.tell(ev.Trouble(here, MessagesDiffer(3, 0), 1, history.generation))
    assert b.state.conduct.quarrels == {frozenset((away, here)): 1}
    assert b.state.history.generation == history.generation, "nobody relinks for it"


def test_a_holder_that_has_built_its_stage_cannot_say_that_its_part_is_lost():
    b = of_persons(peers=2)
    newest, generation = b.state.history.newest, b.state.history.generation
    lost = ev.SnapshotLost(b.state.history.holders[0], generation, *newest.key, "gone", whole_here=True)
    assert b.tell(lost) == []
    assert b.state.history.generation == generation


def test_a_stage_that_uses_another_basis_twice_within_an_hour_is_asked_last():
    b = Bench(make_spec(stages=2, steps=40, snapshots={"interval": 2}, subspace={"sync_interval": 3}))
    for i in range(3):
        b.tell(ev.Joined(replace(peer(i), token=f"t{i}")))
    liar = "p0"
    for _ in range(2):
        b.answer_until(lambda: b.state.task and b.state.task.kind == "sync")
        assert liar in b.state.history.holders
        wrong = b.report()
        assert wrong.hashes is not None
        b.done(b.state.history.holders.index(liar), hashes=replace(wrong.hashes, basis="wrong"))
        b.answer_until(lambda: b.state.task and b.state.task.kind == "step")
        b.answer_until(lambda: not b.state.conduct.suspects)
    assert liar not in b.state.history.holders
    b.finish()


# Audits


def test_a_report_on_another_task_does_not_have_a_record_forgotten():
    """Or one liar could switch audits off for all stages, between the reports of two others."""
    b = Bench(make_spec(stages=2, steps=60, snapshots={"interval": 2}, audit=1.0))
    b.join(0, 1, 2)
    b.answer_until(lambda: b.state.task and b.state.task.recorded)
    audits = Audits(Led(lambda: b.state), b.state.spec, cast(Feed, None))
    audits.hear(ev.Tick())
    generation, task = b.state.history.generation, b.state.task
    said = [
        ("p0", task.number, Recorded(task.step)),
        ("p0", 0, Recorded(10**9)),
        ("p0", task.number + 1, Recorded(10**9)),
        ("p1", task.number, Recorded(task.step)),
    ]
    for who, number, recorded in said:
        stage = b.state.history.holders.index(who)
        event = ev.Done(who, generation, number, replace(b.report(stage), recorded=recorded))
        b.tell(event)
        audits.hear(event)
    assert audits._witnessed is not None
    assert (audits._witnessed.step, audits._witnessed.is_whole) == (task.step, True)


def test_of_thousands_of_parts_those_of_the_last_snapshots_count():
    """An honest peer of a run that keeps all snapshots has as many: it was asked to prove each, and was dismissed for
    its answers."""
    b = of_persons(peers=2, snapshots={"interval": 1, "keep": 1000}, steps=100)
    to_step(b, 40)
    marks = b.state.history.snapshots
    assert len(marks) > 2 * assigning.MOST_SNAPSHOTS
    parts = frozenset(part for mark in marks for part in mark.as_parts())
    junk = frozenset(Part(7, i, 0, "f" * 64) for i in range(1000))
    b.tell(ev.Joined(replace(peer(7), parts=parts | junk)))
    kept = b.state.peers["p7"].parts
    assert kept == {part for mark in marks[-assigning.MOST_SNAPSHOTS :] for part in mark.as_parts()}


def test_a_peer_opens_so_many_sessions_and_then_one_now_and_then():
    known = EnrolledPeer(0.0)
    assert [known.may_open(1.0) for _ in range(int(OPENED.burst) + 5)].count(True) == OPENED.burst
    assert not known.may_open(1.5)
    assert known.may_open(1.0 + 1 / OPENED.per_second)
