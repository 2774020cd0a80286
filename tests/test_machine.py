"""The coordinator's brain, without processes: tables, random events, and the journal that brings it back."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import make_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator import machine
from protomodels_cli.coordinator.history import Decided, Ended, History, Placed, Record, Saved, Stopped, Synced, fold
from protomodels_cli.coordinator.journal import Journal, read
from protomodels_cli.coordinator.plan import waiting_for
from protomodels_cli.coordinator.state import Peer, Report
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
        return self.tell(ev.Done(self.state.history.holders[stage], self.state.task.number, report))

    def answer(self) -> None:
        """Everything that an honest run owes, once."""
        state = self.state
        if state.owed is not None:
            moved = state.spec.subspace.update.interval > 0
            last, generation = state.history.holders[-1], state.history.generation
            self.tell(ev.SubspaceReported(last, generation, state.owed, {"x": 1}, "new" if moved else None))
        elif state.history.next_basis is not None and len(state.took_basis) < state.stages:
            new = state.history.next_basis
            for holder in state.history.holders:
                self.tell(ev.BasisTaken(holder, new.version, new.sha256))
        elif state.task is not None:
            for stage in range(state.stages):
                if stage not in self.state.heard and self.state.task == state.task:
                    self.done(stage)
            if state.task.kind == "save":
                self.tell(ev.SnapshotComplete(state.task.step))

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
        ("save", 4),
        ("step", 5),
        ("step", 6),
        ("sync", 6),
        ("evaluation", 6),
        ("save", 6),
        ("finish", 6),
    ]
    assert isinstance(b.state.history.ended, Ended)


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
    assert "2 steps in a row, up to step 2" in b.state.history.stopped.why


def test_stale_and_foreign_words_change_nothing():
    b = Bench(make_spec(stages=2, steps=3))
    b.join(0, 1, 2)
    b.answer(), b.answer()
    before = b.state
    number = before.task.number
    for event in (
        ev.Done("p0", number - 1, b.report()),
        ev.Done("nobody", number, b.report()),
        ev.Done("p2", number, b.report()),  # a spare
        ev.SubspaceReported("p0", 1, 1, {}, "x"),
        ev.BasisTaken("p0", 7, "x"),
        ev.SnapshotComplete(1),
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
    b.tell(ev.BasisTaken(b.state.history.holders[0], 1, "new"))
    assert "to take basis 1" in waiting_for(b.state, b.now)
    b.tell(ev.BasisTaken(b.state.history.holders[1], 1, "new"))
    assert (b.state.task.kind, b.state.task.step) == ("step", 3)


def test_who_leaves_before_the_first_decision_is_replaced_and_after_it_is_missed():
    b = Bench(make_spec(stages=2, steps=3))
    b.join(0, 1, 2)
    b.answer(), b.answer()
    gone = b.state.history.holders[1]
    b.tell(ev.Left(gone, "killed"))
    assert b.state.history.generation == 2
    assert gone not in b.state.history.holders
    b.answer(), b.answer(), b.answer()
    assert b.state.history.step == 1
    gone = b.state.history.holders[0]
    commands = b.tell(ev.Left(gone, "killed"))
    assert "who left after step 1 (killed)" in b.state.history.stopped.why
    assert {c.peer for c in commands if isinstance(c, ev.Dismiss)} == set(b.state.peers)


def test_who_wants_to_leave_goes_after_the_step_with_a_snapshot():
    b = Bench(make_spec(stages=2, steps=9))
    b.join(0, 1)
    while b.state.history.step < 3:
        b.answer()
    b.done(0)
    leaver = b.state.history.holders[0]
    b.tell(ev.Leaving(leaver))
    assert b.state.task.kind == "step", "the step is finished first"
    b.finish()
    assert b.tasks()[-2:] == [("step", 4), ("save", 4)]
    assert b.state.history.saved == 4
    assert "step 4" in b.state.history.stopped.fix
    assert ev.Dismiss(leaver, "left the run", "", 0) in b.commands


def test_two_who_leave_after_one_step_are_let_go_together():
    b = Bench(make_spec(stages=2, steps=9))
    b.join(0, 1)
    while b.state.history.step < 3:
        b.answer()
    for leaver in b.state.history.holders:
        b.tell(ev.Leaving(leaver))
    b.finish()
    assert [c.exit_code for c in b.commands if isinstance(c, ev.Dismiss)][:2] == [0, 0]
    assert len([r for r in b.records if isinstance(r, Stopped)]) == 1


def test_who_blames_and_who_is_blamed_both_go_before_the_first_step():
    b = Bench(make_spec(stages=3, steps=3))
    b.join(0, 1, 2, 3, 4)
    b.answer(), b.answer()
    blamer, blamed = b.state.history.holders[:2]
    b.tell(ev.Trouble(blamer, "stage 1 sent a message that cannot be", 1))
    assert not {blamer, blamed} & set(b.state.peers)
    assert b.state.history.generation == 2, "placed anew once, without either"
    placed = [c.peer for c in b.commands if isinstance(c, ev.PlaceStage)][3:]
    assert len(placed) == 3
    assert not {blamer, blamed} & set(placed)
    b.finish()
    assert b.state.history.ended


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
    while not (b.state.task and b.state.task.kind == "save"):
        b.answer()
    b.done(0)
    b.tell(ev.SnapshotFailed(2, "No space left on device"))
    b.done(1)
    assert (b.state.task.kind, b.state.task.step) == ("step", 3), "the run goes on"
    assert b.state.history.saved == -1
    while not (b.state.task and b.state.task.kind == "save"):
        b.answer()
    b.done(0), b.done(1)
    b.tell(ev.SnapshotFailed(4, "No space left on device"))
    assert "room for the snapshot of step 4 (No space left on device)" in waiting_for(b.state, b.now)
    b.tell(ev.Tick())
    assert b.state.task is None
    b.now += 6
    b.tell(ev.Tick())
    assert b.state.task.kind == "save", "it tries again"
    b.finish()
    assert b.state.history.saved == 4


def test_the_journal_brings_the_history_back(tmp_path: Path):
    spec = make_spec(
        stages=2, steps=8, subspace={"sync_interval": 2, "update": {"interval": 3, "window": 2, "delay": 1}}
    )
    b = Bench(spec)
    b.join(0, 1)
    b.finish()
    journal = Journal(tmp_path / "journal.sqlite")
    for i, record in enumerate(b.records):
        journal.append([record], float(i))
    back = list(read(tmp_path / "journal.sqlite"))
    journal.close()
    assert [r for _, r in back] == b.records
    assert [at for at, _ in back] == list(map(float, range(len(b.records))))
    history = b.first
    for _, record in back:
        history = fold(history, record)
    assert history == b.state.history
    kinds = {type(r) for r in b.records}
    assert {Placed, Decided, Synced, Saved, Ended} <= kinds


def test_a_failed_write_leaves_the_journal_as_it_was(tmp_path: Path):
    journal = Journal(tmp_path / "j.sqlite")
    journal.append([Synced(1)], 1.0)

    with pytest.raises(OSError, match="journal"):
        journal.append([Synced(2), Synced(2)], None)  # refused by the table: `at` must not be null
    journal.append([Synced(3)], 3.0)
    assert [r for _, r in read(tmp_path / "j.sqlite")] == [Synced(1), Synced(3)]


EVENTS = st.one_of(
    st.builds(ev.Joined, st.integers(0, 5).map(peer)),
    st.builds(ev.Left, st.integers(0, 5).map("p{}".format), st.just("gone")),
    st.builds(ev.Leaving, st.integers(0, 5).map("p{}".format)),
    st.builds(ev.Trouble, st.integers(0, 5).map("p{}".format), st.just("trouble")),
    st.builds(ev.Trouble, st.integers(0, 5).map("p{}".format), st.just("blame"), st.integers(0, 9)),
    st.builds(ev.BasisTaken, st.integers(0, 5).map("p{}".format), st.integers(0, 2), st.sampled_from(["new", "x"])),
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
    steps = [r.step for r in b.records if isinstance(r, Decided)]
    assert steps == list(range(1, len(steps) + 1)), "every step is decided once, in order"
    if not live.over:  # with enough peers and nothing going wrong, it finishes
        for i in range(6):
            if f"p{i}" not in b.state.peers:
                b.join(i)
        b.finish()
