"""What `status` says of the machine's state."""

from __future__ import annotations

import pytest
from conftest import make_spec
from machine_bench import CUT_OFF, Bench, to_step

from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator.reasons import PeerReport
from protomodels_cli.coordinator.status import describe
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.troubles import LinkNotOpened


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
    assert (first.state, first.holders[0].peer, first.holders[0].name) == (pb.StageStatus.LOST, "p0", "")
    assert (second.state, second.holders[0].name) == (pb.StageStatus.WAITING, "name-1")


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
