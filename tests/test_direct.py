"""Peers that put their parts into an S3 store and fetch them from there: a real server, which checks signatures."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.server
import math
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_spec
from heavy import heavy
from led import Led
from s3 import S3, URL, s3_server
from s3_server_key import SECRET
from test_exchange import STATE, exchange_of, uploaded
from test_snapshots import CONTENTS, HASHES, RUN, Desk
from waiting import until, wait_for

from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator import notices as told
from protomodels_cli.coordinator.history import Mark
from protomodels_cli.coordinator.seats import Preparation
from protomodels_cli.coordinator.snapshots import direct as directs
from protomodels_cli.coordinator.snapshots import manifest
from protomodels_cli.coordinator.snapshots.copies import Copies
from protomodels_cli.coordinator.snapshots.direct import Direct, direct_to
from protomodels_cli.coordinator.snapshots.failures import WrongTensor
from protomodels_cli.coordinator.snapshots.manifest import part_name, stored_name
from protomodels_cli.coordinator.snapshots.upkeep import Upkeep
from protomodels_cli.coordinator.snapshots.uploads import Uploads
from protomodels_cli.protocol.parts import Part
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.store import StoreBroken, StoreRequest
from protomodels_cli.worker import notices
from protomodels_cli.worker.snapshots.direct import StoreAccess
from protomodels_cli.worker.snapshots.flow import Flow, Throttle
from protomodels_cli.worker.snapshots.pacing import Pace

RIGHT, WRONG = b"0123456789", b"0123456780"
LEAST = 4e5  # bytes a second of a transfer that yields
NOWHERE = "http://127.0.0.1:1"
SHA256 = hashlib.sha256(RIGHT).hexdigest()


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with pytest.MonkeyPatch.context() as patch, s3_server(tmp_path_factory.mktemp("s3")) as server:
        for name, value in server.env.items():
            patch.setenv(name, value)
        server.files().mkdir("bucket")
        yield server


class DirectDesk(Desk):
    """A coordinator's side with a store, in which no run has this name."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.state = replace(self.state, spec=make_spec(stages=2, snapshots={"copy_to": URL}))
        self.notices: list[told.Notice] = []
        self.copies = Copies(URL, folder.name)
        self.direct = Direct(self.copies, self.notices.append)
        led = Led(lambda: self.state, submit=self.told.append)
        self.uploads = Uploads(led, None, self.snapshots, (self.copies, self.direct))

    async def open(self) -> None:
        self.uploads.open_store()
        await until(lambda: self.direct.works, "the store cannot be used")


def put(url: str, content: bytes, sha256: str = SHA256, size: int | None = None) -> None:
    with StoreRequest(url) as request:
        request.begin_put(len(content) if size is None else size, sha256)
        request.send(content)
        request.end_put()


def got(url: str, offset: int = 0) -> bytes:
    with StoreRequest(url) as request:
        request.begin_get(offset)
        return b"".join(iter(request.receive, b""))


async def through_coordinator(desk: Desk, request: pb.FetchRequest) -> bytes:
    """A piece, as of one who cannot reach the store."""

    async def no_more() -> AsyncIterator[pb.FetchRequest]:
        for request in ():
            yield request

    [piece] = [piece async for piece in desk.uploads.read_part(request, no_more())]
    return piece


def a_mark_of(desk: DirectDesk, *hashes: str) -> Mark:
    """The snapshot is complete."""
    mark = Mark(1, 3, 0, "u", parts=hashes, layers=(2, 2))
    snapshots = *desk.state.history.snapshots, mark
    desk.state = replace(desk.state, history=replace(desk.state.history, pending=(), snapshots=snapshots))
    desk.snapshots.settle(lambda: desk.state.history)
    return mark


def test_a_part_goes_to_the_store_and_back_past_the_coordinator(s3: S3, tmp_path: Path):
    desk, noted, folder = DirectDesk(tmp_path), list[notices.Notice](), tmp_path / "snapshots" / "0001-00000003"
    desk.hand_in(1, CONTENTS[1])

    async def story() -> Part:
        await desk.open()
        async with exchange_of(desk, tmp_path, noted.append) as exchange:
            await exchange.save(1, 3, 0, STATE)
            await uploaded(exchange)
            [part] = exchange.parts.all()
            whole = exchange.parts.path(part).read_bytes()
            mark = a_mark_of(desk, part.sha256, HASHES[1])
            assert not (folder / part_name(0)).exists()
            desk.copies.bring_up_to_date([folder], [], desk.snapshots.reading)
            exchange.parts.remove(part)
            exchange.parts.fetching(part).write_bytes(whole[:1000])  # a fetch that broke off
            other = Part(1, 3, 1, HASHES[1])
            desk.prepares("p0", Preparation(other, 0.0, None))
            for wanted, contents in ((part, whole), (other, CONTENTS[1])):
                assert await exchange.find(wanted)
                assert exchange.parts.path(wanted).read_bytes() == contents
            rest = pb.FetchRequest(lineage=1, step=3, stage=0, offset=1000, size=1 << 20)
            assert await through_coordinator(desk, rest) == whole[1000:]
            upkeep = Upkeep(Led(lambda: desk.state, tell=desk.notices.append), desk.snapshots, desk.copies)
            assert manifest.check(folder, RUN).mark == mark
            assert await upkeep.is_whole(mark, 0)
            assert (folder / part_name(0)).read_bytes() == whole
            return part

    part = asyncio.run(story())
    there = f"/bucket/runs/{tmp_path.name}/{folder.name}"
    own = f"{there}/{stored_name(0, part.sha256)}"
    assert s3.presigned("PUT")[-1] == own
    assert s3.presigned("GET")[-2:] == [own, f"{there}/{part_name(1)}"]
    assert noted == [notices.PartUploaded(3, 0, to_store=True)]
    assert [type(event) for event in desk.told] == [ev.PartsArrived, ev.SnapshotWhole]


def test_who_asks_while_the_store_is_tried_out_waits_for_that(s3: S3, tmp_path: Path):
    """As of a coordinator that has just taken over: parts would go through it, and that takes longer."""
    desk = DirectDesk(tmp_path)
    for stage, content in enumerate(CONTENTS):
        desk.hand_in(stage, content)
    a_mark_of(desk, *HASHES)
    desk.copies.bring_up_to_date([tmp_path / "snapshots" / "0001-00000003"], [], desk.snapshots.reading)

    async def story() -> str:
        desk.uploads.open_store()
        return await desk.uploads.locate(pb.FetchRequest(lineage=1, step=3, stage=1))

    assert got(asyncio.run(story())) == CONTENTS[1]


def test_a_transfer_with_the_store_yields_too(s3: S3, tmp_path: Path):
    """With the line needed it has its least rate, and nothing more."""
    desk, content = DirectDesk(tmp_path), bytes(1 << 18)
    seconds, (way, file) = len(content) / LEAST, (tmp_path / "there", tmp_path / "back")
    way.write_bytes(content)

    took = dict[tuple[str, bool], float]()

    def note(what: str, needed: bool, seconds: float) -> None:
        took[what, needed] = min(seconds, took.get((what, needed), math.inf))

    async def story() -> None:
        store = StoreAccess(True, lambda notice: None)
        sha256 = hashlib.sha256(content).hexdigest()
        url = await desk.direct.upload_url("x", "large", len(content), sha256)
        for needed in (True, *[False] * 5):  # the best of five: a busy machine holds up whom the line does not
            file.unlink(missing_ok=True)
            with way.open("rb") as out:
                began = time.monotonic()
                assert await store.upload(url, out, len(content), sha256, a_flow(needed))
                note("upload", needed, time.monotonic() - began)
            began = time.monotonic()
            assert await store.fetch(await desk.direct.fetch_url("x", "large"), file, a_flow(needed))
            note("fetch", needed, time.monotonic() - began)
            assert file.read_bytes() == content

    def a_flow(needed: bool) -> Flow:
        return Flow(Pace(LEAST), lambda: needed, Throttle(None))

    asyncio.run(story())
    for what in ("upload", "fetch"):
        assert took[what, True] > 0.9 * seconds
        assert took[what, False] < 0.6 * seconds


def test_what_the_store_has_not_confirmed_is_known():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        with StoreRequest(f"http://127.0.0.1:{listening.getsockname()[1]}/x?y") as request:
            request.begin_put(1 << 18, SHA256)
            there, _ = listening.accept()
            with there:
                assert request.send(bytes(1 << 18))
                assert request.unconfirmed > 1 << 16
                there.setblocking(False)

                def read_all() -> bool:
                    with contextlib.suppress(BlockingIOError):
                        there.recv(1 << 16)
                    return request.unconfirmed == 0

                wait_for(read_all, "what was read stays unconfirmed")


def test_a_url_is_good_for_just_these_bytes_at_just_this_place_and_not_for_long(s3: S3, tmp_path: Path, monkeypatch):
    desk = DirectDesk(tmp_path)
    to, back = asyncio.run(signed(desk, "a-part")), asyncio.run(desk.direct.fetch_url("x", "a-part"))
    cheats: dict[str, Callable[[], object]] = {
        "other bytes": lambda: put(to, WRONG),
        "other bytes with their own hash": lambda: put(to, WRONG, hashlib.sha256(WRONG).hexdigest()),
        "more bytes": lambda: put(to, RIGHT + b"0"),
        "another object": lambda: put(to.replace("a-part", "b-part"), RIGHT),
        "another signature": lambda: put(to[:-1] + ("0" if to[-1] != "0" else "1"), RIGHT),
        "no signature": lambda: put(to.partition("?")[0] + "?", RIGHT),
        "what is not there": lambda: got(back),
        "a look with the URL of an upload": lambda: got(to),
    }
    for cheat in cheats.values():
        with pytest.raises(StoreBroken):
            cheat()
    assert s3.files().ls(URL) == [] or not s3.files().exists(f"{URL}/{tmp_path.name}/x")
    put(to, RIGHT)
    assert (got(back), got(back, 4), got(back, len(RIGHT))) == (RIGHT, RIGHT[4:], b"")
    with pytest.raises(StoreBroken):
        put(back, RIGHT)
    monkeypatch.setattr(directs, "EXPIRES", 1)
    late = asyncio.run(signed(desk, "c-part"))
    time.sleep(2.1)  # to the second
    with pytest.raises(StoreBroken):
        put(late, RIGHT)
    for url in (to, back, late):
        assert SECRET not in url


def signed(desk: DirectDesk, name: str) -> Coroutine[Any, Any, str]:
    return desk.direct.upload_url("x", name, len(RIGHT), SHA256)


def test_a_part_that_is_not_its_stages_is_refused_in_the_store_too(s3: S3, tmp_path: Path):
    desk, noted = DirectDesk(tmp_path), list[notices.Notice]()

    async def story() -> None:
        await desk.open()
        async with exchange_of(desk, tmp_path, noted.append) as exchange:
            await exchange.save(1, 3, 0, {"weights": torch.zeros(3)})
            await uploaded(exchange)
            assert exchange.parts.all() == []

    asyncio.run(story())
    [failed] = desk.told
    assert isinstance(failed, ev.PartFailed)
    assert isinstance(failed.why, WrongTensor)
    assert [type(notice) for notice in noted] == [notices.PartRefused]
    assert not s3.files().exists(f"{URL}/{tmp_path.name}/0001-00000003")


def test_a_peer_that_cannot_reach_the_store_says_so_and_goes_through_the_coordinator(s3: S3, tmp_path, monkeypatch):
    desk, noted = DirectDesk(tmp_path), list[notices.Notice]()

    async def story() -> None:
        await desk.open()
        sign = desk.direct._sign  # from where the peer is, nothing is at that address
        monkeypatch.setattr(desk.direct, "_sign", lambda *a, **o: sign(*a, **o).replace(s3.endpoint, NOWHERE))
        async with exchange_of(desk, tmp_path, noted.append) as exchange:
            await exchange.save(1, 3, 0, STATE)
            await uploaded(exchange)
            [part] = exchange.parts.all()
            assert desk.snapshots.has(1, 3, 0)
            exchange.parts.remove(part)
            a_mark_of(desk, part.sha256, HASHES[1])
            await exchange.find(part)

    asyncio.run(story())
    assert [type(notice) for notice in noted] == [notices.StoreNotReached, notices.PartUploaded]
    assert noted[1] == notices.PartUploaded(3, 0, to_store=False)
    assert (tmp_path / "snapshots" / "0001-00000003" / part_name(0)).exists()


class TakesAnything(http.server.BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_DELETE = do_GET = lambda self: self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


def test_peers_are_not_sent_to_a_store_that_takes_any_bytes(s3: S3, tmp_path: Path, monkeypatch):
    desk = DirectDesk(tmp_path)

    async def story() -> None:
        desk.uploads.open_store()
        await until(lambda: desk.notices, "nobody was told")
        reply = await desk.uploads.offer("p0", desk.header(0, direct=True))
        assert (reply.wanted, reply.url) == (True, "")

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), TakesAnything) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        asyncio.run(story())
        server.shutdown()
    assert [type(notice) for notice in desk.notices] == [told.StoreNotDirect]


@pytest.mark.parametrize(
    ("snapshots", "is_direct"),
    [
        ({"copy_to": URL}, True),
        ({"copy_to": URL, "direct": "never"}, False),
        ({"copy_to": "/backup"}, False),
    ],
)
def test_the_spec_says_where_peers_use_the_store(snapshots: dict[str, Any], is_direct: bool):
    if snapshots["copy_to"] == URL:
        heavy("s3fs")
    spec = make_spec(snapshots=snapshots).snapshots
    assert (direct_to(spec, Copies(spec.copy_to or "", "home"), print) is not None) == is_direct
