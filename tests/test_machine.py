"""The coordinator's brain, without processes: tables, random events, and the journal that brings it back."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from conftest import make_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator import machine
from protomodels_cli.coordinator.history import (
    Decided,
    Ended,
    Forgot,
    History,
    Record,
    RolledBack,
    Saved,
    fold,
)
from protomodels_cli.coordinator.plan import waiting_for
from protomodels_cli.coordinator.state import Holding, Peer, Report
from protomodels_cli.model.schedule import clip_coefficient, learning_rate
from protomodels_cli.spec import RunSpec

UNITS = ("embed", "layers.0", "layers.1", "layers.2", "layers.3", "head")


def peer(i: int) -> Peer:
    return Peer(f"p{i}", f"name-{i}", "cpu", 1 << 34, 1e9, "127.0.0.1", "127.0.0.1", 1000 + i, 0.0)


class Bench:
    """A machine, what it recorded, and stages that do as they are told."""

    def __init__(self, spec: RunSpec):
        dense = spec.subspace.form == "dense"
        self.state = machine.start(spec, "" if dense else "u0", (0, "") if dense else (1, "t"))
        self.first = self.state.history
        self.now = 0.0
        self.records: list[Record] = []
        self.commands: list[ev.Command] = []

    def tell(self, event: ev.Event) -> list[ev.Command]:
        self.now += 0.1
        self.state, records, commands = machine.apply(self.state, event, self.now)
        self.records += records
        self.commands += commands
        assert bool(waiting_for(self.state, self.now)) == (not self.state.history.over), "every wait has a sentence"
        return commands

    def join(self, *peers: int) -> None:
        for i in peers:
            self.tell(ev.Joined(peer(i)))

    def report(self, loss: float = 1.0) -> Report:
        hashes = machine.right_hashes(self.state)
        return Report(
            hashes=hashes,
            norms=(("layers.0", 0.25),),
            loss_sum=loss * 64,
            tokens=64,
            parameters=(("w", "h"),),
            usage={},
        )

    def done(self, stage: int, **changes: Any) -> list[ev.Command]:
        assert self.state.task is not None
        report = replace(self.report(), **changes)
        history = self.state.history
        return self.tell(ev.Done(history.holders[stage], history.generation, self.state.task.number, report))

    def answer(self) -> None:
        """Everything that an honest run owes, once."""
        state, history = self.state, self.state.history
        if not state.placed:
            return
        if state.owed is not None:
            moved = state.spec.subspace.update.interval > 0
            sha256 = "new" if moved else None
            self.tell(ev.SubspaceReported(history.holders[-1], history.generation, state.owed, {"x": 1}, sha256))
        elif history.next_basis is not None and len(state.took_basis) < state.stages:
            new = history.next_basis
            for holder in history.holders:
                self.tell(ev.BasisTaken(holder, history.generation, new.version, new.sha256))
        elif history.pending:
            mark = history.pending[0]
            parts = tuple(f"{mark.step}-{i}" for i in range(state.stages))
            self.tell(ev.SnapshotWhole(mark.lineage, mark.step, parts))
        elif state.task is not None:
            for stage in range(state.stages):
                if stage not in self.state.heard and self.state.task == state.task:
                    self.done(stage)

    def finish(self, limit: int = 500) -> None:
        for _ in range(limit):
            if self.state.history.over:
                return
            self.answer()
        raise AssertionError(f"it waits for {waiting_for(self.state, self.now)}")

    def tasks(self) -> list[tuple[str, int]]:
        return [(c.task.kind, c.task.step) for c in self.commands if isinstance(c, ev.SendTurn) and c.task]


def test_a_run_is_a_chain_of_tasks():
    spec = make_spec(stages=2, steps=6, subspace={"sync_interval": 2}, eval={"interval": 3}, snapshots={"interval": 4})
    b = Bench(spec)
    b.join(0)
    assert "1 of 2" in waiting_for(b.state, b.now)
    b.join(1)
    b.finish()
    assert b.tasks() == [
        ("link", 0),
        ("step", 1),
        ("step", 2),
        ("sync", 2),
        ("step", 3),
        ("evaluation", 3),
        ("step", 4),
        ("sync", 4),
        ("step", 5),
        ("step", 6),
        ("sync", 6),
        ("evaluation", 6),
        ("finish", 6),
    ]
    assert isinstance(b.state.history.ended, Ended)
    saves = [(c.task.kind, c.task.step) for c in b.commands if isinstance(c, ev.SendTurn) and c.save and c.task]
    assert saves == [("step", 5), ("evaluation", 6)], "saved beside the next task, after the check of what is saved"
    assert [r.step for r in b.records if isinstance(r, Saved)] == [4, 6]


def test_a_decision_travels_with_the_next_task_and_only_once():
    b = Bench(make_spec(stages=2, steps=3))
    b.join(0, 1)
    b.finish()
    turns = [c for c in b.commands if isinstance(c, ev.SendTurn)]
    assert [t.decision.step for t in turns if t.decision] == [1, 2, 3]
    for turn in turns:
        if turn.task and turn.task.kind == "step" and turn.task.step > 1:
            assert turn.decision is not None
            assert turn.decision.step == turn.task.step - 1


def test_the_decision_is_the_references():
    spec = make_spec(stages=2, steps=3, optimizer={"clip": 0.5})
    b = Bench(spec)
    b.join(0, 1)
    b.answer(), b.answer()
    b.done(0, norms=(("embed", 9.0), ("layers.0", 4.0)))
    b.done(1, norms=(("layers.1", 3.0), ("head", 0.0)), loss_sum=128.0)
    [decided] = [r for r in b.records if isinstance(r, Decided)]
    assert decided.apply
    assert decided.norm == 4.0
    assert decided.clip == clip_coefficient(4.0, 0.5)
    assert decided.lr == learning_rate(spec.optimizer, 1, 3)
    assert decided.loss == 2.0


@pytest.mark.parametrize("bad", [{"norms": (("layers.0", math.inf),)}, {"norms": (("layers.0", math.nan),)}])
def test_one_bad_number_anywhere_skips_the_step_everywhere(bad):
    b = Bench(make_spec(stages=2, steps=3, limits={"nonfinite_steps": 2}))
    b.join(0, 1)
    b.answer(), b.answer()
    b.done(0, **bad)
    commands = b.done(1)
    [turn] = [c for c in commands if isinstance(c, ev.SendTurn)]
    assert turn.decision is not None
    assert not turn.decision.apply
    b.done(0, **bad)
    b.done(1)
    assert "2 steps in a row, up to step 2" in b.state.history.paused.why
    b.answer(), b.answer(), b.answer()
    assert b.state.task is None
    assert "its owner to resume it: 2 steps in a row" in waiting_for(b.state, b.now)
    b.tell(ev.ResumeRun())
    assert (b.state.task.kind, b.state.task.step) == ("step", 3)


def test_stale_and_foreign_words_change_nothing():
    b = Bench(make_spec(stages=2, steps=3))
    b.join(0, 1, 2)
    b.answer(), b.answer()
    before = b.state
    number = before.task.number
    for event in (
        ev.Done("p0", 1, number - 1, b.report()),
        ev.Done("p0", 0, number, b.report()),  # of another generation
        ev.Done("nobody", 1, number, b.report()),
        ev.Done("p2", 1, number, b.report()),  # a spare
        ev.SubspaceReported("p0", 1, 1, {}, "x"),
        ev.BasisTaken("p0", 1, 7, "x"),
        ev.SnapshotWhole(1, 1, ("a", "b")),
        ev.PartFailed(None, 1, 1, "full"),
        ev.PartFailed("p2", 1, 0, "a spare's"),
        ev.SnapshotLost("p0", 1, 1, 1, "damaged"),
        ev.Trouble("p2", "a spare blames", 1, 1),
        ev.Trouble("p0", "of another generation", 1, 0),
        ev.Left("nobody", ""),
    ):
        assert b.tell(event) == []
        assert b.state == before
    b.done(0)
    b.done(0, norms=(("layers.0", 99.0),))  # twice: the first counts
    assert b.state.heard[0].norms == (("layers.0", 0.25),)


def test_a_new_basis_is_used_by_all_from_its_step_on():
    spec = make_spec(stages=2, steps=7, subspace={"update": {"interval": 3, "window": 2, "delay": 1}})
    b = Bench(spec)
    b.join(0, 1)
    versions = {}
    while not b.state.history.over:
        if b.state.task and b.state.task.kind == "step":
            versions[b.state.task.step] = b.state.history.basis_for(b.state.task.step)[0]
            holders_have = b.state.took_basis
            if versions[b.state.task.step] > b.state.history.basis_version:
                assert holders_have == {0, 1}
        b.answer()
    assert versions == {1: 0, 2: 0, 3: 0, 4: 0, 5: 1, 6: 1, 7: 1}
    assert [c.version for c in b.commands if isinstance(c, ev.SendBasis)] == [1, 2]


def test_the_step_of_a_switch_waits_for_the_basis_and_says_so():
    b = Bench(make_spec(stages=2, steps=5, subspace={"update": {"interval": 2, "window": 1, "delay": 0}}))
    b.join(0, 1)
    while b.state.owed is None:
        b.answer()
    assert b.state.task is None
    turn = [c for c in b.commands if isinstance(c, ev.SendTurn)][-1]
    assert turn.decision is not None, "the decision is not held back: the basis is computed from it"
    assert turn.task is None
    assert "what becomes of the subspace after step 2" in waiting_for(b.state, b.now)
    b.tell(ev.SubspaceReported(b.state.history.holders[-1], 1, 2, {}, "new"))
    b.tell(ev.BasisTaken(b.state.history.holders[0], 1, 1, "new"))
    assert "to take basis 1" in waiting_for(b.state, b.now)
    b.tell(ev.BasisTaken(b.state.history.holders[1], 1, 1, "new"))
    assert (b.state.task.kind, b.state.task.step) == ("step", 3)


def to_step(b: Bench, step: int) -> None:
    """Until that step is under way."""
    while not (b.state.task and (b.state.task.kind, b.state.task.step) == ("step", step)):
        b.answer()


def holding(b: Bench, stage: int, **changes: Any) -> Holding:
    history = b.state.history
    return replace(Holding(history.lineage, stage, history.layers, history.step), **changes)


def test_who_is_lost_before_the_first_decision_is_replaced_and_the_cut_may_change():
    b = Bench(make_spec(stages=2, steps=3))
    b.join(0, 1, 2)
    b.answer(), b.answer()
    gone = b.state.history.holders[1]
    b.tell(ev.Left(gone, "killed", may_return=True))
    assert b.state.history.generation == 2
    assert gone not in b.state.history.holders
    b.finish()


def test_who_is_lost_later_is_replaced_from_the_newest_snapshot():
    b = Bench(make_spec(stages=2, steps=9, snapshots={"interval": 3}))
    b.join(0, 1, 2)
    to_step(b, 6)
    gone, stays = b.state.history.holders
    b.tell(ev.Left(gone, "killed"))
    [back] = [r for r in b.records if isinstance(r, RolledBack)]
    assert (back.lineage, back.from_lineage, back.step) == (2, 1, 3)
    assert b.state.history.holders == ("p2", stays)
    placed = [c for c in b.commands if isinstance(c, ev.PlaceStage)][-2:]
    assert [c.keep for c in placed] == [False, False], "what the other has in memory is of another history now"
    b.finish()
    assert [r.step for r in b.records if isinstance(r, Decided)] == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 9]
    assert b.state.history.redone == 2


def test_without_a_spare_it_waits_and_says_for_what_and_the_others_keep_what_they_have():
    b = Bench(make_spec(stages=2, steps=9))
    b.join(0, 1)
    to_step(b, 6)
    gone, stays = b.state.history.holders
    commands = b.tell(ev.Left(gone, "killed"))
    assert "a peer with the memory for stage 0" in waiting_for(b.state, b.now)
    assert [c for c in commands if isinstance(c, ev.HoldOn)] == [ev.HoldOn(stays, b.state.missing)]
    b.tell(ev.Joined(replace(peer(int(gone[1:])), holding=holding(b, 0))))
    assert [c.keep for c in b.commands if isinstance(c, ev.PlaceStage)][-2:] == [True, True]
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
    b.tell(ev.Left(gone, "its connection ended", may_return=True))
    assert "who was cut off to come back: stage 0" in waiting_for(b.state, b.now)
    b.tell(ev.Tick())
    assert not b.state.placed
    b.now += machine.REDIAL_SECONDS
    b.tell(ev.Tick())
    assert b.state.history.holders[0] == "p2"
    b.finish()


def test_a_coordinator_that_comes_back_goes_on_with_what_its_peers_have():
    b = Bench(make_spec(stages=2, steps=9))
    b.join(0, 1)
    to_step(b, 6)
    history, holders = b.state.history, b.state.history.holders
    b.state = machine.resume(b.state.spec, b.state.t_fixed, history, b.now)
    assert "the peers of before" in waiting_for(b.state, b.now)
    one, other = (replace(peer(int(p[1:])), holding=holding(b, i)) for i, p in enumerate(holders))
    b.tell(ev.Joined(replace(other, holding=holding(b, 1, applied=4, prepared=1))))
    b.tell(ev.Joined(one))
    assert b.state.history.generation == 2
    placed = [c for c in b.commands if isinstance(c, ev.PlaceStage)][-2:]
    assert [(c.peer, c.keep) for c in placed] == [(holders[0], True), (holders[1], True)]
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
    while leaver in b.state.peers:
        b.answer()
    assert b.state.history.newest.step == 4
    assert ev.Dismiss(leaver, "left the run", "", 0) in b.commands
    placed = [c for c in b.commands if isinstance(c, ev.PlaceStage)][-2:]
    assert [(c.peer, c.keep) for c in placed] == [("p2", False), (stays, True)]
    b.finish()
    assert b.state.history.lineage == 1


def test_who_cannot_work_with_each_other_is_linked_anew_and_at_last_sent_away():
    b = Bench(make_spec(stages=3, steps=3))
    b.join(0, 1, 2, 3, 4)
    b.answer(), b.answer()
    for i in range(1, 6):
        blamer, blamed, _ = b.state.history.holders
        b.tell(ev.Trouble(blamer, "stage 1 sent a message that cannot be", 1, b.state.history.generation))
        assert b.state.relay_all == (i >= 3)
        assert {blamer, blamed} <= set(b.state.peers)
        b.answer(), b.answer()
    b.tell(ev.Trouble(blamer, "stage 1 sent a message that cannot be", 1, b.state.history.generation))
    assert not {blamer, blamed} & set(b.state.peers)
    b.finish()


def test_other_bytes_of_u_are_found_and_what_they_spoilt_is_redone_once():
    b = Bench(make_spec(stages=2, steps=9, subspace={"sync_interval": 4}, snapshots={"interval": 2}))
    b.join(0, 1, 2)

    def to_check() -> None:
        while not (b.state.task and b.state.task.kind == "sync" and b.state.task.step == 4):
            b.answer()

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


def test_a_damaged_snapshot_is_forgotten_and_an_older_one_used():
    b = Bench(make_spec(stages=2, steps=9, snapshots={"interval": 2}))
    b.join(0, 1, 2)
    to_step(b, 6)
    assert [m.step for m in b.state.history.snapshots] == [0, 2, 4]
    b.tell(ev.Left(b.state.history.holders[0], "killed"))
    history = b.state.history
    b.tell(ev.SnapshotLost(history.holders[0], history.generation, 1, 4, "damaged"))
    assert [r for r in b.records if isinstance(r, Forgot)] == [Forgot(1, 4)]
    assert b.state.history.step == 2
    b.finish()
    assert b.state.history.lineage == 3


def test_the_owner_pauses_resumes_and_stops():
    b = Bench(make_spec(stages=2, steps=9))
    b.join(0, 1)
    to_step(b, 4)
    b.tell(ev.PauseRun())
    assert b.state.task.kind == "step", "the step is finished first"
    for _ in range(9):
        b.answer()
    assert b.state.history.newest.step == 4, "and saved"
    assert "its owner to resume it" in waiting_for(b.state, b.now)
    b.tell(ev.ResumeRun())
    assert (b.state.task.kind, b.state.task.step) == ("step", 5)
    b.tell(ev.StopRun())
    while not b.state.stopped:
        b.answer()
    assert b.state.history.newest.step == 5
    assert isinstance(b.commands[-1], ev.Quit)
    assert [c.exit_code for c in b.commands if isinstance(c, ev.Dismiss)] == [0, 0]


def test_bad_numbers_may_be_answered_with_an_older_snapshot_once():
    limits = {"nonfinite_steps": 2, "nonfinite_action": "return"}
    b = Bench(make_spec(stages=2, steps=9, limits=limits, snapshots={"interval": 2}))
    b.join(0, 1)

    def go_bad() -> None:
        for step in (5, 6):
            to_step(b, step)
            if b.state.history.pending:
                b.answer()
            b.done(0, norms=(("layers.0", math.nan),))
            b.done(1)

    go_bad()
    assert (b.state.history.lineage, b.state.history.step) == (2, 4)
    go_bad()
    assert b.state.history.paused is not None
    assert b.state.history.lineage == 2


def test_a_spare_leaves_at_once():
    b = Bench(make_spec(stages=2, steps=3))
    b.join(0, 1, 2)
    [spare] = set(b.state.peers) - set(b.state.history.holders)
    b.tell(ev.Leaving(spare))
    assert spare not in b.state.peers
    b.finish()
    assert b.state.history.ended


def test_a_link_that_does_not_come_up_is_relayed_then_given_up():
    b = Bench(make_spec(stages=2, steps=3, limits={"place_seconds": 5.0}))
    b.join(0, 1)
    b.answer()
    assert b.state.task.kind == "link"
    b.now += 6
    b.tell(ev.Tick())
    assert b.state.relay_all
    assert b.state.history.generation == 2
    b.answer()
    b.now += 6
    commands = b.tell(ev.Tick())
    assert len([c for c in commands if isinstance(c, ev.Dismiss)]) == 2
    assert waiting_for(b.state, b.now) == "peers: 0 of 2 peers have joined"
    assert not b.state.placed


def test_a_snapshot_that_fails_is_left_out_and_the_last_one_is_waited_for():
    b = Bench(make_spec(stages=2, steps=4, snapshots={"interval": 2}))
    b.join(0, 1)
    to_step(b, 3)
    assert [m.step for m in b.state.history.pending] == [2]
    b.tell(ev.PartFailed(None, 1, 2, "No space left on device"))
    assert (b.state.task.kind, b.state.task.step) == ("step", 3), "the run goes on"
    while not b.state.history.pending:
        b.answer()
    while b.state.task is not None:
        b.done(0), b.done(1)
    b.tell(ev.PartFailed(None, 1, 4, "No space left on device"))
    assert "room for the snapshot of step 4 (No space left on device)" in waiting_for(b.state, b.now)
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
    while not b.state.history.pending:
        if b.state.task:
            b.done(0), b.done(1)
    b.tell(ev.SnapshotWhole(1, 4, ("a", "b")))
    assert b.state.history.newest.step == 0, "going back there, who would know what becomes of U?"
    b.tell(ev.SubspaceReported(b.state.history.holders[-1], 1, 4, {}, "new"))
    assert b.state.history.newest.step == 4
    assert b.state.history.newest.next_basis.first_step == 7
    to_step(b, 8)
    assert b.state.history.basis_version == 1
    b.join(2)
    b.tell(ev.Left(b.state.history.holders[0], "killed"))
    assert (b.state.history.step, b.state.history.basis_version) == (4, 0)
    assert b.state.history.next_basis.first_step == 7, "it waits for its step again"
    b.finish()


def test_as_many_snapshots_as_asked_for_are_kept_and_the_newest_never_goes():
    b = Bench(make_spec(stages=2, steps=9, snapshots={"interval": 1, "keep": 2}))
    b.join(0, 1)
    b.finish()
    assert [m.step for m in b.state.history.snapshots] == [0, 8, 9]


EVENTS = st.one_of(
    st.builds(ev.Joined, st.integers(0, 5).map(peer)),
    st.builds(ev.Left, st.integers(0, 5).map("p{}".format), st.just("gone")),
    st.builds(ev.Leaving, st.integers(0, 5).map("p{}".format)),
    st.builds(ev.Trouble, st.integers(0, 5).map("p{}".format), st.just("trouble")),
    st.builds(ev.Trouble, st.integers(0, 5).map("p{}".format), st.just("blame"), st.integers(0, 9)),
    st.builds(
        ev.BasisTaken,
        st.integers(0, 5).map("p{}".format),
        st.integers(0, 3),
        st.integers(0, 2),
        st.sampled_from(["new", "x"]),
    ),
    st.sampled_from([ev.PauseRun(), ev.ResumeRun()]),
    st.just(ev.Tick()),
    st.sampled_from(["answer", "answer", "answer", "one"]),
)


@settings(max_examples=150)
@given(st.lists(EVENTS, max_size=60), st.booleans())
def test_whatever_happens_the_machine_has_a_word_for_it(events, moves):
    """Random joins, departures and half-done tasks: no exception, a sentence for every wait, one history."""
    update = {"interval": 3, "window": 2, "delay": 1} if moves else {}
    b = Bench(make_spec(stages=2, steps=6, subspace={"sync_interval": 2, "update": update}))
    for event in events:
        if event == "answer":
            b.answer()
        elif event == "one" and b.state.task is not None and b.state.placed:
            b.done(b.state.stages - 1)
        elif not isinstance(event, str):
            if isinstance(event, ev.Joined) and event.peer.id in b.state.peers:
                continue
            b.tell(event)
    history: History = b.first
    for record in b.records:
        history = fold(history, record)
    live = b.state.history
    assert history == live, "history is what was recorded, and nothing else"
    steps = []
    for record in b.records:
        if isinstance(record, RolledBack):
            steps = steps[: record.step]
        elif isinstance(record, Decided):
            steps.append(record.step)
    assert steps == list(range(1, len(steps) + 1)), "every step is decided once in a lineage, in order"
    if not live.over:  # with enough peers and nothing going wrong, it finishes
        for i in range(6):
            if f"p{i}" not in b.state.peers:
                b.join(i)
        b.now += 60
        b.tell(ev.Tick())
        b.tell(ev.ResumeRun())
        b.finish()
