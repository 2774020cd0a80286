"""A peer's snapshots and the coordinator that takes them, both real: what arrives, and what is said otherwise."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from led import Led
from safetensors.torch import load
from test_snapshots import CONTENTS, HASHES, Desk
from waiting import PATIENCE

from protomodels_cli import timeouts
from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator.gate import Gate
from protomodels_cli.coordinator.run_dir import open_run_dir
from protomodels_cli.coordinator.seats import Preparation
from protomodels_cli.coordinator.service import Service
from protomodels_cli.coordinator.snapshots import failures
from protomodels_cli.coordinator.snapshots import uploads as uploads_module
from protomodels_cli.coordinator.snapshots.uploads import Refused
from protomodels_cli.observe import logs
from protomodels_cli.protocol.parts import Part
from protomodels_cli.quantities import size
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.worker import notices
from protomodels_cli.worker.snapshots import pacing
from protomodels_cli.worker.snapshots.exchange import SnapshotExchange
from protomodels_cli.worker.snapshots.pacing import NO_STAGE

STATE = load(CONTENTS[0])


@asynccontextmanager
async def exchange_of(
    desk: Desk, folder: Path, tell: Callable[[notices.Notice], None], secret: str | None = None
) -> AsyncIterator[SnapshotExchange]:
    """The peer that holds stage 0, or one that shows another `secret`."""
    spec, nothing = desk.state.spec, None
    run_dir = open_run_dir(folder / "run", spec, Path())
    service = Service(spec, run_dir, Led(lambda: desk.state, submit=desk.told.append), desk.uploads, nothing)  # type: ignore[arg-type]
    server = grpc.aio.server(interceptors=[Gate(service)])
    rpc.add_PeeringServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    metadata = (("peer", "p0"), ("secret", secret or run_dir.secret_of("p0", 1 << 33)))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = rpc.PeeringStub(channel)
        yield SnapshotExchange(
            spec, folder / "parts", stub, metadata, asyncio.create_task, lambda **body: None, tell, NO_STAGE
        )
    await server.stop(None)


async def uploaded(exchange: SnapshotExchange) -> None:
    assert exchange._uploading is not None
    async with asyncio.timeout(PATIENCE):
        await exchange._uploading


def test_a_part_that_is_too_large_is_said_by_both_sides_and_its_snapshot_given_up(tmp_path: Path):
    desk = Desk(tmp_path)
    with pytest.raises(Refused):
        desk.offered("p0", desk.header(0, size=1 << 40))
    desk.told.clear()
    noted: list[notices.Notice] = []

    async def story() -> None:
        async with exchange_of(desk, tmp_path, noted.append) as exchange:
            await exchange.save(1, 3, 0, {"weights": torch.zeros(1 << 20)})
            await uploaded(exchange)
            assert exchange.parts.all() == []

    asyncio.run(story())
    [told] = desk.told
    assert isinstance(told, ev.PartFailed)
    assert (told.lineage, told.step, told.stage) == (1, 3, 0)
    assert isinstance(told.why, failures.TooLarge)
    assert told.why.size > 4 << 20 > told.why.most
    [refused] = noted
    assert isinstance(refused, notices.PartRefused)
    assert (refused.step, refused.stage) == (3, 0)
    assert size(told.why.size) in refused.detail


def test_a_part_counts_as_uploaded_once_it_is_stored_and_until_then_the_log_says_why_not(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(timeouts, "PART_RETRY", 0.05)
    desk, noted, logged = Desk(tmp_path), list[tuple[notices.Notice, bool]](), list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]

    async def story() -> None:
        stored = lambda: desk.snapshots.has(1, 3, 0)  # noqa: E731
        async with exchange_of(desk, tmp_path, lambda notice: noted.append((notice, stored()))) as exchange:
            part = exchange.parts.write(1, 3, 0, STATE)
            desk.snapshots.coming(1, 3, 0, part.sha256).mkdir()  # where its file would be
            await exchange.save(1, 3, 0, STATE)
            await uploaded(exchange)

    logs.SNAPSHOTS.addHandler(handler)
    try:
        asyncio.run(story())
    finally:
        logs.SNAPSHOTS.removeHandler(handler)
    assert [type(event) for event in desk.told] == [ev.PartFailed, ev.PartsArrived]
    assert noted == [(notices.PartUploaded(3, 0), True)]
    assert logging.WARNING in {record.levelno for record in logged}


@pytest.mark.parametrize("urgent", [False, True])
def test_a_part_is_fetched_in_pieces_and_from_where_it_broke_off(tmp_path: Path, monkeypatch, urgent: bool):
    monkeypatch.setattr(pacing, "SMALLEST", 1000)
    monkeypatch.setattr(pacing, "LEAST_WINDOW", 4000)
    for module in (pacing, uploads_module):
        monkeypatch.setattr(module, "PIECE", 1000)
    desk = Desk(tmp_path)
    for stage, content in enumerate(CONTENTS):
        desk.hand_in(stage, content)
    history = desk.state.history
    mark = replace(history.pending[0], parts=HASHES)
    desk.state = replace(desk.state, history=replace(history, pending=(), snapshots=(mark,)))
    desk.prepares("p0", Preparation(Part(1, 3, 1, HASHES[1]), 0.0, None))
    offsets, read = list[int](), uploads_module._read_at

    def noted(file: Any, offset: int) -> bytes:
        offsets.append(offset)
        return read(file, offset)

    monkeypatch.setattr(uploads_module, "_read_at", noted)

    async def story() -> None:
        async with exchange_of(desk, tmp_path, lambda notice: None) as exchange, asyncio.timeout(PATIENCE):
            part = Part(1, 3, 1, HASHES[1])
            exchange.parts.fetching(part).write_bytes(CONTENTS[1][:3000])
            path = exchange.parts.path(part)
            assert await exchange._fetch(part, urgent)
            assert path.read_bytes() == CONTENTS[1]
            assert min(offsets) == 3000
            assert urgent or len(offsets) > 5, "as many as were asked for"
            path.unlink()
            exchange.parts.fetching(part).write_bytes(b"x" * 3000)  # what was here is damaged
            assert await exchange._fetch(part, urgent)
            assert path.read_bytes() == CONTENTS[1]
            assert min(offsets) == 0

    asyncio.run(story())


def test_a_peer_that_is_denied_does_not_try_for_ever(tmp_path: Path):
    desk, noted = Desk(tmp_path), list[notices.Notice]()

    async def story() -> None:
        async with exchange_of(desk, tmp_path, noted.append, secret="wrong") as exchange, asyncio.timeout(PATIENCE):
            await exchange.save(1, 3, 0, STATE)
            await uploaded(exchange)
            with pytest.raises(ValueError, match="not"):
                await exchange.find(Part(1, 3, 1, "0" * 64))

    asyncio.run(story())
    assert noted == []


def test_a_disk_that_does_not_delete_ends_no_peer(tmp_path: Path):
    desk, noted = Desk(tmp_path), list[notices.Notice]()

    async def story() -> None:
        async with exchange_of(desk, tmp_path, noted.append) as exchange:
            exchange.parts.path(Part(1, 1, 0, "0" * 64)).mkdir()  # a folder is not unlinked
            exchange.parts.write(1, 3, 0, STATE)
            await exchange.keep(pb.Keep(begun=[pb.SnapshotName(lineage=1, step=3)]))
            await uploaded(exchange)
            exchange.parts.remove(Part(1, 1, 0, "0" * 64))
            exchange.parts.folder = tmp_path / "gone"
            await exchange.keep(pb.Keep())
            assert exchange.parts.all() == []

    asyncio.run(story())
    assert [type(notice) for notice in noted] == [
        notices.PartsNotDeleted,
        notices.PartUploaded,
        notices.PartsNotDeleted,
    ]
