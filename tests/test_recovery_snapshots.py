"""What the machine does about snapshots: damaged, failed, not yet settled, kept and fetched ahead."""

from __future__ import annotations

from dataclasses import replace

from conftest import make_spec
from machine_bench import BROKEN, Bench, peer, to_step, told

from protomodels_cli.coordinator import assigning, notices, reasons
from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator.history import Forgot
from protomodels_cli.coordinator.snapshots.failures import NotWritten

FULL = NotWritten("ENOSPC")


def test_a_damaged_snapshot_is_forgotten_and_an_older_one_used():
    b = Bench(make_spec(stages=2, steps=9, snapshots={"interval": 2}))
    b.join(0, 1, 2)
    to_step(b, 6)
    assert [m.step for m in b.state.history.snapshots] == [0, 2, 4]
    b.lose(b.state.history.holders[0])
    history = b.state.history
    b.tell(ev.SnapshotLost(history.holders[0], history.generation, 1, 4, "damaged"))
    assert [r for r in b.records if isinstance(r, Forgot)] == [Forgot(1, 4, unusable=True)]
    assert b.state.history.step == 2
    b.finish()
    assert b.state.history.lineage == 3


def test_a_peer_that_alone_cannot_read_a_snapshot_tries_again_and_goes_at_last():
    b = Bench(make_spec(stages=2, steps=6, snapshots={"interval": 2}))
    b.join(0, 1, 2)
    to_step(b, 6)
    b.lose(b.state.history.holders[0])
    bad = "p2"
    for _ in range(assigning.DISMISS_AFTER):
        history = b.state.history
        assert bad in history.holders
        b.tell(ev.SnapshotLost(bad, history.generation, 1, 4, "not to be read", whole_here=True))
    assert bad not in b.state.peers
    assert not b.state.relay_all, "nothing is wrong with links"
    assert b.state.history.newest.step == 4, "a peer's word costs nobody a snapshot"
    b.join(3)
    b.finish()


def test_a_stage_is_asked_for_its_part_once_a_generation():
    b = Bench(make_spec(stages=2, steps=6, snapshots={"interval": 2}, eval={"interval": 2}))

    def asked() -> int:
        return len([c for c in b.commands if isinstance(c, ev.SendTurn) and c.save])

    def to_a_step() -> None:
        """Without handing anything in."""
        b.answer_until(lambda: b.state.task.kind == "step", lambda: (b.done(0), b.done(1)))

    b.join(0, 1)
    to_step(b, 2)
    b.done(0), b.done(1)
    to_a_step()
    assert ("evaluation", 2) in b.tasks()
    assert asked() == 1
    b.tell(ev.Trouble(b.state.history.holders[0], BROKEN, 1, 1))
    to_a_step()
    assert asked() == 2, "the turn may have been lost"


def test_a_part_that_failed_is_given_up_also_while_the_run_waits_for_a_peer():
    b = Bench(make_spec(stages=2, steps=8, snapshots={"interval": 2}))
    b.join(0, 1)
    b.answer_until(lambda: b.state.history.pending)
    b.lose("p0")
    assert not b.state.placed
    b.tell(ev.PartFailed("p1", 1, 2, 1, FULL))
    assert not b.state.history.pending


def test_a_snapshot_that_fails_is_left_out_and_the_last_one_is_waited_for():
    b = Bench(make_spec(stages=2, steps=4, snapshots={"interval": 2}))
    b.join(0, 1)
    to_step(b, 3)
    assert [m.step for m in b.state.history.pending] == [2]
    b.tell(ev.PartFailed(None, 1, 2, 0, FULL))
    assert (b.state.task.kind, b.state.task.step) == ("step", 3), "the run goes on"
    b.answer_until(lambda: b.state.history.pending)
    b.answer_until(lambda: b.state.task is None, lambda: (b.done(0), b.done(1)))
    b.tell(ev.PartFailed("p1", 1, 4, 1, FULL))
    assert b.waits() == reasons.SnapshotFailing(4, FULL)
    assert told(b.commands, notices.SnapshotFailed) == [
        notices.SnapshotFailed(2, 0, None, "", FULL),
        notices.SnapshotFailed(4, 1, "p1", "name-1", FULL),
    ]
    b.tell(ev.Tick())
    assert not b.state.history.pending
    b.now += 6
    b.tell(ev.Tick())
    assert b.state.history.pending, "it tries again"
    b.finish()
    assert [m.step for m in b.state.history.snapshots] == [0, 4]


def test_a_snapshot_counts_once_the_subspace_of_its_step_is_settled():
    spec = make_spec(
        stages=2, steps=9, snapshots={"interval": 4}, subspace={"update": {"interval": 4, "window": 1, "delay": 2}}
    )
    b = Bench(spec)
    b.join(0, 1)
    b.answer_until(lambda: b.state.history.pending, lambda: (b.done(0), b.done(1)))
    b.tell(ev.SnapshotWhole(1, 4, ("a", "b")))
    assert b.state.history.newest.step == 0, "going back there, who would know what becomes of U?"
    b.tell(ev.SubspaceReported(b.state.history.holders[-1], 1, 4, {}, "new"))
    assert b.state.history.newest.step == 4
    assert b.state.history.newest.next_basis.first_step == 7
    to_step(b, 8)
    assert b.state.history.basis_version == 1
    b.join(2)
    b.lose(b.state.history.holders[0])
    assert (b.state.history.step, b.state.history.basis_version) == (4, 0)
    assert b.state.history.next_basis.first_step == 7, "it waits for its step again"
    b.finish()


def test_as_many_snapshots_as_asked_for_are_kept_and_the_newest_never_goes():
    b = Bench(make_spec(stages=2, steps=9, snapshots={"interval": 1, "keep": 2}))
    b.join(0, 1)
    b.finish()
    assert [m.step for m in b.state.history.snapshots] == [0, 8, 9]


def test_a_spare_that_has_the_part_is_asked_before_one_that_has_not():
    b = Bench(make_spec(stages=2, steps=9, snapshots={"interval": 3, "warm_spares": True}))
    b.join(0, 1, 2, 3)
    to_step(b, 6)
    gone, stays = b.state.history.holders
    part, other = b.state.history.newest.as_parts()
    assert (b.state.peers[gone].parts, b.state.peers[stays].parts) == ({part}, {other}), "who hands it in has it too"
    b.tell(ev.Prefetched("p3", part))
    b.tell(ev.Prefetched("p3", replace(part, sha256="made up")))
    assert b.state.peers["p3"].parts == {part}, "only what a snapshot has"
    b.lose(gone)
    assert b.state.history.holders == ("p3", stays), "p2 was there first"
    b.finish()


def test_after_going_back_everyone_holds_the_stage_whose_part_is_on_its_disk():
    b = Bench(make_spec(stages=3, steps=9, snapshots={"interval": 3}))
    b.join(0, 1, 2)
    to_step(b, 6)
    b.lose(b.state.history.holders[0])
    b.tell(ev.Joined(peer(3)))
    to_step(b, 8)
    before = b.state.history.holders
    assert before != tuple(sorted(before)), "not in the order in which they joined"
    mark = b.state.history.newest
    b.tell(ev.SnapshotLost(before[1], b.state.history.generation, mark.lineage, mark.step, "damaged"))
    assert b.state.history.newest.step == 3
    assert b.state.history.holders == before
    b.finish()
