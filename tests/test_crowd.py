"""Many peers and one coordinator: what concerns one of them costs nothing for each of the others, and nobody waits."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conftest import make_spec
from hypothesis import given
from hypothesis import strategies as st
from led import Led
from machine_bench import Bench, peer, to_step
from own_time import in_own_time

from protomodels_cli.coordinator import events, reasons, sessions, sharing
from protomodels_cli.coordinator.contributions import Contributions
from protomodels_cli.coordinator.dispatch import FEW, Dispatch
from protomodels_cli.coordinator.events import Left
from protomodels_cli.coordinator.history import beginning
from protomodels_cli.coordinator.peers import Peer
from protomodels_cli.coordinator.reasons import NoHeartbeat
from protomodels_cli.coordinator.run_dir import open_run_dir
from protomodels_cli.coordinator.service import Service
from protomodels_cli.coordinator.sessions import ControlStream, EnrolledPeer, watch
from protomodels_cli.coordinator.sharing import offers
from protomodels_cli.coordinator.status import FRESH, Board, describe
from protomodels_cli.wire.channels import HEARTBEATS
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

CROWD = 1000
nothing: Any = None


@contextlib.contextmanager
def a_service(folder: Path, **sections: Any):
    spec = make_spec(**sections)
    run_dir = open_run_dir(folder / "run", spec, Path())
    with contextlib.closing(run_dir.lock):
        yield Service(spec, run_dir, Led(), nothing, nothing)


def test_heartbeats_of_a_crowd_are_spread_and_whoever_is_silent_is_given_up(monkeypatch):
    async def story() -> None:
        clock = asyncio.get_running_loop().time
        monkeypatch.setattr(sessions, "time", SimpleNamespace(monotonic=clock))
        given_up: list[str] = []
        lease, enrolled = 2.0, {f"p{i}": EnrolledPeer(0.0, stream=ControlStream()) for i in range(CROWD)}
        streams = {name: known.stream for name, known in enrolled.items() if known.stream is not None}
        for stream in streams.values():
            stream.last_received, stream.last_sent = clock(), clock() - lease
        streams["p500"].last_received -= lease
        streams["p501"].last_sent = clock()
        watching = asyncio.create_task(watch(enrolled, lease, lambda peer, _: given_up.append(peer), lambda: -1.0))
        every = lease / HEARTBEATS
        await asyncio.sleep(every / 2)
        served = sum(not stream.outbox.empty() for stream in streams.values())
        assert CROWD / 5 < served < CROWD * 4 / 5, "all at once would keep a decision waiting"
        await asyncio.sleep(every * 0.6)
        assert {name for name, stream in streams.items() if stream.outbox.empty()} == {"p500", "p501"}
        assert set(given_up) == {"p500"}
        for stream in streams.values():
            while not stream.outbox.empty():
                stream.outbox.get_nowait()
        async with asyncio.timeout(5 * every):
            while streams["p501"].outbox.empty():  # it has heard nothing since
                await asyncio.sleep(every / 50)
        watching.cancel()
        told = sum(not stream.outbox.empty() for stream in streams.values())
        assert told < CROWD / 2, "others have heard something half as long ago"

    in_own_time(story())


def test_limits_of_connections_are_those_of_the_spec(tmp_path):
    async def story() -> None:
        most = {"connections": 77, "connections_per_address": 7}
        with a_service(tmp_path, limits=most) as service:
            await service.open("127.0.0.1", 0)
            assert service.door is not None
            assert (service.door.limits.connections, service.door.limits.connections_per_address) == (77, 7)
            assert service._failures.rate.burst == 16, "few connections: a home's second mistake does not cut it off"
            await service.close()

    asyncio.run(story())


class Said:
    """In place of the sessions: who was told what."""

    routes = None

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def send(self, peer: str, **body: Any) -> None:
        self.told += [(peer, name) for name in body]


def test_spares_hear_what_is_new_to_them_and_in_their_turn():
    async def story() -> None:
        said, held = Said(), reasons.AllStagesHeld(4)
        dispatch = Dispatch(said, nothing, nothing, "", lambda: beginning("u"), "run")  # type: ignore[arg-type]
        names = [f"p{i}" for i in range(3 * FEW)]

        def tell_all(why: Any) -> list[tuple[str, str]]:
            said.told.clear()
            for name in names:
                dispatch.explain(events.MakeSpare(name, why))
            return said.told

        assert tell_all(held) == [(name, "spare") for name in names], "who may hold something hears it at once"
        assert tell_all(held) == []
        assert tell_all(reasons.HoldersDisconnected((1,))) == []
        dispatch.explain(events.Wait(names[1], reasons.HoldersDisconnected((1,))))
        assert said.told == [(names[1], "wait")]
        dispatch.forget(names[2])
        while dispatch._later:
            before = len(said.told)
            await asyncio.sleep(0.005)
            assert len(said.told) - before <= FEW
        rest = [(name, "spare") for name in names if name not in names[1:3]]
        assert said.told == [(names[1], "wait"), *rest]
        assert tell_all(reasons.HoldersDisconnected((1,))) == [(names[1], "spare"), (names[2], "spare")]

    asyncio.run(story())


def test_a_status_is_made_again_only_where_something_changed():
    b = Bench(make_spec(stages=2))
    b.join(1, 2, 3)
    to_step(b, 2)
    board = Board(0.0)
    first = board.show(b.state, b.now, 3, None, Contributions())
    assert first == describe(b.state, b.now, 0.0, 3)
    assert board.show(b.state, b.now + FRESH / 2, 4, None, Contributions()) is first
    rows = {name: row for name, (_, row) in board._rows.items()}
    b.tell(Left("p1", NoHeartbeat(5.0)))  # p3 takes its stage
    b.join(4)
    b.now += FRESH
    assert board.show(b.state, b.now, 3, None, Contributions()) == describe(b.state, b.now, 0.0, 3)
    assert board._rows["p2"][1] is rows["p2"]
    assert board._rows.keys() == {"p2", "p3", "p4"}


def test_the_end_is_shown_at_once():
    """A page is told the last state a moment after the one before."""
    b = Bench(make_spec(stages=2, steps=3))
    b.join(0, 1)
    to_step(b, 3)
    board = Board(0.0)
    assert board.show(b.state, b.now, 0, None, Contributions()).phase == pb.RunStatus.RUNNING
    at = b.now
    b.finish()
    assert board.show(b.state, at, 0, None, Contributions()).phase == pb.RunStatus.DONE


cards = st.sampled_from([(), ("x",), ("y",), ("x", "y")])


@given(st.lists(st.tuples(cards, st.integers(0, 90), st.integers(0, 40)), max_size=6))
def test_what_a_peer_would_have_alone_is_its_share_if_nobody_else_got_one(rows):
    peers = [
        replace(peer(i), cards=which, memory=memory, card_memory=100, host_memory=99)
        for i, (which, memory, _) in enumerate(rows)
    ]
    taken = {p.id: held for p, (_, _, held) in zip(peers, rows, strict=True) if held > 20}
    found = {offer.peer: offer.memory for offer in offers(peers, taken, whole=True)}
    assert found == {p.id: sharing._shares(peers, taken, [p])[p.id] for p in peers if p.id not in taken}


def _a_million_turns() -> float:
    """Seconds of CPU that a bare loop takes on this machine now; longer on cores that others use."""
    began = time.process_time()
    for _ in range(5_000_000):
        pass
    return (time.process_time() - began) / 5


def test_a_holder_of_many_is_replaced_at_once_where_a_thousand_wait():
    stages = 64
    b = Bench(make_spec(stages=stages, model={"layers": stages}))
    b.join(*range(stages))
    to_step(b, 1)
    crowd: list[Peer] = [peer(i) for i in range(stages, CROWD)]
    for one in crowd:
        b.tell(events.Joined(one))
    began = time.process_time()
    b.tell(Left("p5", NoHeartbeat(5.0)))
    assert b.state.placed
    assert crowd[0].id in b.state.history.holders
    took = time.process_time() - began
    assert took < 100 * _a_million_turns(), "every peer's share of its card was compared with every other's"
