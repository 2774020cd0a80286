"""Stores that fail or hang where peers put their parts there themselves, and holders that would fill them."""

# ruff: noqa: F401, F811  (s3 is a fixture)

from __future__ import annotations

import asyncio
import http.server
import threading
from pathlib import Path

import pytest
from s3 import S3
from test_direct import DirectDesk, TakesAnything, put, s3
from test_exchange import STATE, exchange_of, uploaded
from test_snapshots import CONTENTS, HASHES
from waiting import until

from protomodels_cli import timeouts
from protomodels_cli.coordinator import notices as told
from protomodels_cli.coordinator.snapshots import direct as directs
from protomodels_cli.coordinator.snapshots import manifest
from protomodels_cli.worker import notices
from protomodels_cli.worker.snapshots import exchange as exchanges
from protomodels_cli.worker.snapshots.direct import MOST_FAILURES


class OutOfOrder(TakesAnything):
    """It takes any bytes too, but is out of order at first."""

    tries = 0

    def do_PUT(self) -> None:
        type(self).tries += 1
        if self.tries > 1:
            super().do_PUT()
        else:
            self.send_error(503)


def test_a_store_that_fails_when_it_is_tried_out_has_not_shown_that_it_refuses_other_bytes(s3, tmp_path, monkeypatch):
    desk = DirectDesk(tmp_path)

    async def story() -> None:
        desk.uploads.open_store()
        await until(lambda: desk.notices, "nobody was told")

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OutOfOrder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        asyncio.run(story())
        server.shutdown()
    assert not desk.direct.works
    assert OutOfOrder.tries == 1


def test_a_store_that_hangs_holds_up_no_upload_and_no_fetch(s3: S3, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(directs, "ANSWER_SECONDS", 0.3)
    desk, noted, hangs = DirectDesk(tmp_path), list[notices.Notice](), threading.Event()
    desk.hand_in(1, CONTENTS[1])

    async def story() -> None:
        await desk.open()
        assert desk.direct._store is not None
        monkeypatch.setattr(desk.direct._store[0], "size", lambda *_: hangs.wait())
        async with exchange_of(desk, tmp_path, noted.append) as exchange:
            await exchange.save(1, 3, 0, STATE)
            asked = [asyncio.create_task(desk.direct.fetch_url("x", "a-part")) for _ in range(2)]
            await asyncio.sleep(0.1)
            assert desk.direct.works, "it is waited for still"
            assert all(task.done() for task in asked), "and nobody else waits for that"
            await uploaded(exchange)
            assert desk.snapshots.has(1, 3, 0)

    asyncio.run(story())
    hangs.set()
    assert noted == [notices.PartUploaded(3, 0, to_store=False)]
    assert not desk.direct.works
    assert [type(notice) for notice in desk.notices] == [told.StoreNotDirect]


def test_a_holder_puts_one_part_of_a_snapshot_into_the_store(s3: S3, tmp_path: Path):
    desk = DirectDesk(tmp_path)

    async def urls(*hashes: str) -> list[bool]:
        await desk.open()
        offers = [await desk.uploads.offer("p0", desk.header(0, direct=True, sha256=sha256)) for sha256 in hashes]
        assert all(offer.wanted for offer in offers), "through the coordinator"
        return [bool(offer.url) for offer in offers]

    assert asyncio.run(urls(HASHES[0], "1" * 64, HASHES[0], "2" * 64)) == [True, False, True, False]


def test_a_failure_of_our_own_disk_is_not_the_stores(s3: S3, tmp_path: Path):
    desk = DirectDesk(tmp_path)

    async def story() -> None:
        await desk.open()
        header = desk.header(0, direct=True)
        put((await desk.uploads.offer("p0", header)).url, CONTENTS[0], HASHES[0])
        mark = manifest.stored_mark(tmp_path / "snapshots" / ".0001-00000003", 0, HASHES[0])
        mark.with_name(f".{mark.name}.partial").mkdir()  # where it is written
        with pytest.raises(IsADirectoryError):
            await desk.uploads.offer("p0", header)

    asyncio.run(story())
    assert desk.direct.works
    assert desk.notices == []


def test_a_store_that_takes_parts_and_does_not_have_them_is_given_up(s3: S3, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(timeouts, "PART_RETRY", 0.01)
    desk, noted, before = DirectDesk(tmp_path), list[notices.Notice](), len(s3.presigned("PUT"))

    async def nothing(*_: str) -> None: ...

    async def story() -> None:
        await desk.open()
        monkeypatch.setattr(desk.direct, "size", nothing)
        async with exchange_of(desk, tmp_path, noted.append) as exchange:
            await exchange.save(1, 3, 0, STATE)
            await uploaded(exchange)

    asyncio.run(story())
    own = [path for path in s3.presigned("PUT")[before:] if path.endswith(".safetensors")]
    assert len(own) == MOST_FAILURES
    assert [type(notice) for notice in noted] == [notices.StoreNotReached, notices.PartUploaded]
    assert desk.snapshots.has(1, 3, 0)
