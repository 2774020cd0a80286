"""This decides which peer may fetch a stage's part of a snapshot. Pure.

A part goes to a connected peer that was told to hold, build, audit or prefetch just that stage, and to nobody else. A
peer that is refused asks again: its session may have broken a moment ago, or an order may be on its way to it.
"""

from __future__ import annotations

from collections.abc import Collection

from protomodels_cli.coordinator.refusals import NoSession, PartNotAssigned
from protomodels_cli.coordinator.state import State
from protomodels_cli.protocol.parts import Part


def refusal(
    state: State, peer: str, snapshot: tuple[int, int], stage: int, audited: Collection[Part]
) -> NoSession | PartNotAssigned | None:
    """Why the peer may not fetch this part; None: it may. `audited`: the parts that it was asked to audit with."""
    if peer not in state.peers:
        return NoSession()
    told = (
        _holds(state, peer, snapshot, stage)
        or _builds(state, peer, snapshot, stage)
        or any((part.snapshot, part.stage) == (snapshot, stage) for part in audited)
        or _prefetches(state, peer, snapshot)
    )
    return None if told else PartNotAssigned(stage, snapshot[1])


def _holds(state: State, peer: str, snapshot: tuple[int, int], stage: int) -> bool:
    """Whether it holds this stage in this generation. A snapshot of another cut has other layers under its number."""
    history = state.history
    other_cut = any(mark.key == snapshot and mark.layers != history.layers for mark in history.snapshots)
    return state.stage_of(peer) == stage and not other_cut


def _builds(state: State, peer: str, snapshot: tuple[int, int], stage: int) -> bool:
    told = state.seats.preparing.get(peer)
    return told is not None and (told.part.snapshot, told.part.stage) == (snapshot, stage)


def _prefetches(state: State, peer: str, snapshot: tuple[int, int]) -> bool:
    """Whether it is a spare, and the run tells its spares to prefetch all parts (`Keep.newest`)."""
    is_spare = state.stage_of(peer) is None and peer not in state.seats.preparing
    return state.spec.snapshots.warm_spares and is_spare and snapshot == state.history.newest.key
