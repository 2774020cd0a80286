"""Holds the machine to the table of states at its head: every move that is made is in it, and what it says of a state
is true after every event."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from protomodels_cli.coordinator import machine
from protomodels_cli.coordinator import moves as moves_module
from protomodels_cli.coordinator.seats import Absent, Building, Here, Seats, Vacant
from protomodels_cli.coordinator.state import State
from protomodels_cli.coordinator.work import Blocked, Idle, Unplaced, Working

Move = tuple[str, str, str]  # what moves, from, to


class Broken(AssertionError):
    pass


def table() -> set[Move]:
    found, what = set[Move](), ""
    for line in (machine.__doc__ or "").splitlines():
        if (row := re.match(r" {4}(run|seat|member)? +(\w+) +→ (\w+)(?: |$)", line)) is not None:
            what = row[1] or what
            found.add((what, row[2], row[3]))
    return found


LEGAL = table()


class Table:
    """Every move of the machine while it is watched."""

    def __init__(self) -> None:
        self.seen = Counter[Move]()

    def note(self, what: str, before: str, after: str) -> None:
        move = what, before, after
        if move not in LEGAL:
            raise Broken(f"{what}: {before} → {after} is not in the table")
        self.seen[move] += 1

    def note_seats(self, before: Seats, after: Seats) -> None:
        for a, b in zip(before.all, after.all, strict=False):
            if a.occupant != b.occupant:
                self.note("seat", type(a.occupant).__name__, type(b.occupant).__name__)

    def note_members(self, before: State, after: State) -> None:
        for peer in {*before.peers, *after.peers, *before.departed, *after.departed, *before.seats.absent}:
            was, now = before.standing(peer), after.standing(peer)
            if was != now:
                self.note("member", was, now)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Every move, also those that one event makes one after another."""
        noted = self

        class Watched(moves_module.Moves):
            @property
            def state(self) -> State:
                return self._state

            @state.setter
            def state(self, state: State) -> None:
                before = getattr(self, "_state", state)
                self._state = state
                if state.work is not before.work:
                    noted.note("run", type(before.work).__name__, type(state.work).__name__)
                noted.note_seats(before.seats, state.seats)

        real = machine.apply

        def apply(state: State, event: Any, now: float) -> Any:
            after, records, commands = real(state, event, now)
            noted.note_members(state, after)
            check(after)
            return after, records, commands

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(machine, "Moves", Watched)
            patch.setattr(machine, "apply", apply)
            yield


def check(state: State) -> None:
    """What is true after every event."""
    seats, work, history = state.seats, state.work, state.history
    for wrong in _wrong_with_seats(state):
        raise Broken(wrong)
    if not state.leaving <= state.peers.keys():
        raise Broken("a peer that is gone is about to leave")
    if set(state.departed) & state.peers.keys():
        raise Broken("a peer is both here and gone")
    match work:
        case Unplaced():
            if seats.handover is not None or seats.former is not None:
                raise Broken("without a generation nothing can change hands")
            if any(isinstance(seat.occupant, Building) for seat in seats.all):
                raise Broken("without a generation no stage is assigned")
        case Working(task, heard):
            if task.number != state.tasks or not heard.keys() < set(range(state.stages)):
                raise Broken(f"{task} was reported on by {sorted(heard)}")
            building = [s for s in seats.all if isinstance(s.occupant, Building)]
            if building and task.kind != "build":
                raise Broken(f"a stage is being built during {task}")
            if task.kind == "build" and any(isinstance(seats.all[i].occupant, Building) for i in heard):
                raise Broken("a stage has reported, and is being built still")
        case Blocked():
            if history.over or state.stopped:
                raise Broken("a run that is over waits for something")
        case Idle():
            if not (history.over or state.stopped):
                raise Broken("a run that is not over does nothing")


def _wrong_with_seats(state: State) -> Iterator[str]:
    seats, placed = state.seats, not isinstance(state.work, Unplaced)
    occupants = [seat.occupant.peer for seat in seats.all if not isinstance(seat.occupant, Vacant)]
    understudies = [peer for seat in seats.all for peer in seat.understudies]
    if len({*occupants, *understudies}) < len(occupants) + len(understudies):
        yield f"somebody has two seats: {occupants}, {understudies}"
    if sum(seat.handover is not None for seat in seats.all) > 1 or sum(bool(seat.former) for seat in seats.all) > 1:
        yield "two stages change hands at once"
    for stage, seat in enumerate(seats.all):
        match seat.occupant:
            case Here(peer) | Building(peer):
                if peer not in state.peers:
                    yield f"{peer}, which is not connected, has stage {stage}"
            case Absent(peer):
                if peer in state.peers:
                    yield f"{peer}, which is connected, is waited for"
            case Vacant():
                if placed:
                    yield f"nobody has stage {stage}, and the run goes on"
        for peer, preparation in seat.understudies.items():
            if peer not in state.peers or preparation.part.stage != stage:
                yield f"{peer} prepares stage {stage} from {preparation.part}"
    if placed and tuple(occupants) != state.history.holders:
        yield f"{occupants} have the stages, and the journal says {state.history.holders}"
