"""The table of states finds bugs: each of these is planted by hand, and found by random events within seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import make_spec
from liars import Liars
from table_of_states import LEGAL, Broken, Table, table

from protomodels_cli.coordinator import machine
from protomodels_cli.coordinator.moves import Moves
from protomodels_cli.coordinator.seats import Preparation, Seats
from protomodels_cli.coordinator.work import Idle, Working

Plant = Callable[[pytest.MonkeyPatch], None]


def play(seeds: int) -> Table:
    seen = Table()
    with seen.watching():
        for seed in range(seeds):
            spec = make_spec(stages=2 + seed % 3, steps=60, limits={"lease_seconds": 2.0}, snapshots={"interval": 2})
            Liars(seed, spec, honest=3, liars=3).live(400)
    return seen


def test_without_a_bug_nothing_is_found_and_most_moves_are_made():
    assert len(play(6).seen) > 0.7 * len(LEGAL)


def keeps_who_is_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Seats, "without", lambda seats, peers: seats.stood_down(peers))


def builds_on_without_a_generation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Seats, "closed", lambda seats, connected: seats)


def forgets_who_has_built(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Seats, "built", lambda seats, stage, peer: seats)


def lets_an_understudy_have_two_seats(patch: pytest.MonkeyPatch) -> None:
    prepared = Seats.prepared

    def twice(seats: Seats, peer: str, preparation: Preparation) -> Seats:
        found = prepared(seats, peer, preparation)
        other = found.all[(preparation.part.stage + 1) % len(found.all)]
        others = {**other.understudies, peer: preparation}
        stage = (preparation.part.stage + 1) % len(found.all)
        return found._with(stage, replace(other, understudies=others)) if len(found.all) > 1 else found

    patch.setattr(Seats, "prepared", twice)


def does_nothing_though_the_run_is_not_over(patch: pytest.MonkeyPatch) -> None:
    begin = Moves.begin

    def idle(moves: Moves, kind, step):
        task = begin(moves, kind, step)
        if kind == "link":
            moves.work = Idle()
        return task

    patch.setattr(Moves, "begin", idle)


def gives_a_stage_to_who_is_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Seats, "missed", lambda seats, stage, absent: seats.taken(stage, absent.peer))


def counts_a_task_twice(patch: pytest.MonkeyPatch) -> None:
    begin = Moves.begin

    def same(moves: Moves, kind, step):
        task = begin(moves, kind, step)
        assert isinstance(moves.work, Working)
        moves.state = replace(moves.state, tasks=task.number - 1)
        return task

    patch.setattr(Moves, "begin", same)


PLANTED: list[Plant] = [
    keeps_who_is_gone,
    builds_on_without_a_generation,
    forgets_who_has_built,
    lets_an_understudy_have_two_seats,
    does_nothing_though_the_run_is_not_over,
    gives_a_stage_to_who_is_away,
    counts_a_task_twice,
]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    with pytest.raises(Broken):
        play(20)


def test_a_move_that_is_not_in_the_table_is_found():
    assert ("run", "Idle", "Working") not in LEGAL
    with pytest.raises(Broken):
        Table().note("run", "Idle", "Working")


def test_the_architecture_shows_the_table():
    """Line by line, as it stands at the head of the machine."""
    shown = (Path(__file__).parent.parent / "docs/architecture.md").read_text()
    rows = [line.strip() for line in (machine.__doc__ or "").splitlines() if "→" in line and line.startswith("    ")]
    assert len(rows) == len(table())
    assert [row for row in rows if row not in shown] == []
