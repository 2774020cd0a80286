"""The coordinator's brain, without processes: tables, random events, and the journal that brings it back."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from conftest import make_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from machine_bench import BROKEN, SILENT, Bench, peer, told

from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator import no_placement, notices, reasons
from protomodels_cli.coordinator.history import (
    Decided,
    Ended,
    History,
    Paused,
    RolledBack,
    Saved,
    fold,
)
from protomodels_cli.coordinator.snapshots.failures import NotWritten
from protomodels_cli.protocol.audit import Recorded
from protomodels_cli.protocol.steps import clip_coefficient, learning_rate


def test_a_run_is_a_chain_of_tasks():
    spec = make_spec(stages=2, steps=6, subspace={"sync_interval": 2}, eval={"interval": 3}, snapshots={"interval": 4})
    b = Bench(spec)
    b.join(0)
    assert b.waits() == no_placement.TooFewPeers(1, 2)
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
    b.done(0, norms=(("embed", 9.0), ("layers.0", 4.0), ("layers.1", 1.0)))
    b.done(1, norms=(("layers.2", 1.0), ("layers.3", 1.0), ("head", 0.0)), loss_sum=128.0)
    [decided] = [r for r in b.records if isinstance(r, Decided)]
    assert decided.apply
    assert decided.norm == 4.0
    assert decided.clip == clip_coefficient(4.0, 0.5)
    assert decided.lr == learning_rate(spec.optimizer, 1, 3)
    assert decided.loss == 2.0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_one_bad_number_anywhere_skips_the_step_everywhere(bad):
    b = Bench(make_spec(stages=2, steps=3, limits={"nonfinite_steps": 2}))
    b.join(0, 1)
    b.answer(), b.answer()
    b.done(0, norms=b.norms(0, bad))
    commands = b.done(1)
    [turn] = [c for c in commands if isinstance(c, ev.SendTurn)]
    assert turn.decision is not None
    assert not turn.decision.apply
    b.done(0, norms=b.norms(0, bad))
    b.done(1)
    why = reasons.NonFinite(2, 2, b.state.spec.optimizer.lr)
    assert b.state.history.paused == Paused(why)
    assert told(b.commands, notices.Paused) == [notices.Paused(why, b.state.spec.name)]
    b.answer(), b.answer(), b.answer()
    assert b.state.task is None
    assert b.waits() == reasons.OwnersResume()
    b.tell(ev.ResumeRun())
    assert (b.state.task.kind, b.state.task.step) == ("step", 3)


def test_peers_that_are_here_have_names_of_their_own():
    b = Bench(make_spec(stages=2, steps=9))
    for id_ in ("p0", "p1", "p2"):
        b.tell(ev.Joined(replace(peer(0), id=id_, name="bob")))
    assert [b.state.peers[id_].name for id_ in ("p0", "p1", "p2")] == ["bob", "bob-2", "bob-3"]
    b.tell(ev.Joined(replace(b.state.peers["p1"], name="bob")))  # it reconnects
    assert b.state.peers["p1"].name == "bob-2"
    b.lose("p2")
    b.tell(ev.Joined(replace(peer(0), id="p9", name="bob")))
    assert b.state.peers["p9"].name == "bob-3"


def test_peers_that_come_back_have_the_names_that_they_had():
    b = Bench(make_spec(stages=2, steps=9))
    for id_ in ("p0", "p1"):
        b.tell(ev.Joined(replace(peer(0), id=id_, name="bob")))
    while b.state.history.step < 2:
        b.answer()
    b.lose("p0")
    b.lose("p1")
    for id_, name in (("p1", "bob-2"), ("p0", "bob")):  # in the other order
        b.tell(ev.Joined(replace(peer(0), id=id_, name="bob")))
        assert b.state.peers[id_].name == name


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
        ev.SubspaceReported("p0", 1, 0, {}, "x"),
        ev.BasisTaken("p0", 1, 0, "x"),
        ev.SnapshotWhole(1, 1, ("a", "b")),
        ev.PartFailed(None, 1, 1, 0, NotWritten("full")),
        ev.PartFailed("p2", 1, 0, 0, NotWritten("a spare's")),
        ev.SnapshotLost("p0", 1, 1, 1, "damaged"),
        ev.Trouble("p2", BROKEN, 1, 1),  # a spare blames
        ev.Trouble("p0", BROKEN, 1, 0),  # of another generation
        ev.Left("nobody", SILENT),
    ):
        assert b.tell(event) == []
        assert b.state == before
    b.done(0)
    b.done(0, norms=b.norms(0, 99.0))  # twice: the first counts
    assert b.state.heard[0].norms == b.norms(0)


UNITS = {0: ("embed", "layers.0", "layers.1"), 1: ("layers.2", "layers.3", "head")}
OTHER = [(0, UNITS[0][:-1]), (0, ()), (0, UNITS[1]), (1, UNITS[1][::-1]), (1, (*UNITS[1], "head"))]


@pytest.mark.parametrize(("stage", "others"), OTHER)
def test_norms_of_other_units_than_the_stages_decide_nothing(stage, others):
    b = Bench(make_spec(stages=2, steps=3))
    b.join(0, 1)
    b.answer(), b.answer()
    assert [tuple(unit for unit, _ in b.norms(i)) for i in UNITS] == list(UNITS.values())
    b.done(1 - stage)
    commands = b.done(stage, norms=tuple((unit, 0.25) for unit in others))
    [dismissed] = [c for c in commands if isinstance(c, ev.Dismiss)]
    assert (dismissed.peer, dismissed.why.kind) == (f"p{stage}", "invalid_message")
    assert not [r for r in b.records if isinstance(r, Decided)]


def test_a_new_basis_is_used_by_all_from_its_step_on():
    spec = make_spec(stages=2, steps=7, subspace={"update": {"interval": 3, "window": 2, "delay": 1}})
    b = Bench(spec)
    b.join(0, 1)
    versions = {}

    def look_and_answer() -> None:
        if b.state.task and b.state.task.kind == "step":
            versions[b.state.task.step] = b.state.history.basis_for(b.state.task.step)[0]
            holders_have = b.state.took_basis
            if versions[b.state.task.step] > b.state.history.basis_version:
                assert holders_have == {0, 1}
        b.answer()

    b.answer_until(lambda: b.state.history.over, look_and_answer)
    assert versions == {1: 0, 2: 0, 3: 0, 4: 0, 5: 1, 6: 1, 7: 1}
    assert [c.version for c in b.commands if isinstance(c, ev.SendBasis)] == [1, 2]


def test_the_step_of_a_switch_waits_for_the_basis_and_says_so():
    b = Bench(make_spec(stages=2, steps=5, subspace={"update": {"interval": 2, "window": 1, "delay": 0}}))
    b.join(0, 1)
    b.answer_until(lambda: b.state.owed is not None)
    assert b.state.task is None
    turn = [c for c in b.commands if isinstance(c, ev.SendTurn)][-1]
    assert turn.decision is not None, "the decision is not held back: the basis is computed from it"
    assert turn.task is None
    assert b.waits() == reasons.SubspaceReport(2)
    b.tell(ev.SubspaceReported(b.state.history.holders[-1], 1, 2, {}, "new"))
    b.tell(ev.BasisTaken(b.state.history.holders[0], 1, 1, "new"))
    assert b.waits() == reasons.BasisNotTaken(1, b.state.holders_of([1]))
    b.tell(ev.BasisTaken(b.state.history.holders[1], 1, 1, "new"))
    assert (b.state.task.kind, b.state.task.step) == ("step", 3)


EVENTS = st.one_of(
    st.builds(ev.Joined, st.integers(0, 5).map(peer)),
    st.builds(ev.Left, st.integers(0, 5).map("p{}".format), st.just(SILENT)),
    st.builds(ev.Leaving, st.integers(0, 5).map("p{}".format)),
    st.builds(ev.Trouble, st.integers(0, 5).map("p{}".format), st.just(BROKEN)),
    st.builds(ev.Trouble, st.integers(0, 5).map("p{}".format), st.just(BROKEN), st.integers(0, 9)),
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


def test_a_report_on_a_step_that_may_be_audited_has_a_record_or_its_sender_goes():
    recorded = Recorded(2, (), (bytes(32),), (bytes(32),), ())
    for record, stays in ((recorded, True), (None, False), (replace(recorded, step=1), False)):
        b = Bench(make_spec(stages=2, snapshots={"interval": 1}, audit=0.5))
        b.join(0, 1)
        b.answer_until(lambda b=b: b.state.task and b.state.task.recorded)
        assert (b.state.task.kind, b.state.task.step) == ("step", 2)
        holder = b.state.history.holders[0]
        b.done(0, recorded=record)
        assert (holder in b.state.peers) is stays
        assert b.state.history.holders[1] in b.state.peers
