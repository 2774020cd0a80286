"""A store that has parts which nobody else has, and cannot be reached, or hangs: it is waited for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import make_spec
from led import Led
from machine_bench import SILENT, Bench, to_step, told
from test_direct import through_coordinator
from test_exchange import exchange_of
from test_snapshots import CONTENTS, HASHES, Desk
from waiting import PATIENCE, until

from protomodels_cli.coordinator import claims as claiming
from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator import notices, reasons
from protomodels_cli.coordinator.claims import Claims
from protomodels_cli.coordinator.history import Mark
from protomodels_cli.coordinator.seats import Preparation
from protomodels_cli.coordinator.snapshots import upkeep as upkeeps
from protomodels_cli.coordinator.snapshots import uploads as uploading
from protomodels_cli.coordinator.snapshots.copies import Copies, OutOfReach
from protomodels_cli.coordinator.snapshots.manifest import PUT_THERE, stored_name
from protomodels_cli.coordinator.snapshots.upkeep import Upkeep
from protomodels_cli.coordinator.snapshots.uploads import Uploads
from protomodels_cli.coordinator.work import Unplaced
from protomodels_cli.protocol.parts import Part
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.worker.snapshots.exchange import SnapshotExchange

pytestmark = pytest.mark.waiting

PART = Part(1, 3, 0, HASHES[0])
REQUEST = pb.FetchRequest(lineage=1, step=3, stage=0)
LOST = ev.SnapshotLost("p0", 1, 1, 3, "damaged")


class StoreDesk(Desk):
    """A coordinator's side with a complete snapshot of whose parts one is in a store alone."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.store, self.notices, self.heard = folder / "store", list[notices.Notice](), list[Any]()
        self.copies = Copies(self.store.as_uri(), "home")
        self.uploads = Uploads(
            Led(lambda: self.state, submit=self.told.append), None, self.snapshots, (self.copies, None)
        )
        self.hand_in(1, CONTENTS[1])
        self.snapshots.arrived_in_store(1, 3, 0, HASHES[0], len(CONTENTS[0]))
        self.mark = Mark(1, 3, 0, "u", parts=HASHES, layers=(2, 2))
        marks = *self.state.history.snapshots, self.mark
        self.state = replace(
            self.state,
            history=replace(self.state.history, generation=1, pending=(), snapshots=marks),
        )
        self.prepares("p0", Preparation(PART, 0.0, None))
        self.snapshots.settle(lambda: self.state.history)
        self.there = self.store / "home/0001-00000003" / stored_name(0, HASHES[0])
        self.there.parent.mkdir(parents=True)
        self.there.write_bytes(CONTENTS[0])
        self.upkeep = Upkeep(Led(lambda: self.state, tell=self.notices.append), self.snapshots, self.copies)
        self.claims = Claims(
            Led(lambda: self.state, submit=self.heard.append), self.snapshots, self.uploads, self.upkeep
        )

    @contextmanager
    def outage(self) -> Iterator[None]:
        self.store.rename(self.store.with_name("away"))
        self.store.touch()
        yield
        self.store.unlink()
        self.store.with_name("away").rename(self.store)


@asynccontextmanager
async def looking_on(desk: StoreDesk, folder: Path) -> AsyncIterator[SnapshotExchange]:
    async with exchange_of(desk, folder, lambda notice: None) as exchange, asyncio.timeout(PATIENCE):
        yield exchange


class Broken:
    """A way to the store on which every connection is reset, until it works."""

    def __init__(self, real: Callable[..., Any]):
        self._real, self.works = real, False

    def __call__(self, *names: Any) -> Any:
        if not self.works:
            raise ConnectionResetError("reset")
        return self._real(*names)


def away_events(events: list[Any]) -> list[ev.StoreAway]:
    return [event for event in events if isinstance(event, ev.StoreAway)]


def test_a_peer_waits_for_a_part_in_a_store_that_cannot_be_read_and_gets_it(tmp_path: Path, monkeypatch):
    desk = StoreDesk(tmp_path)
    monkeypatch.setattr(desk.copies, "open", broken := Broken(desk.copies.open))

    async def story() -> None:
        async with looking_on(desk, tmp_path) as exchange:
            finding = asyncio.create_task(exchange.find(PART))
            await until(lambda: len(away_events(desk.told)) >= 2, "nobody heard of it")
            assert not finding.done()
            broken.works = True
            assert await finding
            assert exchange.parts.path(PART).read_bytes() == CONTENTS[0]

    asyncio.run(story())
    assert {(e.peer, e.lineage, e.step, e.stage) for e in away_events(desk.told)} == {("p0", 1, 3, 0)}


def test_a_snapshot_in_a_store_that_is_gone_for_a_while_is_looked_into_until_it_is_back(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(claiming, "AGAIN", 0.02)
    desk = StoreDesk(tmp_path)

    async def story() -> None:
        async with asyncio.timeout(PATIENCE):
            with desk.outage():
                looking = asyncio.create_task(desk.claims.look_into(LOST))
                await until(lambda: len(desk.heard) >= 3, "nobody heard of it")
                assert away_events(desk.heard) == desk.heard, "neither whole nor damaged"
            await looking

    asyncio.run(story())
    assert desk.heard[-1] == replace(LOST, whole_here=True)
    assert desk.notices == [notices.PartRestored(0, 3, desk.copies.url)]


def test_one_that_is_damaged_in_the_store_is_damaged_and_what_nobody_waits_for_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(claiming, "AGAIN", 0.02)
    desk = StoreDesk(tmp_path)
    desk.there.write_bytes(b"rot")
    asyncio.run(desk.claims.look_into(LOST))
    assert desk.heard == [LOST]
    desk.heard.clear()
    desk.state = replace(desk.state, history=replace(desk.state.history, generation=2))

    async def story() -> None:
        async with asyncio.timeout(PATIENCE):
            with desk.outage():
                looking = asyncio.create_task(desk.claims.look_into(replace(LOST, generation=2)))
                await until(lambda: desk.heard, "nobody heard of it")
                desk.state = replace(desk.state, work=Unplaced())
                await looking

    asyncio.run(story())
    assert away_events(desk.heard) == desk.heard


def test_a_store_that_hangs_is_out_of_reach_and_the_next_look_does_not_wait_for_it(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(upkeeps, "STALL_SECONDS", 0.1)
    monkeypatch.setattr(uploading, "AFAR_SECONDS", 0.1)
    desk, hangs, late = StoreDesk(tmp_path), threading.Event(), threading.Event()
    get = desk.copies.get

    def half_and_hang(snapshot: str, file: str, to: Path) -> None:
        to.write_bytes(CONTENTS[0][:100])
        hangs.wait(PATIENCE)
        to.write_bytes(b"late")
        late.set()

    def get_while_the_other_wakes_up(snapshot: str, file: str, to: Path) -> None:
        get(snapshot, file, to)
        hangs.set()
        late.wait(PATIENCE)

    async def story() -> None:
        monkeypatch.setattr(desk.copies, "open", lambda *names: hangs.wait(PATIENCE))
        with pytest.raises(OutOfReach):
            await through_coordinator(desk, REQUEST)
        monkeypatch.setattr(desk.copies, "get", half_and_hang)
        with pytest.raises(OutOfReach):
            await desk.upkeep.is_whole(desk.mark, 0)
        monkeypatch.setattr(upkeeps, "STALL_SECONDS", 10.0)
        monkeypatch.setattr(desk.copies, "get", get_while_the_other_wakes_up)
        assert await desk.upkeep.is_whole(desk.mark, 0)

    asyncio.run(story())


def test_two_who_look_share_one_look(tmp_path: Path, monkeypatch):
    desk = StoreDesk(tmp_path)
    monkeypatch.setattr(desk.copies, "get", broken := Broken(desk.copies.get))

    async def two() -> list[Any]:
        looks = (desk.upkeep.is_whole(desk.mark, 0) for _ in range(2))
        return await asyncio.gather(*looks, return_exceptions=True)

    assert [type(found) for found in asyncio.run(two())] == [OutOfReach] * 2
    broken.works = True
    assert asyncio.run(two()) == [True, True]


def test_what_peers_put_into_the_store_and_does_not_count_goes_when_the_snapshot_is_complete(tmp_path: Path):
    desk = StoreDesk(tmp_path)
    for stage, sha256 in ((0, "1" * 64), (1, HASHES[1]), (1, "2" * 64)):
        desk.there.with_name(stored_name(stage, sha256)).write_bytes(b"junk")
    folders = desk.snapshots.folders([desk.mark])
    desk.copies.bring_up_to_date(folders, [], desk.snapshots.reading)
    names = {path.name for path in desk.there.parent.iterdir()}
    assert [name for name in names if PUT_THERE.fullmatch(name)] == [desk.there.name]
    assert {"stage-1.safetensors", "snapshot.json"} <= names


# What the machine makes of it

LIMIT = 20.0


def a_run() -> Bench:
    """At step 6, with two spares."""
    run = {"snapshots": {"interval": 2, "copy_to": "s3://b"}, "limits": {"restore_seconds": LIMIT}}
    b = Bench(make_spec(stages=2, steps=9, **run))
    b.join(0, 1, 2, 3)
    to_step(b, 6)
    return b


@pytest.mark.parametrize("silent", [False, True])
def test_a_store_that_is_away_for_long_costs_neither_a_snapshot_nor_a_peer(silent):
    b = a_run()
    gone, snapshots = b.state.history.holders[0], b.state.history.snapshots
    if silent:
        b.tell(ev.Left(gone, SILENT))
        [asked] = [c for c in b.tell(ev.Tick()) if isinstance(c, ev.PrepareStage)]
        peer, part = asked.peer, asked.part
    else:
        b.lose(gone)
        peer, part = b.state.history.holders[0], b.state.history.newest.as_parts()[0]
        b.done(1)
    heard = len(b.commands)
    for _ in range(10):
        b.now += LIMIT / 2
        b.tell(ev.StoreAway(peer, *part.snapshot, 0, "no route"))
        b.tell(ev.Tick())
        if not silent:
            assert b.waits() == reasons.StoreUnreachable(0, part.step, "s3://b", "no route")
    said = notices.CopyUnreachable(0, part.step, "s3://b", "no route")
    assert told(b.commands[heard:], notices.CopyUnreachable) == [said], "once"
    assert not any(isinstance(c, ev.Dismiss) for c in b.commands)
    assert b.state.history.snapshots == snapshots
    b.now += LIMIT + 1
    b.tell(ev.Tick())
    assert peer not in (*b.state.history.holders, *b.state.seats.preparing), (
        "the store is back, and it has had its time"
    )
    assert b.state.history.snapshots == snapshots
    b.finish()


def test_a_store_that_is_back_is_not_waited_for():
    b = a_run()
    b.lose(b.state.history.holders[0])
    peer, mark = b.state.history.holders[0], b.state.history.newest
    b.done(1)
    before = b.state
    for stranger in ("p0", "nobody", b.state.history.holders[1]):
        b.tell(ev.StoreAway(stranger, *mark.key, 0, "no route"))
    b.tell(ev.StoreAway(peer, *mark.key, 1, "no route"))
    assert b.state == before
    b.tell(ev.StoreAway(peer, *mark.key, 0, "no route"))
    assert isinstance(b.waits(), reasons.StoreUnreachable)
    b.done(0)
    assert not isinstance(b.waits(), reasons.StoreUnreachable)
    b.finish()
