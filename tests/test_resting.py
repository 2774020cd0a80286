"""Peers that rest: when, on the pure machine, and with real processes of which no step is redone."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from conftest import make_spec
from hypothesis import given
from hypothesis import strategies as st
from machine_bench import Bench, holding, peer, to_step, told
from starting import begin, pmtrain
from test_run import coordinator, ends, status
from told import events, wait_for_event, wait_for_peer_event
from waiting import wait_for

from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator import notices, reasons
from protomodels_cli.coordinator.history import RolledBack
from protomodels_cli.coordinator.messages import event_of
from protomodels_cli.coordinator.peers import Rest
from protomodels_cli.coordinator.seats import assigned
from protomodels_cli.coordinator.status import describe
from protomodels_cli.errors import EXIT_REFUSED, EXIT_SPEC, OptionError
from protomodels_cli.observe.view import resting as resting_line
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.worker.resting import Hours, Wishes, running_in, tell, wish

DAY = datetime(2026, 11, 19)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("22:00-07:00", ["22:00", "23:59", "00:00", "06:59"], ["07:00", "12:00", "21:59"]),
        ("9-17:30", ["09:00", "17:29"], ["08:59", "17:30", "00:00"]),
    ],
)
def test_hours_of_a_day(text, inside, outside):
    hours = Hours.parse(text)
    for at in inside + outside:
        hour, minute = map(int, at.split(":"))
        assert hours.has(DAY.replace(hour=hour, minute=minute)) == (at in inside), at


@pytest.mark.parametrize("text", ["", "22-", "22:00", "24:00-7:00", "7:60-8:00", "22:00-07:00-08:00", "8-8", "evening"])
def test_hours_that_are_none_are_refused_by_their_option(text):
    with pytest.raises(OptionError) as refused:
        Hours.parse(text)
    assert (refused.value.kind, refused.value.exit_code) == ("hours", EXIT_SPEC)


@given(st.integers(0, 1439), st.integers(0, 1439), st.integers(0, 1439))
def test_who_rests_by_the_clock_wakes_at_the_next_beginning_and_not_before(begin, end, now):
    if begin == end:
        return
    at = lambda minutes: f"{minutes // 60}:{minutes % 60:02d}"  # noqa: E731
    hours, here = Hours.parse(f"{at(begin)}-{at(end)}"), DAY + timedelta(minutes=now)
    until = wish(hours, None, here)
    assert (until is None) == hours.has(here)
    if until is not None:
        woken = datetime.fromtimestamp(until)
        assert here < woken <= here + timedelta(days=1)
        assert hours.has(woken)
        assert not hours.has(woken - timedelta(seconds=1))


def test_a_word_counts_more_than_the_clock():
    hours = Hours.parse("22-7")
    noon, night = DAY.replace(hour=12), DAY.replace(hour=23)
    assert wish(hours, "rest", night) == 0.0
    assert wish(hours, "wake", noon) is None
    assert wish(None, None, noon) is None


def test_words_reach_only_a_process_that_runs_and_end_with_it(tmp_path):
    with Wishes(tmp_path, "p00000001", "attic", None) as wishes:
        assert [*running_in(tmp_path)] == [("p00000001", "attic")]
        assert wishes.now() is None
        tell(tmp_path, "p00000001", "rest")
        assert wishes.now() == 0.0
        tell(tmp_path, "p00000001", "wake")
        assert wishes.now() is None
        tell(tmp_path, "p00000001", "rest")
    (tmp_path / "here" / "p00000001").write_text("killed")  # what a process that was killed leaves
    tell(tmp_path, "p00000001", "rest")
    assert [*running_in(tmp_path)] == []
    with Wishes(tmp_path, "p00000001", "attic", None) as wishes:
        assert wishes.now() is None, "the word was for the one before"


def test_a_process_outside_its_hours_rests_until_they_begin_and_a_word_wakes_it_before(tmp_path):
    begin = datetime.now() + timedelta(hours=2)
    hours = Hours.parse(f"{begin:%H:%M}-{begin + timedelta(hours=1):%H:%M}")
    with Wishes(tmp_path, "p00000001", "attic", hours) as wishes:
        until = wishes.now()
        assert until is not None
        assert 3500 < until - datetime.now().timestamp() <= 7200
        tell(tmp_path, "p00000001", "wake")
        assert wishes.now() is None


# The machine


def bench(*joined: int, stages: int = 2) -> Bench:
    b = Bench(make_spec(stages=stages, steps=12, snapshots={"interval": 0}))
    b.join(*joined)
    return b


def state_of(b: Bench, peer: str) -> pb.PeerStatus:
    [found] = [row for row in describe(b.state, b.now, 0.0, 0).peers if row.peer == peer]
    return found


def test_a_holder_that_rests_hands_over_and_no_step_is_redone():
    b = bench(0, 1, 2)
    to_step(b, 4)
    rester = b.state.history.holders[1]
    b.tell(ev.Rests(rester, Rest(1e9)))
    assert state_of(b, rester).state == pb.PeerStatus.LEAVING
    b.finish()
    assert b.state.history.ended
    assert not [r for r in b.records if isinstance(r, RolledBack)]
    assert b.state.history.redone == 0
    assert rester not in b.state.history.holders
    [said] = told(b.commands, notices.PeerRests)
    assert (said.peer, said.stage, said.until) == (rester, 1, 1e9)
    assert ev.MakeSpare(rester, reasons.Resting()) in b.commands
    assert not [c for c in b.commands if c == ev.Dismiss(rester, reasons.AskedToLeave())]


def test_who_rests_is_given_nothing_until_it_wakes_and_the_run_waits_if_nobody_else_is_there():
    b = bench(0, 1)
    to_step(b, 4)
    rester, other = b.state.history.holders
    b.tell(ev.Rests(rester, Rest()))
    for _ in range(20):
        if not b.state.placed:
            break
        b.answer()
    assert isinstance(b.waits(), reasons.StagesWithoutPeer)
    row = state_of(b, rester)
    assert (row.state, row.rests_until, row.rests_by_itself) == (pb.PeerStatus.RESTING, 0.0, True)
    assert rester in resting_line(describe(b.state, b.now, 0.0, 0)) or row.name in resting_line(
        describe(b.state, b.now, 0.0, 0)
    )
    b.tell(ev.Rests(rester, None))
    assert set(b.state.history.holders) == {rester, other}
    assert told(b.commands, notices.PeerWoke)
    b.finish()
    assert b.state.history.redone == 0


def test_a_spare_that_rests_takes_no_stage_over_and_none_is_said_to_be_left():
    b = bench(0, 1, 2)
    to_step(b, 4)
    [spare] = set(b.state.peers) - set(b.state.history.holders)
    commands = b.tell(ev.Rests(spare, Rest()))
    assert told(commands, notices.NoSpareLeft)
    assert state_of(b, spare).state == pb.PeerStatus.RESTING
    b.lose(b.state.history.holders[0])
    assert not b.state.placed
    b.tell(ev.Rests(spare, None))
    assert spare in b.state.history.holders
    b.finish()


def test_who_joins_outside_its_hours_rests_from_the_beginning():
    b = bench(0)
    b.tell(ev.Joined(replace(peer(1), rest=Rest(1e9))))
    assert not b.state.placed
    assert state_of(b, "p1").state == pb.PeerStatus.RESTING
    b.join(2)
    assert set(b.state.history.holders) == {"p0", "p2"}
    b.finish()


def test_who_comes_back_from_a_broken_connection_with_the_wish_to_rest_hands_over_still():
    b = bench(0, 1, 2)
    to_step(b, 4)
    rester = b.state.history.holders[0]
    held = holding(b, 0)
    b.tell(ev.Left(rester, reasons.NoHeartbeat(5.0)))
    b.tell(ev.Joined(replace(peer(int(rester[1:])), holding=held, rest=Rest())))
    b.finish()
    assert b.state.history.redone == 0
    assert rester not in b.state.history.holders
    assert rester in b.state.peers


def test_a_peer_that_rests_and_wants_to_go_is_let_go():
    b = bench(0, 1, 2)
    to_step(b, 4)
    [spare] = set(b.state.peers) - set(b.state.history.holders)
    b.tell(ev.Rests(spare, Rest()))
    assert ev.Dismiss(spare, reasons.AskedToLeave()) in b.tell(ev.Leaving(spare))
    assert spare not in b.state.peers


def test_who_changes_its_mind_before_it_has_handed_over_keeps_its_stage():
    b = bench(0, 1, 2)
    to_step(b, 4)
    rester, generation = b.state.history.holders[0], b.state.history.generation
    b.tell(ev.Rests(rester, Rest()))
    b.tell(ev.Rests(rester, None))
    b.finish()
    assert (b.state.history.generation, b.state.history.holders[0]) == (generation, rester)


def test_who_rests_while_another_tries_its_stage_is_not_given_it_back():
    b = bench(0, 1, 2)
    to_step(b, 4)
    [spare] = set(b.state.peers) - set(b.state.history.holders)
    tried = assigned(b.state.history.holders, {}, former=(1, spare))
    b.state = replace(b.state, seats=tried)
    b.tell(ev.Rests(spare, Rest()))
    assert b.state.seats.former is None
    b.finish()
    assert b.state.history.redone == 0


def test_a_peers_words_become_rests():
    message = pb.PeerMessage(rest=pb.Rest(until=5.0))
    spec = make_spec()
    assert event_of("p", message, spec) == ev.Rests("p", Rest(5.0, own=True))
    assert event_of("p", pb.PeerMessage(rest=pb.Rest(over=True)), spec) == ev.Rests("p", None)
    with pytest.raises(ValueError, match="until"):
        event_of("p", pb.PeerMessage(rest=pb.Rest(until=float("nan"))), spec)


# Real processes


def test_peers_rest_and_wake_by_their_machines_and_their_owners_wish_and_no_step_is_redone(tmp_path):
    spec = make_spec(name="rest", stages=2, steps=100_000, eval={"interval": 0}, snapshots={"interval": 0})
    run = tmp_path / "run"

    def state(name: str) -> str:
        return next(p["state"] for p in status(tmp_path)["peers"] if p["name"] == name)

    def ask(command: str, *arguments: object) -> None:
        done = pmtrain(command, *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr

    with coordinator(spec, tmp_path) as (leader, link):
        peers = [begin("join", link, "--name", f"n{i}", "--dir", tmp_path / f"p{i}", cwd=tmp_path) for i in range(2)]
        wait_for(lambda: status(tmp_path)["step"] > 2, "no step was decided")
        [folder] = (path.parent for path in (tmp_path / "p0").glob("*/here"))
        ask("rest", "n0", "--run", folder)
        wait_for_event(run, "peer_rests", name="n0")
        assert state("n0") == "resting"
        stood = status(tmp_path)["step"]
        refused = pmtrain("wake", "n0", "--run", "run", cwd=tmp_path)
        assert refused.returncode == EXIT_REFUSED, "its own machine wants it"
        ask("wake", "--run", folder)
        wait_for_event(run, "peer_woke", name="n0")
        wait_for(lambda: status(tmp_path)["step"] > stood, "no step after it woke")
        ask("rest", "n1", "--run", "run")
        wait_for_event(run, "peer_rests", name="n1")
        wait_for_peer_event(tmp_path / "p1", "spare", reason="resting")
        ask("wake", "n1", "--run", "run")
        wait_for_event(run, "peer_woke", name="n1")
        stood = status(tmp_path)["step"]
        wait_for(lambda: status(tmp_path)["step"] > stood, "no step after the second woke")
        ask("stop", "run")
        for process in (*peers, leader):
            code, said = ends(process)
            assert code == 0, said
    assert not events(run, "rolled_back")
    assert status(tmp_path)["steps_redone"] == 0
