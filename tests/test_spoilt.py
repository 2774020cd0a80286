"""Snapshots that one holder keeps from being complete, in virtual time: given up, and the holder replaced."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from conftest import make_spec
from machine_bench import SILENT, Bench, peer, to_step, told

from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator import notices, reasons
from protomodels_cli.coordinator.history import GaveUp
from protomodels_cli.coordinator.snapshots.failures import NoTensors, NotWritten, Overdue, PartFailure, WrongTensor
from protomodels_cli.cost.memory import StageMemory
from protomodels_cli.cost.saving import largest_part, part_seconds

LIMIT = 60.0


def a_bench(peers: int, stages: int = 3) -> Bench:
    spec = make_spec(stages=stages, steps=40, snapshots={"interval": 2}, limits={"part_seconds": LIMIT})
    b = Bench(spec)
    b.join(*range(peers))
    return b


def step_on(b: Bench) -> None:
    """Without a word about snapshots."""
    for stage in range(b.state.stages):
        if b.state.task is not None and stage not in b.state.heard:
            b.done(stage)


def to_a_snapshot(b: Bench) -> ev.PartsArrived:
    """Until one is awaited; with no parts."""
    b.answer_until(lambda: b.state.history.pending, lambda: step_on(b))
    b.tell(ev.Tick())
    [mark] = b.state.history.pending
    return ev.PartsArrived(*mark.key, frozenset())


def withhold(b: Bench, *stages: int, seconds: float = LIMIT) -> list[ev.Command]:
    """All but these stages hand in their parts, and time passes."""
    awaited = to_a_snapshot(b)
    here = frozenset(range(b.state.stages)) - set(stages)
    b.tell(ev.PartsArrived(awaited.lineage, awaited.step, here))
    b.now += seconds - 1
    assert not told(b.tell(ev.Tick()), notices.SnapshotFailed)
    b.now += 1
    return b.tell(ev.Tick())


def dismissed(commands: Iterable[ev.Command]) -> list[tuple[str, reasons.Dismissal]]:
    return [(c.peer, c.why) for c in commands if isinstance(c, ev.Dismiss)]


def test_who_never_hands_its_part_in_is_replaced_and_snapshots_are_complete_again():
    b = a_bench(peers=4)
    to_step(b, 4)
    liar = b.state.history.holders[1]
    commands = withhold(b, 1)
    [failed] = told(commands, notices.SnapshotFailed)
    assert (failed.peer, failed.stage, failed.reason) == (liar, 1, Overdue(LIMIT))
    assert not dismissed(commands), "once may be an accident"
    assert b.state.task is not None, "steps go on"
    commands = withhold(b, 1)
    assert dismissed(commands) == [(liar, reasons.SpoiltSnapshots(1, 2, Overdue(LIMIT)))]
    assert len([r for r in b.records if isinstance(r, GaveUp)]) == 2
    assert (liar in b.state.history.holders, b.state.placed) == (False, True)
    b.finish()


def test_without_a_spare_steps_go_on_and_the_next_that_joins_takes_over():
    b = a_bench(peers=3)
    liar = b.state.history.holders[0]
    for times in (1, 1, 2, 4, 8, 8):  # it may just be slow
        assert not dismissed(withhold(b, 0, seconds=times * LIMIT))
    b.join(3)
    assert dismissed(withhold(b, 0, seconds=8 * LIMIT)) == [(liar, reasons.SpoiltSnapshots(0, 7, Overdue(8 * LIMIT)))]
    b.finish()


def test_a_peer_too_small_for_the_stage_is_nobody_to_take_over():
    b = a_bench(peers=3)
    small = peer(3)
    b.tell(ev.Joined(type(small)(**{**vars(small), "memory": 1000})))
    assert not any(dismissed(withhold(b, 0, seconds=seconds)) for seconds in (LIMIT, LIMIT, 2 * LIMIT))


def test_where_most_are_late_nobody_is_blamed_and_there_is_twice_the_time():
    b = a_bench(peers=4)
    for times in (1, 2, 4, 8, 8):
        commands = withhold(b, 0, 2, seconds=times * LIMIT)
        assert [n.stage for n in told(commands, notices.SnapshotFailed)] == [0, 2]
        assert not dismissed(commands)
    assert not b.state.conduct.spoilt
    b.answer_until(lambda: b.state.history.newest.step)
    withhold(b, 0, 1, 2)


def test_a_complete_snapshot_makes_up_for_one_that_was_spoilt():
    b = a_bench(peers=4)
    for _ in range(3):
        assert not dismissed(withhold(b, 1))
        newest = b.state.history.newest.step
        b.answer_until(lambda before=newest: b.state.history.newest.step > before)


@pytest.mark.parametrize("why", [WrongTensor("weights/x", "F32 [2]", ""), NoTensors("cut"), NotWritten("ENOSPC")])
def test_parts_that_are_not_what_they_should_be_count_alike(why: PartFailure):
    b = a_bench(peers=4)
    bad = b.state.history.holders[2]
    commands = list[ev.Command]()
    for _ in range(2):
        assert not dismissed(commands)
        awaited = to_a_snapshot(b)
        b.tell(ev.PartFailed(None, awaited.lineage, awaited.step, 2, NotWritten("here")))  # nobody's fault
        awaited = to_a_snapshot(b)
        commands = b.tell(ev.PartFailed(bad, awaited.lineage, awaited.step, 2, why))
    assert dismissed(commands) == [(bad, reasons.SpoiltSnapshots(2, 2, why))]
    b.finish()


def test_the_time_runs_while_all_holders_are_here():
    b = a_bench(peers=3)
    to_step(b, 4)
    to_a_snapshot(b)
    b.tell(ev.Left(b.state.history.holders[1], SILENT))
    b.now += 2 * LIMIT
    assert not told(b.tell(ev.Tick()), notices.SnapshotFailed)
    assert not b.state.saving.due


def test_how_long_parts_may_take_follows_from_the_largest():
    spec = make_spec(stages=4)
    memory = StageMemory(spec)
    largest = max(memory.saved(i, i + 1) for i in range(4))

    def seconds(**sections: object) -> float:
        made = make_spec(stages=4, **sections)
        return part_seconds(made, largest_part(made, (1, 1, 1, 1)))

    assert math.isclose(seconds(), 120 + 8 * largest / 4e6)
    assert math.isclose(seconds(snapshots={"max_bandwidth": "1mbit"}), 120 + 8 * largest / 0.5e6)
    assert math.isclose(seconds(wire={"link": {"bandwidth": "6mbit"}}), 120 + 8 * largest / 3e6)
    assert seconds(snapshots={"max_bandwidth": "80mbit"}) == seconds()
    assert seconds(limits={"part_seconds": 7}) == 7
    assert largest_part(spec, (2, 2)) > largest
