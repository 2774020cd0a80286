"""What a peer says is heard, late or refused, by what the run does then: a table, on the pure machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import make_spec
from machine_bench import CUT_OFF, SILENT, Bench, to_step

from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator import fitting
from protomodels_cli.coordinator.reasons import PeerReport
from protomodels_cli.wire.troubles import Failed, InvalidFeed, LinkBroken

NOW, LATE, REFUSED = "now", "late", "refused"
MOVING = {"subspace": {"sync_interval": 4, "update": {"interval": 4, "window": 2, "delay": 1}}}


def in_step(step: int = 3) -> Bench:
    """Three holders, a spare, and a step under way."""
    b = Bench(make_spec(stages=3, steps=30))
    b.join(0, 1, 2, 3)
    to_step(b, step)
    return b


def said(b: Bench, event: ev.FromPeers) -> str:
    if fitting.misfit(b.state, event) is not None:
        return REFUSED
    return LATE if fitting.is_late(b.state, event) else NOW


@pytest.mark.parametrize(
    ("stage", "generation", "task", "expected"),
    [
        (0, 0, 0, NOW),
        (0, 0, -1, LATE),
        (0, 0, 1, LATE),  # after a restart of the coordinator tasks are counted anew
        (0, -1, 0, LATE),
        (0, 1, 0, REFUSED),
        (None, 0, 0, LATE),  # a spare, which was relieved
    ],
)
def test_a_report_counts_in_its_generation_and_task(stage, generation, task, expected):
    b = in_step()
    history, number = b.state.history, b.state.task.number
    peer = "p3" if stage is None else history.holders[stage]
    done = ev.Done(peer, history.generation + generation, number + task, b.report())
    assert said(b, done) == expected


def test_a_stage_reports_once():
    b = in_step()
    history = b.state.history
    done = ev.Done(history.holders[1], history.generation, b.state.task.number, b.report(1))
    b.tell(done)
    assert said(b, done) == LATE


@pytest.mark.parametrize(
    ("stage", "what", "generation", "expected"),
    [
        (1, LinkBroken(0), 0, NOW),
        (1, LinkBroken(2), 0, NOW),
        (0, LinkBroken(1), -1, LATE),
        (0, LinkBroken(1), 1, REFUSED),
        (0, LinkBroken(2), 0, REFUSED),  # which is no neighbour
        (2, LinkBroken(3), 0, REFUSED),  # which is no stage
        (1, LinkBroken(1), 0, REFUSED),
        (0, InvalidFeed(0, "short"), 0, NOW),
        (0, InvalidFeed(1, "short"), 0, REFUSED),
        (0, Failed("bug"), 7, NOW),  # a peer may give up at any time
    ],
)
def test_a_stage_complains_about_its_neighbours(stage, what, generation, expected):
    b = in_step()
    history, about = b.state.history, getattr(what, "stage", None)
    trouble = ev.Trouble(history.holders[stage], PeerReport(what), about, history.generation + generation)
    assert said(b, trouble) == expected


def test_a_neighbour_that_is_away_is_not_relinked():
    b = in_step()
    b.tell(ev.Left(b.state.history.holders[1], SILENT))
    trouble = ev.Trouble(b.state.history.holders[0], PeerReport(LinkBroken(1)), 1, b.state.history.generation)
    assert said(b, trouble) == LATE


def test_a_new_basis_is_heard_of_from_those_that_can_have_it():
    b = Bench(make_spec(stages=3, steps=30, **MOVING))
    b.join(0, 1, 2)
    b.answer_until(lambda: b.state.history.next_basis is not None)
    history = b.state.history
    version = history.next_basis.version
    taken = ev.BasisTaken(history.holders[0], history.generation, version, history.next_basis.sha256)
    assert said(b, taken) == NOW
    assert said(b, replace(taken, version=version - 1)) == LATE
    assert said(b, replace(taken, version=version + 1)) == REFUSED
    assert said(b, replace(taken, generation=history.generation + 1)) == REFUSED
    reported = ev.SubspaceReported(history.holders[-1], history.generation, history.step + 1, {}, None)
    assert said(b, reported) == REFUSED
    assert said(b, replace(reported, step=history.step)) == LATE
    assert said(b, replace(reported, peer=history.holders[0], step=0)) == LATE


def test_a_peer_that_is_refused_again_and_again_is_dismissed_and_nobody_else():
    b = in_step()
    history, number = b.state.history, b.state.task.number
    liar = history.holders[0]
    impossible = ev.Done(liar, history.generation + 1, number, b.report())
    for _ in range(fitting.MOST - 1):
        assert b.tell(impossible) == []
        assert b.state.task.number == number
    assert [c.peer for c in b.tell(impossible) if isinstance(c, ev.Dismiss)] == [liar]
    assert b.state.history.holders == ("p3", *history.holders[1:])


def test_refused_messages_are_counted_over_absences():
    b = in_step()
    generation = b.state.history.generation + 1
    for peer in ("p3", "p2"):
        b.tell(ev.Done(peer, generation, 1, b.report()))
    assert b.state.conduct.refused == {"p3": 1, "p2": 1}
    b.tell(ev.Left("p3", CUT_OFF))
    b.tell(ev.Done("p2", generation, 1, b.report()))
    assert b.state.conduct.refused == {"p3": 1, "p2": 2}
