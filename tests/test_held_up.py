"""A registered peer that wants the run to stand still: what it can do costs a wait, and then another has its stage."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import pytest
from conftest import make_spec
from machine_bench import CUT_OFF, Bench, holding, peer, to_step, told
from test_reseating import saved, tried

from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator import notices, patience, reasons, speeds, turns
from protomodels_cli.coordinator.audit_reasons import MessagesDiffer
from protomodels_cli.coordinator.auditing import Audits
from protomodels_cli.coordinator.contributions import MOST_BYTES, Contribution
from protomodels_cli.coordinator.feed import Feed
from protomodels_cli.coordinator.history import RolledBack
from protomodels_cli.coordinator.readiness import BEYOND, LEAST
from protomodels_cli.coordinator.reseat_notices import StageNotReseated, StageReseating
from protomodels_cli.coordinator.sessions import OPENED, EnrolledPeer
from protomodels_cli.coordinator.state import Rest
from protomodels_cli.protocol.audit import Recorded


def of_persons(peers: int = 4, stages: int = 2, steps: int = 60, **sections: object) -> Bench:
    """Every peer has a token of its own; the last ones are spares. Some steps were decided."""
    b = Bench(make_spec(stages=stages, steps=steps, snapshots={"interval": 2}, **sections))
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
    while b.state.reseat is not None:
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


def test_a_spare_that_is_late_had_its_turn_and_so_had_all_ids_of_its_person():
    """A silent holder is to be replaced; the spares of one token say that they are the fastest, and build nothing."""
    b = of_persons(peers=2)
    b.tell(ev.Joined(replace(peer(2), token="t2")))
    for i in range(10, 14):
        b.tell(
            ev.Joined(replace(peer(i), token="liar", flops=1e15, parts=frozenset(b.state.history.newest.as_parts())))
        )
    gone, begun = b.state.history.holders[1], b.now
    b.tell(ev.Left(gone, reasons.NoHeartbeat(5.0)))
    while "p2" not in b.state.preparing:
        assert b.now - begun < LEAST + 60
        b.now += 1
        b.tell(ev.Tick())
    asked = {c.peer for c in b.commands if isinstance(c, ev.PrepareStage)}
    assert len(asked - {"p2"}) <= 1
    b.tell(ev.Ready("p2", b.state.preparing["p2"].part))
    assert b.state.history.holders[1] == "p2"
    b.finish()


def test_a_holder_that_says_it_computes_in_no_time_is_taken_for_the_slowest():
    b = tried()
    b.answer_until(lambda: len(b.state.timed) >= speeds.ENOUGH)
    b.state = replace(b.state, timed=tuple(replace(t, compute=(1.0, 0.0)) for t in b.state.timed))
    busy = speeds.busy(b.state)
    assert busy.index(max(busy)) == 1


# While a task is under way


def test_a_holder_that_reconnects_again_and_again_does_not_keep_a_task_from_ending():
    """Its session is replaced, or it is away for a moment: both were a fresh start for every limit."""
    b = of_persons(peers=2)
    begun, number = b.now, b.state.task.number
    while b.state.task.number == number:
        assert b.now - begun < patience.STALL_SECONDS + 10
        b.now += 3
        back = holding(b, 0, generation=b.state.history.generation)
        who = b.state.history.holders[0]
        b.tell(ev.Left(who, CUT_OFF))
        b.tell(ev.Joined(replace(peer(int(who[1:])), holding=back)))
        b.tell(ev.Tick())
    assert told(b.commands, notices.Stalled)


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
    assert liar in b.state.untried
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


def test_a_holder_whose_part_the_run_waits_for_gives_its_stage_up_soon():
    """It says that it sends next to nothing, has the run wait for a snapshot, and hands nothing in."""
    b = of_persons(peers=3, steps=200)
    liar = b.state.history.holders[1]
    b.tell(ev.Joined(replace(b.state.peers[liar], upload=1e6, holding=holding(b, 1, generation=1))))
    assert b.state.pace.upload is not None
    b.tell(ev.Leaving(liar))
    b.answer_until(lambda: b.state.task is None and b.state.history.pending, lambda: [b.done(i) for i in range(2)])
    mark = b.state.history.pending[-1]
    b.tell(ev.PartsArrived(*mark.key, frozenset({0})))
    begun = b.now
    while liar in b.state.history.holders:
        assert b.now - begun < BEYOND + 2 * b.state.pace.upload + 10
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
    assert away in b.state.absent
    b.tell(ev.Trouble(here, MessagesDiffer(3, 0), 1, history.generation))
    assert b.state.quarrels == {frozenset((away, here)): 1}
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
        b.answer_until(lambda: not b.state.suspects)
    assert liar not in b.state.history.holders
    b.finish()


# Audits


def test_a_report_on_another_task_does_not_have_a_record_forgotten():
    """Or one liar could switch audits off for all stages, between the reports of two others."""
    b = Bench(make_spec(stages=2, steps=60, snapshots={"interval": 2}, audit=1.0))
    b.join(0, 1, 2)
    b.answer_until(lambda: b.state.task and b.state.task.recorded)
    audits = Audits(lambda: b.state, cast(Feed, None), lambda event: None, lambda notice: None, lambda work: None)
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


def test_a_peer_opens_so_many_sessions_and_then_one_now_and_then():
    known = EnrolledPeer(0.0)
    assert [known.may_open(1.0) for _ in range(int(OPENED.burst) + 5)].count(True) == OPENED.burst
    assert not known.may_open(1.5)
    assert known.may_open(1.0 + 1 / OPENED.per_second)
