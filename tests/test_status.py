"""What `status` says of the machine's state."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import make_spec
from machine_bench import CUT_OFF, SILENT, Bench, peer, to_step, told

from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator import machine, notices
from protomodels_cli.coordinator.books import known_names
from protomodels_cli.coordinator.departures import MOST, Departed, with_new
from protomodels_cli.coordinator.reasons import Holder, Kicked, PeerReport, StagesWithoutPeer, UnprocessableMessage
from protomodels_cli.coordinator.sentences import sentence
from protomodels_cli.coordinator.status import describe
from protomodels_cli.observe import logs
from protomodels_cli.observe.metrics import JsonLines
from protomodels_cli.observe.notices import Teller
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.troubles import LinkNotOpened
from protomodels_cli.wire.usage import Usage


def status(b: Bench) -> pb.RunStatus:
    return describe(b.state, b.now, 0.0, 0)


def test_the_phases_of_a_run():
    b = Bench(make_spec(stages=2, steps=3))
    b.join(0)
    found = [status(b).phase]
    b.join(1)
    found.append(status(b).phase)
    to_step(b, 2)
    found.append(status(b).phase)
    b.tell(ev.Left("p0", CUT_OFF))
    found.append(status(b).phase)
    b.join(0)
    b.tell(ev.PauseRun())
    b.answer_until(lambda: status(b).phase == pb.RunStatus.PAUSED)
    b.tell(ev.ResumeRun())
    b.finish()
    found.append(status(b).phase)
    s = pb.RunStatus
    assert found == [s.WAITING_FOR_PEERS, s.ASSIGNING, s.RUNNING, s.WAITING, s.DONE]


def test_who_holds_what_and_who_is_lost():
    b = Bench(make_spec(stages=2, steps=9))
    b.join(0, 1, 2)
    to_step(b, 2)
    b.tell(ev.Leaving("p1"))
    p, found = pb.PeerStatus, [(p.state, p.stage if p.HasField("stage") else None) for p in status(b).peers]
    assert found == [(p.HOLDING, 0), (p.LEAVING, 1), (p.SPARE, None)]
    b = Bench(make_spec(stages=2, steps=9))
    b.join(0, 1)
    to_step(b, 2)
    b.lose("p0")
    first, second = status(b).stages
    assert (first.state, first.holders[0].peer, first.holders[0].name) == (pb.StageStatus.LOST, "p0", "name-0")
    assert (second.state, second.holders[0].name) == (pb.StageStatus.WAITING, "name-1")


@pytest.mark.parametrize("reserved", [0, 1 << 30])
def test_memory_is_the_stages_own_on_a_card_alone(reserved):
    """Only there torch says how much it has taken."""
    b = Bench(make_spec(stages=2, steps=9))
    b.join(0, 1)
    used = Usage(peak_memory=1 << 20, reserved_memory=reserved, celsius=71.5, watts=300.0)
    b.state = replace(b.state, measured=replace(b.state.measured, usage={0: used}))
    first, second = status(b).stages
    assert (first.process_memory, second.process_memory) == (not reserved, False)
    assert (first.celsius, first.watts, second.celsius) == (71.5, 300.0, 0.0)


WENT = [
    ([ev.Left("p0", CUT_OFF), ev.Left("p0", SILENT)], pb.AWAY),
    ([ev.Leaving("p0")], pb.LEFT),
    ([ev.Trouble("p0", Kicked())], pb.KICKED),
    ([ev.Trouble("p0", UnprocessableMessage("Done"))], pb.DISMISSED),
]


@pytest.mark.parametrize(("events", "how"), WENT, ids=[pb.Presence.Name(how) for _, how in WENT])
def test_a_peer_that_is_gone_keeps_its_name_and_it_is_known_how_it_went(events, how):
    b = Bench(make_spec(stages=2, steps=9))
    b.join(0, 1)
    to_step(b, 2)
    for event in events:
        b.tell(event)
    b.answer_until(lambda: "p0" not in b.state.peers)
    found = status(b)
    [holder] = found.stages[0].holders
    assert (holder.peer, holder.name, holder.presence) == ("p0", "name-0", how)
    assert [(g.peer, g.name, g.how) for g in found.gone] == [("p0", "name-0", how)]
    assert found.gone[0].gone_s < 60
    b.tell(ev.Joined(replace(peer(0), id="p7")))
    assert not status(b).gone, "who is back under the same name is not gone"


def test_a_peer_that_is_not_waited_for_any_more_is_lost():
    b = Bench(make_spec(stages=2, steps=9))
    b.join(0, 1)
    to_step(b, 2)
    b.lose("p0")
    assert [g.how for g in status(b).gone] == [pb.LOST]


def test_names_outlast_a_restart_of_the_coordinator():
    b = Bench(make_spec(stages=2, steps=9))
    b.join(0, 1)
    to_step(b, 2)
    b.state = machine.resume(b.state.spec, b.state.t_fixed, b.state.history, b.now, {"p1": "desk"})
    holders = [stage.holders[0] for stage in status(b).stages]
    assert [(h.peer, h.name, h.presence) for h in holders] == [("p0", "", pb.AWAY), ("p1", "desk", pb.AWAY)]


def test_names_are_found_in_the_events(tmp_path):
    with JsonLines(tmp_path / "events.jsonl") as rows:
        tell = Teller(sentence, logs.COORDINATOR, lambda text: None, rows)
        tell(notices.PeerJoined("p1", "desk", "cpu"))
        tell(notices.PeerJoined("p1", "attic", "cpu"))
        tell(notices.StagesAssigned(1, (2, 2), (Holder(0, "p1", "attic"), Holder(1, "p2", "cellar"))))
    assert known_names(tmp_path / "events.jsonl") == {"p1": "attic", "p2": "cellar"}
    assert known_names(tmp_path / "nothing") == {}


def test_many_that_went_are_forgotten_but_for_the_last_holders():
    departed = {f"p{i}": Departed(f"n{i}", "left", float(i)) for i in range(3)}
    new = {f"q{i}": Departed(f"m{i}", "lost", 9.0) for i in range(MOST)}
    found = with_new(departed, new, ("p1",))
    assert len(found) == MOST
    assert set(found) == {"p1", *(f"q{i}" for i in range(1, MOST))}


# A run that stands still


def test_holders_that_wait_for_one_of_another_stage_are_no_spares():
    b = Bench(make_spec(stages=2, steps=9))
    b.join(0)
    p = pb.PeerStatus
    assert [row.state for row in status(b).peers] == [p.UNPLACED]
    b.join(1, 2)
    to_step(b, 2)
    b.tell(ev.Leaving("p2"))
    b.tell(ev.Trouble("p1", Kicked()))
    found = status(b)
    assert (found.phase, found.waiting_kind) == (pb.RunStatus.WAITING, StagesWithoutPeer.kind)
    assert [(row.name, row.state, row.stage) for row in found.peers] == [("name-0", p.HOLDING, 0)]


def test_what_is_missing_is_a_peer_or_one_with_more_memory():
    b = Bench(make_spec(stages=2, steps=9))
    b.join(0, 1)
    to_step(b, 2)
    b.tell(ev.Trouble("p1", Kicked()))
    waits = b.waits()
    assert isinstance(waits, StagesWithoutPeer)
    assert ([s.stage for s in waits.stages], waits.too_small) == ([1], 0)
    b.tell(ev.Joined(replace(peer(5), memory=1000)))
    waits = b.waits()
    assert isinstance(waits, StagesWithoutPeer)
    assert waits.too_small == 1
    assert [row.state for row in status(b).peers] == [pb.PeerStatus.HOLDING, pb.PeerStatus.SPARE]


USED = Usage(compute_s=1.0, wait_s=2.0, wire_s=1.0, forward_bytes=64, backward_bytes=64, peak_memory=7, path="lan")


def at_work() -> Bench:
    """With steps that took a while."""
    b = Bench(make_spec(stages=2, steps=99))
    b.join(0, 1)

    def answer() -> None:
        b.now += 1.0
        task = b.state.task
        for stage in range(b.state.stages if task is not None else 0):
            b.done(stage, usage=USED)
        if task is None:
            b.answer()

    b.answer_until(lambda: b.state.history.step == 5, answer)
    found = status(b)
    assert found.tokens_per_s > 0
    assert found.HasField("eta_s")
    assert [s.compute_share for s in found.stages] == [0.25, 0.25]
    return b


def at_rest(found: pb.RunStatus) -> None:
    assert (found.tokens_per_s, found.HasField("eta_s")) == (0.0, False)
    for stage in found.stages:
        assert (stage.compute_share, stage.wait_share, stage.wire_share) == (0.0, 0.0, 0.0)
        assert (stage.forward_bytes_per_token, stage.ratio_bf16) == (0.0, 0.0)
        assert stage.state in (pb.StageStatus.WAITING, pb.StageStatus.LOST)


def test_a_run_that_waits_for_a_holder_shows_nothing_of_steps_before():
    b = at_work()
    b.tell(ev.Left("p0", SILENT))
    found = status(b)
    assert found.phase == pb.RunStatus.WAITING
    at_rest(found)
    assert found.stages[1].peak_memory == 7, "the stage is still there"


def test_a_paused_run_shows_nothing_of_steps_before_and_times_no_pause():
    b = at_work()
    speed = status(b).tokens_per_s
    b.tell(ev.PauseRun())
    b.answer_until(lambda: status(b).phase == pb.RunStatus.PAUSED)
    at_rest(status(b))
    b.now += 3600
    b.tell(ev.ResumeRun())
    step = b.state.history.step
    b.now += 1.0
    b.answer_until(lambda: b.state.history.step > step)
    assert status(b).tokens_per_s > speed / 9, "the hour of the pause counts for nothing"


# Spares


def spares_told(b: Bench) -> int:
    return len(told(b.commands, notices.NoSpareLeft))


def test_that_no_spare_is_left_is_told_once_when_it_becomes_true():
    b = Bench(make_spec(stages=2, steps=99))
    b.join(0, 1)
    to_step(b, 3)
    assert (status(b).no_spare, spares_told(b)) == (True, 0), "there never was one"
    b.join(2, 3)
    assert not status(b).no_spare
    b.lose("p2")
    assert (status(b).no_spare, spares_told(b)) == (False, 0), "one is left"
    b.lose("p0")
    to_step(b, b.state.history.step + 1)
    assert (status(b).no_spare, spares_told(b)) == (True, 1), "it holds a stage now"
    to_step(b, b.state.history.step + 2)
    assert spares_told(b) == 1
    b.join(4)
    assert not status(b).no_spare
    b.tell(ev.Leaving("p4"))
    assert (status(b).no_spare, spares_told(b)) == (True, 2)
    b.lose("p1")
    assert not status(b).no_spare, "it has stopped: there is something else to say"


def test_a_spare_without_the_memory_for_a_stage_is_none():
    b = Bench(make_spec(stages=2, steps=99))
    b.join(0, 1)
    to_step(b, 3)
    b.tell(ev.Joined(replace(peer(5), memory=1000)))
    assert status(b).no_spare


def test_what_keeps_a_link_from_opening_is_shown_until_the_next_decision():
    b = Bench(make_spec(stages=2, steps=9))
    b.join(0, 1)
    b.answer()
    b.tell(ev.Trouble("p0", PeerReport(LinkNotOpened(1, "RELAY")), 1, 1))
    found = status(b)
    assert found.trouble_kind == LinkNotOpened.kind
    assert "RELAY" in found.trouble
    to_step(b, 1)
    assert status(b).trouble, "it may come again"
    to_step(b, 2)
    assert (status(b).trouble, status(b).trouble_kind) == ("", "")


def test_what_a_crash_would_cost_now():
    b = Bench(make_spec(stages=2, steps=9, snapshots={"interval": 3}))
    b.join(0, 1, 2)
    b.now += 40  # both stages are built from the seed
    b.answer()
    assert not status(b).HasField("crash_redo_s"), "nobody knows what a step takes"
    to_step(b, 1)
    for step in (2, 3):
        b.now += 10
        to_step(b, step)
    found = status(b)
    assert found.crash_redo_s == pytest.approx(2 * 10, abs=0.5)
    assert found.crash_restore_s == pytest.approx(40, abs=0.5), "there is no part to fetch yet"
    b.now += 10
    b.answer_until(lambda: b.state.history.pending)
    b.now += 5
    to_step(b, 5)
    found = status(b)
    assert (found.snapshot_step, found.step) == (3, 4)
    assert found.crash_redo_s == pytest.approx(10, abs=0.5), "the median"
    assert found.crash_restore_s == pytest.approx(5 + 40, abs=0.5), "a fetch like the upload, and building"
    first, second = b.state.history.newest.as_parts()
    b.tell(ev.Prefetched("p2", first))
    b.tell(ev.Prefetched("p2", second))
    b.lose(b.state.history.holders[0])
    b.now += 30
    to_step(b, 4)
    assert status(b).crash_restore_s == pytest.approx(5 + 30, abs=0.5), "whoever has the part shows what building takes"
    b.join(3)
    to_step(b, 5)
    b.lose("p2")
    b.now += 7
    to_step(b, 4)
    found = status(b)
    assert found.crash_redo_s == 0, "all of it is saved"
    assert found.crash_restore_s == pytest.approx(7, abs=0.5), "as the last time"
    b.finish()
    assert not status(b).HasField("crash_redo_s")
