"""Who holds what: the cut and the holder of each stage, from what the joined peers offer. Pure, and exact.

The best placement is the one whose slowest stage is fastest. Among equals it has the fewest stages, and then the
holders who joined first: a late peer is a spare unless it helps.

Both questions are one assignment problem. Given a time limit, a peer has *room* for so many layers in a stage. With a
fixed cut it has room or not. Where the cut is chosen too, a stage's time and memory depend on how many layers it has
and on its place in the row (the ends, and how many stages are behind it), not on which layers they are: all are alike
but the last, unconstrained ones, which the last stage must have anyway. Fewer layers never need more. So a number of
stages can keep the limit exactly if distinct peers can be seated on them whose rooms add up to all layers. Where a
stage is whole segments, all of this is said of segments, which are alike too: *atoms* are what a cut does not part.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Literal

import numpy as np

from protomodels_cli.coordinator import no_placement
from protomodels_cli.cost.activations import Computation
from protomodels_cli.cost.memory import StageMemory, stage_memory
from protomodels_cli.cost.traffic import boundary_bytes
from protomodels_cli.cost.units import stage_flops, unit_flops
from protomodels_cli.forms import Sizes
from protomodels_cli.spec.cut import atom, layers_per_stage, spans
from protomodels_cli.spec.schema import RunSpec

Table = (
    np.ndarray[tuple[int, ...], np.dtype[np.float64]] | np.ndarray[tuple[int, ...], np.dtype[np.int64]]
)  # numbers by stage and by peer

_FAR = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Offer:
    """What a joined peer brings."""

    peer: str
    memory: int  # bytes that its device can give
    flops: float  # measured, per second
    host_memory: int | None = None  # bytes of the machine's own memory; None: the device's memory is that
    computation: Computation | None = None  # how it computes; None: not known
    upload: float = math.inf  # bits a second that it may send

    def room(self, on_host: int) -> int:
        """Bytes that its device can give to a stage that keeps so much in the machine's own memory; none: below 0."""
        if self.host_memory is None:
            return self.memory - on_host
        return self.memory if on_host <= self.host_memory else -1

    def fits(self, memory: StageMemory, span: range, stages_after: int) -> bool:
        """Whether it has the memory for a stage of these layers."""
        on_host = memory.on_host(span.start, span.stop)
        return memory.total(span.start, span.stop, stages_after, self.computation) <= self.room(on_host)


@dataclass(frozen=True)
class Placement:
    layers: tuple[int, ...]  # per stage
    holders: tuple[str, ...]  # peer ids, one per stage


def place(spec: RunSpec, offers: Sequence[Offer]) -> Placement | no_placement.NoPlacement:
    """The best placement on these peers (in the order they joined), or what is still missing.

    A peer whose speed is no positive number is left out: it comes from outside, and must not stop the others.
    """
    if len({offer.peer for offer in offers}) < len(offers):
        raise ValueError("a peer is offered twice")
    usable = [offer for offer in offers if 1 <= offer.flops < math.inf]
    found = _place_auto(spec, usable) if spec.stages == "auto" else _place_fixed(spec, usable)
    return found if isinstance(found, Placement) else replace(found, unusable=len(offers) - len(usable))


# Rooms. A matrix of them has a row for each stage and a column for each peer.


@dataclass(frozen=True)
class _Rooms:
    at: Callable[[int, float], Table]  # (number of stages, time limit) → rooms
    needed: int  # what rooms must add up to
    counts: Sequence[int]  # numbers of stages to choose from, ascending
    limits: Table  # all times a stage can take, ascending: the best limit is one of them


def _best(rooms: _Rooms) -> tuple[int, float] | None:
    """The fewest stages that keep the least limit, and that limit; None where no limit can be kept."""

    def may_keep(stages: int, limit: int) -> bool:
        return _may_seat(rooms.at(stages, rooms.limits[limit]), rooms.needed)

    def keeps(stages: int, limit: int) -> bool:
        return _seat(rooms.at(stages, rooms.limits[limit]), rooms.needed) is not None

    best = len(rooms.limits)
    for stages in reversed(rooms.counts):  # more stages are mostly faster, so that few of the later ones are better
        if best > 0 and may_keep(stages, best - 1):
            least = bisect_left(range(best - 1), True, key=partial(may_keep, stages))
            if keeps(stages, least):  # mostly
                best = least
            elif keeps(stages, best - 1):
                best = bisect_left(range(best - 1), True, least + 1, key=partial(keeps, stages))
    if best == len(rooms.limits):
        return None
    return next(n for n in rooms.counts if keeps(n, best)), float(rooms.limits[best])


def _seat(room: Table, needed: int) -> list[int] | None:
    """A peer for each stage, all different, whose rooms add up to what is needed; None where there are none."""
    if not _may_seat(room, needed):
        return None
    peers = best_columns(room)
    return peers if sum(room[stage, peer] for stage, peer in enumerate(peers)) >= needed else None


def _may_seat(room: Table, needed: int) -> bool:
    """Quick, and settles most cases: where this is false, nobody can be seated."""
    most_by_peer = np.sort(room.max(axis=0))[-len(room) :]
    return bool(room.max(axis=1).sum() >= needed and most_by_peer.sum() >= needed)


def _holders(room: Table, needed: int) -> list[int]:
    """Of all ways to seat the peers, one without the last to join, if there is one, without the one before, …"""
    stages, peers = room.shape
    left, seated = list(range(peers)), _seat(room, needed)
    assert seated is not None
    for peer in reversed(range(peers)):
        if len(left) == stages:
            break
        others = [p for p in left if p != peer]
        if peer in seated:
            found = _seat(room[:, others], needed)
            if found is None:
                continue
            seated = [others[column] for column in found]
        left = others
    # Of these, the ones who joined first to the earlier stages, as far as it takes no room.
    order = np.outer(np.arange(stages), np.arange(stages))
    return [left[column] for column in best_columns(room[:, left] * (stages**3 + 1) + order)]


def best_columns(gain: Table) -> list[int]:
    """A column for each row, all different, with the largest sum of gains.

    The Hungarian method by shortest augmenting paths. Rooms are small numbers, so that many columns are equally near:
    they are settled all at once.
    """
    rows, columns = gain.shape
    cost = gain.max() - gain
    row_price, column_price = cost.min(axis=1), np.zeros(columns, dtype=np.int64)
    owner, column_of = np.full(columns, -1), np.full(rows, -1)
    for start in range(rows):
        far = cost[start] - row_price[start] - column_price
        distance = far.min()
        free = np.flatnonzero((far == distance) & (owner < 0))
        if len(free):  # mostly
            row_price[start] += distance
            owner[free[0]], column_of[start] = start, free[0]
            continue
        far, via = np.full(columns, _FAR), np.full(columns, -1)
        settled = np.zeros(columns, dtype=bool)
        frontier, distance = np.array([start]), np.int64(0)
        while True:
            reach = cost[frontier] - row_price[frontier, None] - column_price + distance
            nearest = reach.argmin(axis=0)
            reach = reach.min(axis=0)
            closer = reach < far  # never true of a settled column: prices keep all steps from being negative
            far[closer] = reach[closer]
            via[closer] = frontier[nearest[closer]]
            distance = np.where(settled, _FAR, far).min()
            near = ~settled & (far == distance)
            free = np.flatnonzero(near & (owner < 0))
            if len(free):
                break
            settled |= near
            frontier = owner[near]
        row_price[start] += distance
        row_price[owner[settled]] += distance - far[settled]
        column_price[settled] -= distance - far[settled]
        column, row = free[0], -1
        while row != start:
            row = via[column]
            owner[column] = row
            column_of[row], column = column, column_of[row]
    return [int(column) for column in column_of]


def _sending(spec: RunSpec, offers: Sequence[Offer], first: bool = False, last: bool = False) -> Table:
    """Seconds a step in which each peer sends its messages from such a stage: the first sends no gradients, the last no
    activations. 0 where its line has no cap: how fast that is nobody has measured."""
    sizes, tokens = boundary_bytes(spec), spec.batch.size * spec.model.context
    sent = 8 * tokens * ((not last) * sizes["forward"] + (not first) * sizes["backward"])
    return sent / np.array([offer.upload for offer in offers])


# A fixed cut.


def _place_fixed(spec: RunSpec, offers: Sequence[Offer]) -> Placement | no_placement.NoPlacement:
    layers = layers_per_stage(spec)
    if len(offers) < len(layers):
        return no_placement.TooFewPeers(len(offers), len(layers))
    ranges = spans(layers)
    memory, work = stage_memory(spec), stage_flops(spec, layers)
    needs = [memory.total(span.start, span.stop, len(layers) - 1 - i) for i, span in enumerate(ranges)]
    last = len(layers) - 1
    fits = np.array([[o.fits(memory, span, last - i) for o in offers] for i, span in enumerate(ranges)])
    times = np.array(work)[:, None] / np.array([offer.flops for offer in offers])
    times = np.maximum(times, [_sending(spec, offers, first=i == 0, last=i == last) for i in range(len(layers))])
    none = -len(layers)
    rooms = _Rooms(
        at=lambda _, limit: np.where(fits & (times <= limit), 1, none),
        needed=len(layers),
        counts=[len(layers)],
        limits=np.unique(times),
    )
    found = _best(rooms)
    if found is None:
        return _too_large(spec, offers, memory, ranges, needs)
    holders = _holders(rooms.at(*found), rooms.needed)
    return Placement(tuple(layers), tuple(offers[i].peer for i in holders))


# A cut chosen to fit the peers.


def _place_auto(spec: RunSpec, offers: Sequence[Offer]) -> Placement | no_placement.NoPlacement:
    if len(offers) < spec.min_peers:
        return no_placement.TooFewPeers(len(offers), spec.min_peers, at_least=True)
    memory, one = stage_memory(spec), atom(spec)
    least_last = -(-spec.form.least_last_layers(Sizes.of(spec)) // one)
    rooms = _auto_rooms(spec, offers, memory, least_last)
    found = _best(rooms)
    if found is None:
        return _no_cut(spec, offers, memory, least_last)
    stages, _ = found
    room = rooms.at(*found)
    holders = _holders(room, rooms.needed)
    rooms_taken = [int(room[stage, peer]) for stage, peer in enumerate(holders)]
    atoms = _share_out(spec, rooms_taken, [offers[i].flops for i in holders], [1] * (stages - 1) + [least_last])
    return Placement(tuple(n * one for n in atoms), tuple(offers[i].peer for i in holders))


def _atom_flops(spec: RunSpec) -> list[float]:
    """Of the embedding, each atom and the head."""
    embed, *layers, head = unit_flops(spec).values()
    one = atom(spec)
    return [embed, *(sum(layers[i : i + one]) for i in range(0, len(layers), one)), head]


def _auto_rooms(spec: RunSpec, offers: Sequence[Offer], memory: StageMemory, least_last: int) -> _Rooms:
    """In atoms."""
    units, one = _atom_flops(spec), atom(spec)
    total = len(units) - 2
    alike = total - least_last  # atoms that need not be in the last stage
    most = min(len(offers), alike + 1)
    # By number of atoms: 1 … for the first and the middle stages, least_last … for the last one.
    first, middle = list(accumulate(units[: alike + 1]))[1:], list(accumulate(units[2 : alike + 1]))
    last = list(accumulate(units[::-1]))[least_last:total]
    speed = np.array([offer.flops for offer in offers])
    times = [
        np.maximum(np.array(work).reshape(-1, 1) / speed, _sending(spec, offers, **ends))
        for work, ends in zip(
            (first, middle, last, [sum(units)]),
            ({"first": True}, {}, {"last": True}, {"first": True, "last": True}),
            strict=True,
        )
    ]

    def fitting(stages: list[range], afters: Sequence[int]) -> Table:
        """How many of these stages, each an atom larger than the one before, a peer has the memory for: a row for each
        number of stages behind them."""
        stages = [range(stage.start * one, stage.stop * one) for stage in stages]
        if not stages:
            return np.zeros((len(afters), len(offers)), np.int64)
        sizes = {way: memory.totals(stages, afters, way) for way in {offer.computation for offer in offers}}
        on_host = memory.on_host(stages[0].start, stages[0].stop)  # the same for all of them
        room = [(sizes[offer.computation], offer.room(on_host)) for offer in offers]
        return np.array([(of_all <= bytes_).sum(axis=1) for of_all, bytes_ in room]).T

    fit_first = fitting([range(n) for n in range(1, alike + 1)], range(1, most))
    fit_middle = fitting([range(1, 1 + n) for n in range(1, alike)], range(1, most - 1))
    [fit_last] = fitting([range(total - n, total) for n in range(least_last, total)], [0])
    [fit_whole] = fitting([range(total)], [0])

    def at(stages: int, limit: float) -> Table:
        in_first, in_middle, in_last, in_whole = ((t <= limit).sum(axis=0) for t in times)
        if stages == 1:
            room = total * np.minimum(fit_whole, in_whole)[None]
        else:
            ends = np.minimum(fit_last, in_last)
            room = np.vstack(
                [
                    np.minimum(fit_first[stages - 2], in_first),
                    np.minimum(fit_middle[: stages - 2][::-1], in_middle),
                    np.where(ends > 0, ends + least_last - 1, 0),
                ]
            )
        return np.where(room > 0, room, -most * total)  # one such seat, and nothing adds up

    return _Rooms(at, total, range(1, most + 1), np.unique(np.concatenate(times)))


def _share_out(spec: RunSpec, rooms: Sequence[int], flops: Sequence[float], atoms: list[int]) -> list[int]:
    """Atoms per stage, from the least: each further one to the stage that is then the least busy."""
    units = _atom_flops(spec)
    one = units[1]
    work = [n * one for n in atoms]
    work[-1] = sum(units[-1 - atoms[-1] :])
    for _ in range(len(units) - 2 - sum(atoms)):
        free = [i for i, room in enumerate(rooms) if atoms[i] < room]
        i = min(free, key=lambda i: (work[i] + one) / flops[i])
        atoms[i] += 1
        work[i] += one
    return atoms


# What is missing.


def _too_large(
    spec: RunSpec, offers: Sequence[Offer], memory: StageMemory, ranges: list[range], needs: list[int]
) -> no_placement.NoPlacement:
    """A fixed cut does not fit. The largest stages must go to the largest peers: where does that fail first?"""
    by_need = sorted(range(len(needs)), key=lambda i: -needs[i])
    by_size = sorted((offer.memory for offer in offers), reverse=True)
    for larger, (i, have) in enumerate(zip(by_need, by_size, strict=False)):
        if needs[i] <= have:
            continue
        in_flight = _in_flight(memory, ranges[i], len(ranges) - 1 - i)
        if larger == 0:
            return no_placement.StageTooLarge(i, _layers(ranges[i], spec), needs[i], have, in_flight)
        return no_placement.TooFewLargePeers(larger + 1, needs[i], larger, have, in_flight)
    return _host_too_small(memory, ranges)  # the devices alone would do


def _no_cut(spec: RunSpec, offers: Sequence[Offer], memory: StageMemory, least_last: int) -> no_placement.NoPlacement:
    """No cut fits the peers: an end is too large for any of them, or they have room for too few layers."""
    total, one, largest = spec.model.layers, atom(spec), max(offer.memory for offer in offers)
    rooms = _auto_rooms(spec, [replace(offer, host_memory=_FAR) for offer in offers], memory, least_last)
    if _best(rooms) is not None:  # the devices alone would do
        return _host_too_small(memory, spans([1] * total))
    if len(rooms.counts) == 1:
        more = len(offers) == 1 and least_last * one < total
        return no_placement.ModelTooLarge(memory.total(0, total, 0), largest, more, _in_flight(memory, range(total), 0))
    ends: list[tuple[Literal["first", "last"], range, int]]
    ends = [("first", range(one), 1), ("last", range(total - least_last * one, total), 0)]
    least = [memory.total(span.start, span.stop, after) for _, span, after in ends]
    for (name, span, after), need in zip(ends, least, strict=True):
        if need > largest:
            in_flight = _in_flight(memory, span, after)
            return no_placement.StageTooLarge(name, _layers(span, spec), need, largest, in_flight)
    most, most_stages = 0, 0
    for stages in rooms.counts:
        room = rooms.at(stages, math.inf)
        held = sum(int(room[stage, peer]) for stage, peer in enumerate(best_columns(room)))
        if held > most:
            most, most_stages = held, stages
    if most <= 0:
        first, last = least
        return no_placement.EndsTooLarge(first, last)
    after = most_stages - 1
    in_flight = _in_flight(memory, range(one), after)
    least_first = memory.total(0, one, after)
    return no_placement.TooFewLayersFit(len(offers), most * one, total, most_stages, least_first, in_flight, one)


def _host_too_small(memory: StageMemory, stages: Sequence[range]) -> no_placement.HostMemoryTooSmall:
    return no_placement.HostMemoryTooSmall(max(memory.on_host(span.start, span.stop) for span in stages))


def _in_flight(memory: StageMemory, span: range, stages_after: int) -> no_placement.InFlight | None:
    """What to change, where it is the microbatches rather than the model that take the memory."""
    spec, held = memory.spec, memory.for_microbatches(span.start, span.stop, stages_after)
    more, recompute = spec.batch.microbatches < spec.batch.size, spec.compute.recompute != "auto"
    if not (more or recompute) or 2 * held < memory.total(span.start, span.stop, stages_after):
        return None
    return no_placement.InFlight(held, more, recompute)


def _layers(span: range, spec: RunSpec) -> no_placement.Layers:
    return no_placement.Layers(span.start, span.stop, head=span.stop == spec.model.layers)
