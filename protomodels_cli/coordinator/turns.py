"""Peers that had their turn: who gave up a stage for a fault is asked last for an hour, with all peers of its person.

Pure. It must not know what the fault was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from protomodels_cli.coordinator.peers import Peer
from protomodels_cli.coordinator.state import State
from protomodels_cli.coordinator.voices import voice_of

FORGOTTEN = 3600.0  # seconds after which a turn counts no more
MOST_KEPT = 1000  # peers and persons
MOST_COUNTED = 10

Turns = Mapping[str, tuple[float, ...]]  # peer or voice → when it had a turn


def after(state: State, peers: Iterable[str], now: float) -> Turns:
    """All turns, these peers' included: one for each peer, and one for its voice. Peers of one voice have one turn."""
    known = [one for peer in peers if (one := state.peers.get(peer)) is not None]
    return with_names(state, {name for peer in known for name in names_of(peer)}, now)


def after_another(state: State, peer: str, what: str, now: float) -> Turns:
    """The same for what may happen to an honest peer once: only the second time within an hour is a turn."""
    once = f"{what} {peer}"
    if is_recent(state, once, now):
        return after(state, [peer], now)
    return with_names(state, {once}, now)


def names_of(peer: Peer) -> tuple[str, str]:
    """The peer and its voice, as turns are counted."""
    return f"peer {peer.id}", voice_of(peer)


def with_names(state: State, names: Iterable[str], now: float) -> Turns:
    recent = {name: tuple(at for at in times if now - at < FORGOTTEN) for name, times in state.conduct.turns.items()}
    for name in sorted(names):
        recent[name] = (*recent.pop(name, ()), now)[-MOST_COUNTED:]
    return dict([(name, times) for name, times in recent.items() if times][-MOST_KEPT:])


def is_recent(state: State, name: str, now: float) -> bool:
    return any(now - at < FORGOTTEN for at in state.conduct.turns.get(name, ()))


def after_a_delay(state: State, peer: str, now: float) -> Turns:
    """It took longer than expected, which is no turn: others are asked first, or another id of its person would be."""
    known = state.peers.get(peer)
    return state.conduct.turns if known is None else with_names(state, {f"late {voice_of(known)}"}, now)


def delays(state: State, peer: str, now: float) -> float:
    """Those of its voice, within the last hour; an older one counts for less."""
    known = state.peers.get(peer)
    times = () if known is None else state.conduct.turns.get(f"late {voice_of(known)}", ())
    return sum(1 - (now - at) / FORGOTTEN for at in times if now - at < FORGOTTEN)


def count(turns: Turns, state: State, peer: str, now: float) -> int:
    """How many turns this peer and its voice had within the last hour."""
    return len(_ages(turns, state, peer, now))


def weight(state: State, peer: str, now: float) -> float:
    """The same, where an older turn counts for less: whoever has the least is asked first."""
    return sum(1 - age / FORGOTTEN for age in _ages(state.conduct.turns, state, peer, now))


def _ages(turns: Turns, state: State, peer: str, now: float) -> list[float]:
    known = state.peers.get(peer)
    if known is None or not turns:
        return []
    return [now - at for name in names_of(known) for at in turns.get(name, ()) if now - at < FORGOTTEN]
