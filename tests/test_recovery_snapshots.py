"""What the machine does about snapshots: damaged, failed, not yet settled, kept and fetched ahead."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import make_spec
from machine_bench import BROKEN, Bench, peer, to_step, told

from protomodels_cli.coordinator import assigning, machine, notices, reasons
from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator.history import Began, Forgot, Synced
from protomodels_cli.coordinator.peers import Holding
from protomodels_cli.coordinator.snapshots import policy
from protomodels_cli.coordinator.snapshots.failures import NoRoom, NotWritten
from protomodels_cli.coordinator.snapshots.room import missing_room
from protomodels_cli.cost import saving

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


# By time


def begun(b: Bench) -> list[int]:
    return [r.step for r in b.records if isinstance(r, Began)]


def take_steps(b: Bench, until: int, seconds: float) -> None:
    """Each of which takes so long; whatever else is owed is answered at once."""

    def answer() -> None:
        if b.state.task is not None and b.state.task.kind == "step" and not b.state.history.pending:
            b.now += seconds
        b.answer()

    b.answer_until(lambda: b.state.history.step >= until, answer)
    b.answer_until(lambda: b.state.task is not None and b.state.task.kind == "step")


@pytest.mark.parametrize(
    ("snapshots", "expected"),
    [
        ({"every": "1min"}, [6, 12, 18]),  # steps of ten seconds and what goes with them
        ({"every": "1min", "interval": 4}, [4, 8, 12, 16]),
        ({"every": "1min", "interval": 9}, [6, 9, 15, 18]),
        ({"every": "1s"}, list(range(1, 19))),
        ({"interval": 0}, []),
        ({}, [6, 12, 18]),  # uploads take next to nothing: a minute
    ],
)
def test_a_snapshot_is_due_after_so_many_steps_or_so_much_time(snapshots, expected):
    b = Bench(make_spec(stages=2, steps=30, snapshots=snapshots, subspace={"sync_interval": 1000}))
    b.join(0, 1)
    take_steps(b, 18, 10.0)
    assert begun(b) == expected
    syncs = [r.step for r in b.records if isinstance(r, Synced) and r.step]
    assert syncs == expected, "what is saved was checked, and nothing else had to be"


def test_the_time_starts_again_with_a_lineage_and_with_a_coordinator():
    b = Bench(make_spec(stages=2, steps=30, snapshots={"every": "1min"}))
    b.join(0, 1, 2)
    take_steps(b, 10, 10.0)
    assert begun(b) == [6]
    b.lose(b.state.history.holders[0])
    b.now += 3600
    take_steps(b, 13, 10.0)
    assert (b.state.history.lineage, begun(b)) == (2, [6, 12]), "six steps of its own"
    before = b.state.history
    b.state = machine.resume(b.state.spec, b.state.t_fixed, before, b.now)
    b.now += 3600
    for i, holder in enumerate(before.holders):
        here = Holding(before.lineage, i, before.layers, before.step)
        b.tell(ev.Joined(replace(peer(int(holder[1:])), holding=here)))
    take_steps(b, 19, 10.0)
    assert begun(b) == [6, 12, before.step + 6]


def test_one_that_is_due_by_time_waits_for_the_one_that_is_still_uploading():
    b = Bench(make_spec(stages=1, steps=30, snapshots={"every": "1s"}, eval={"interval": 0}))
    b.join(0)

    def tasks_alone() -> None:
        if b.state.owed is not None:
            b.answer()
        else:
            b.now += 2
            b.done(0)

    b.answer_until(lambda: b.state.history.step == 5, tasks_alone)
    assert begun(b) == [1]
    assert told(b.commands, notices.SnapshotSkipped) == [notices.SnapshotSkipped(2, 1)], "once"
    b.tell(ev.SnapshotWhole(1, 1, ("a",)))
    assert b.state.saving.pace.upload > 8
    b.answer_until(lambda: b.state.history.step == 7, tasks_alone)
    assert begun(b) == [1, 6]


def test_where_nothing_is_said_failures_and_uploads_say_how_often():
    b = Bench(make_spec(stages=2, steps=30))
    b.join(0, 1, 2)
    take_steps(b, 3, 10.0)
    calm = policy.seconds_between(b.state)
    b.state = replace(b.state, saving=replace(b.state.saving, pace=replace(b.state.saving.pace, upload=60.0)))
    dear = policy.seconds_between(b.state)
    b.lose(b.state.history.holders[0])
    take_steps(b, 3, 10.0)
    assert b.state.history.rollbacks == 1
    assert calm == saving.SHORTEST
    assert calm < policy.seconds_between(b.state) < dear


# A disk without room


def test_a_snapshot_without_room_is_skipped_and_made_up_for():
    b = Bench(make_spec(stages=2, steps=30, snapshots={"interval": 4}, subspace={"sync_interval": 1000}))
    b.join(0, 1)
    b.tell(ev.Tick(room=1000))
    take_steps(b, 6, 1.0)
    assert begun(b) == []
    assert not [r for r in b.records if isinstance(r, Synced) and r.step], "nothing that is not saved has to be checked"
    [skipped] = told(b.commands, notices.SnapshotWithoutRoom)
    assert skipped.step == 4
    assert skipped.missing == missing_room(b.state.spec, b.state.history.layers, 1000) > 0
    b.tell(ev.Tick(room=1 << 40))
    take_steps(b, 9, 1.0)
    assert begun(b) == [7, 8], "the first step with room, and the next at its interval"
    b.tell(ev.Tick(room=0))
    take_steps(b, 14, 1.0)
    assert [n.step for n in told(b.commands, notices.SnapshotWithoutRoom)] == [4, 12]


def test_one_that_the_run_waits_for_is_tried_until_there_is_room():
    b = Bench(make_spec(stages=2, steps=3, snapshots={"interval": 0}))
    b.join(0, 1)
    b.tell(ev.Tick(room=0))
    b.answer_until(lambda: b.state.history.step == 3 and b.state.task is None)
    lacking = NoRoom(missing_room(b.state.spec, b.state.history.layers, 0))
    assert b.waits() == reasons.SnapshotFailing(3, lacking)
    for _ in range(3):
        b.now += 6
        b.tell(ev.Tick(room=0))
        assert b.waits() == reasons.SnapshotFailing(3, lacking)
    assert len(told(b.commands, notices.SnapshotWithoutRoom)) == 1
    b.now += 6
    b.tell(ev.Tick(room=1 << 40))
    assert begun(b) == [3]
    b.finish()
