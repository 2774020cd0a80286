"""Who holds which stage, and how they are. Pure; knows no run and no clock. Which moves are legal: see machine.py.

A seat is one stage of the model, held once. Its occupant has the stage in memory, builds it, or is away. An understudy
is a spare that builds the stage, in case the occupant does not come back or is too slow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from protomodels_cli.coordinator.reasons import Reseating, StoreUnreachable
from protomodels_cli.protocol.parts import Part


@dataclass(frozen=True)
class Preparation:
    """Of a peer that was told to build a stage: its occupant, or an understudy."""

    part: Part  # that it builds the stage from; without a hash: from the seed
    asked: float
    here: float | None  # since when the part is on its disk, as far as it has said
    ready: bool = False  # of an understudy
    failed: int = 0  # times that it could not use the part, though that is whole
    away: StoreUnreachable | None = None  # what kept it from the part when `asked` was last put forward
    late: bool = False  # it took longer than expected, and that was counted


@dataclass(frozen=True)
class Vacant:
    """Nobody has the stage in memory as it must be now."""


@dataclass(frozen=True)
class Building:
    """The stage is assigned to this peer, which is connected and builds it."""

    peer: str
    preparation: Preparation


@dataclass(frozen=True)
class Here:
    """This peer is connected, and has the stage in memory as it must be now."""

    peer: str


@dataclass(frozen=True)
class Absent:
    """This peer has no session, and may have the stage in memory still."""

    peer: str
    since: float  # its last word
    until: float | None = None  # how long it is waited for; None: as long as that costs less than going on without it


Occupant = Vacant | Building | Here | Absent


@dataclass(frozen=True)
class Handover:
    """The seat is about to be given to an understudy that is faster. The run stands at the step of a snapshot
    meanwhile."""

    holder: str
    spare: str
    snapshot: tuple[int, int]
    since: float
    why: Reseating
    names: tuple[str, ...] = ()  # of the spare and its voice, by which its turns are counted


@dataclass(frozen=True)
class Seat:
    occupant: Occupant = Vacant()
    understudies: Mapping[str, Preparation] = field(default_factory=dict)  # in the order in which they were told
    handover: Handover | None = None
    former: str = ""  # a peer that keeps the stage in memory, until the occupant has done a step with it


@dataclass(frozen=True)
class Seats:
    """Of one generation, by stage."""

    all: tuple[Seat, ...] = ()

    # Who is where

    @cached_property
    def held(self) -> Mapping[int, str]:
        """Stage → the peer that is here and has it in memory."""
        return {i: seat.occupant.peer for i, seat in enumerate(self.all) if isinstance(seat.occupant, Here)}

    @cached_property
    def holds(self) -> Mapping[str, int]:
        """The other way round."""
        return {peer: stage for stage, peer in self.held.items()}

    @cached_property
    def absent(self) -> Mapping[str, Absent]:
        return {seat.occupant.peer: seat.occupant for seat in self.all if isinstance(seat.occupant, Absent)}

    @cached_property
    def absent_stages(self) -> tuple[int, ...]:
        return tuple(stage for stage, seat in enumerate(self.all) if isinstance(seat.occupant, Absent))

    @cached_property
    def preparing(self) -> Mapping[str, Preparation]:
        """What each peer builds that was told to build a stage: occupants and understudies."""
        found: dict[str, Preparation] = {}
        for seat in self.all:
            if isinstance(seat.occupant, Building):
                found[seat.occupant.peer] = seat.occupant.preparation
            found.update(seat.understudies)
        return found

    @cached_property
    def handover(self) -> Handover | None:
        return next((seat.handover for seat in self.all if seat.handover is not None), None)

    @cached_property
    def former(self) -> tuple[int, str] | None:
        """The stage that another peer tries, and who keeps it in memory meanwhile."""
        return next(((i, seat.former) for i, seat in enumerate(self.all) if seat.former), None)

    # What becomes of them

    def taken(self, stage: int, peer: str) -> Seats:
        """This peer is here, with the stage in memory."""
        return self._with(stage, replace(self.all[stage], occupant=Here(peer)))

    def built(self, stage: int, peer: str) -> Seats:
        """The same of one that has just built the stage."""
        return self.stood_down([peer]).taken(stage, peer)

    def rejoined(self, peer: str) -> Seats:
        """This peer has a new session: whether it has its stage in memory is yet to be seen. It goes on building."""
        seats = self._vacated(lambda occupant: isinstance(occupant, Here | Absent) and occupant.peer == peer)
        return seats._each(lambda seat: replace(seat, former="") if seat.former == peer else seat)

    def missed(self, stage: int, absent: Absent) -> Seats:
        return self._with(stage, replace(self.all[stage], occupant=absent))

    def given_up(self, peers: Collection[str]) -> Seats:
        """These are not waited for any longer."""
        return self._vacated(lambda occupant: isinstance(occupant, Absent) and occupant.peer in peers)

    def without(self, peers: Collection[str]) -> Seats:
        """These peers are gone, or gave their stages up: they hold none and build none."""
        gone = self._vacated(lambda occupant: isinstance(occupant, Here | Building) and occupant.peer in peers)
        return gone.stood_down(peers)

    def emptied(self) -> Seats:
        """What all have in memory is worthless; who is absent is waited for still."""
        return self._vacated(lambda occupant: isinstance(occupant, Here))

    def prepared(self, peer: str, preparation: Preparation) -> Seats:
        """What this peer builds, or how far it is: it builds one stage at a time."""
        stage, builds = preparation.part.stage, self.preparing.get(peer)
        before = self if builds is None or builds.part.stage == stage else self.stood_down([peer])
        seat = before.all[stage]
        if isinstance(seat.occupant, Building) and seat.occupant.peer == peer:
            return before._with(stage, replace(seat, occupant=Building(peer, preparation)))
        return before._with(stage, replace(seat, understudies={**seat.understudies, peer: preparation}))

    def stood_down(self, peers: Collection[str]) -> Seats:
        """These are no understudies any more."""
        return self._each(
            lambda seat: (
                replace(seat, understudies={p: u for p, u in seat.understudies.items() if p not in peers})
                if not seat.understudies.keys().isdisjoint(peers)
                else seat
            )
        )

    def handing_over(self, stage: int, handover: Handover | None) -> Seats:
        return self._with(stage, replace(self.all[stage], handover=handover))

    def without_former(self) -> Seats:
        """Nobody keeps a stage in memory any more that another has."""
        return self._each(lambda seat: replace(seat, former="") if seat.former else seat)

    def closed(self, connected: Collection[str]) -> Seats:
        """The generation is over. Who builds a stage may go on with that, and no stage is about to change hands. Where
        a stage was being tried, the peer that has kept it has it."""

        def close(seat: Seat) -> Seat:
            occupant, understudies = seat.occupant, seat.understudies
            if isinstance(occupant, Building):
                understudies = {occupant.peer: occupant.preparation, **understudies}
                occupant = Vacant()
            if seat.former in connected:
                occupant = Here(seat.former)
            return Seat(occupant, understudies)

        return self._each(close)

    # Helpers

    def _with(self, stage: int, seat: Seat) -> Seats:
        return Seats((*self.all[:stage], seat, *self.all[stage + 1 :]))

    def _each(self, change: Callable[[Seat], Seat]) -> Seats:
        changed = tuple(change(seat) for seat in self.all)
        return self if all(a is b for a, b in zip(changed, self.all, strict=True)) else Seats(changed)

    def _vacated(self, chosen: Callable[[Occupant], bool]) -> Seats:
        return self._each(lambda seat: replace(seat, occupant=Vacant()) if chosen(seat.occupant) else seat)


def assigned(
    holders: Sequence[str], building: Mapping[str, Preparation], former: tuple[int, str] | None = None
) -> Seats:
    """A new generation: who is not building has its stage in memory."""
    seats = [Seat(Building(peer, building[peer]) if peer in building else Here(peer)) for peer in holders]
    if former is not None:
        stage, peer = former
        seats[stage] = replace(seats[stage], former=peer)
    return Seats(tuple(seats))


def waited_for(stages: int, holders: Iterable[str], since: float, until: float) -> Seats:
    """After a restart of the coordinator: all of them are absent. `holders`: none where nobody knows them."""
    absent = [Seat(Absent(peer, since, until)) for peer in holders]
    return Seats(tuple(absent or [Seat()] * stages))
