"""Parts of snapshots on their way to the coordinator or the store, and back: in pieces, from where it broke off, not
too fast.

One try each; whether to try again is the caller's to say, and how fast is `pacing.py`'s. It must not know sessions or
stages.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO, Literal

import grpc

from protomodels_cli.files import hash_file
from protomodels_cli.observe.logs import SNAPSHOTS
from protomodels_cli.protocol.parts import Part
from protomodels_cli.wire.channels import PIECE
from protomodels_cli.wire.client import Metadata, why_failed
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.worker.snapshots.direct import StoreAccess
from protomodels_cli.worker.snapshots.flow import Flow
from protomodels_cli.worker.snapshots.part_store import PartStore

OFFER_SECONDS = 90.0  # for an answer: the coordinator may look into the store first, or try it out
NOT_WANTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED  # a retry would not help


def logging_why(what: str) -> Callable[[Exception], None]:
    """For `retry`, which is silent: logs why `what` failed, once for as long as the reason is the same."""
    last = ""

    def log(error: Exception) -> None:
        nonlocal last
        why = why_failed(error) if isinstance(error, grpc.aio.AioRpcError) else str(error)
        if why != last:
            last = why
            SNAPSHOTS.warning("%s failed: %s; retrying", what, why)

    return log


async def upload_part(
    stub: rpc.PeeringStub,
    metadata: Metadata,
    parts: PartStore,
    part: Part,
    flow: Callable[[], Flow],
    store: StoreAccess,
) -> Literal["coordinator", "store"] | None:
    """Upload a part. Returns where it lies, once the coordinator has seen it there; None where it does not want it.
    Raises AioRpcError where the connection breaks, StoreBroken where that to the store does, OSError where the part
    cannot be read."""
    path = parts.path(part)
    header = pb.UploadHeader(
        kind=pb.UploadHeader.SNAPSHOT_PART,
        lineage=part.lineage,
        step=part.step,
        stage=part.stage,
        size=path.stat().st_size,
        sha256=part.sha256,
    )
    with path.open("rb") as file:
        header.direct = store.usable
        offer = await stub.Offer(header, metadata=metadata, timeout=OFFER_SECONDS)
        if offer.url and await store.upload(offer.url, file, header.size, part.sha256, flow()):
            url, offer = offer.url, await stub.Offer(header, metadata=metadata, timeout=OFFER_SECONDS)
            store.saw(url, is_there=not offer.url)
        if not offer.wanted:
            return "store" if offer.stored else None
        header.offset = offer.offset
        file.seek(offer.offset)
        failures, way = list[OSError](), flow()
        try:
            async for reply in stub.Upload(_pieces(header, file, way, failures), metadata=metadata):
                way.arrived_there(reply.clock)
        except grpc.aio.AioRpcError as e:
            raise failures[0] if failures else e from None
        return "coordinator"


async def _pieces(
    header: pb.UploadHeader, file: BinaryIO, flow: Flow, failures: list[OSError]
) -> AsyncIterator[pb.UploadChunk]:
    """The header, then the file in pieces. A failed read ends the stream: gRPC takes an exception here for a cancelled
    call."""
    yield pb.UploadChunk(header=header)
    try:
        while block := await asyncio.to_thread(file.read, PIECE):
            while block:
                size = await flow.turn()
                piece, block = block[:size], block[size:]
                flow.sent(len(piece))
                yield pb.UploadChunk(data=piece)
    except OSError as e:
        failures.append(e)


async def upload_bytes(stub: rpc.PeeringStub, metadata: Metadata, header: pb.UploadHeader, content: bytes) -> None:
    header.size, header.sha256 = len(content), hashlib.sha256(content).hexdigest()

    async def pieces() -> AsyncIterator[pb.UploadChunk]:
        yield pb.UploadChunk(header=header)
        for start in range(0, len(content), PIECE):
            yield pb.UploadChunk(data=content[start : start + PIECE])

    async for _ in stub.Upload(pieces(), metadata=metadata):
        pass


async def fetch_part(
    stub: rpc.PeeringStub,
    metadata: Metadata,
    parts: PartStore,
    part: Part,
    flow: Callable[[], Flow],
    store: StoreAccess,
) -> None:
    """Fetch the part from the store or the coordinator, or what is missing of it.

    Raises ValueError where the coordinator does not have the part that belongs to the snapshot, or does not give it."""
    for way in (store, None):  # what was here of it may be what is damaged: then from the beginning, and from here
        if await _fetch_rest(stub, metadata, parts, part, flow, way):
            return
    raise ValueError(f"stage {part.stage}'s part is damaged")


async def _fetch_rest(
    stub: rpc.PeeringStub,
    metadata: Metadata,
    parts: PartStore,
    part: Part,
    flow: Callable[[], Flow],
    store: StoreAccess | None,
) -> bool:
    """Fetch what is missing of a part. Returns whether the part is whole then; if not, nothing is left of it."""
    work = parts.fetching(part)
    request = pb.FetchRequest(lineage=part.lineage, step=part.step, stage=part.stage)
    try:
        found = pb.Location()
        if store and store.usable:
            found = await stub.Locate(request, metadata=metadata, timeout=OFFER_SECONDS)
        if not (store and found.url and await store.fetch(found.url, work, flow())):
            await _fetch_pieces(stub, metadata, request, work, flow())
    except grpc.aio.AioRpcError as e:
        if e.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DATA_LOSS, *NOT_WANTED):
            raise ValueError(e.details()) from None
        raise
    try:
        if await asyncio.to_thread(hash_file, work) == part.sha256:
            await asyncio.to_thread(parts.put, work, part)
            return True
    except FileNotFoundError:
        return False  # we were told meanwhile that it is not needed
    work.unlink()
    return False


async def _fetch_pieces(
    stub: rpc.PeeringStub, metadata: Metadata, request: pb.FetchRequest, to: Path, flow: Flow
) -> None:
    """Add to a file what is missing, from the coordinator."""
    answered, unwritten = asyncio.Event(), bytearray()
    with to.open("ab") as file:
        request.offset = file.tell()
        call = stub.Fetch(_requests(request, flow, answered), metadata=metadata)
        try:
            async for piece in call:
                answered.set()
                asked = flow.arrived_here(piece.clock)
                unwritten += piece.data
                if len(piece.data) < asked:
                    break
                if len(unwritten) >= PIECE:
                    written, unwritten = unwritten, bytearray()
                    await asyncio.to_thread(file.write, written)
        finally:
            call.cancel()
            file.write(unwritten)


async def _requests(request: pb.FetchRequest, flow: Flow, answered: asyncio.Event) -> AsyncIterator[pb.FetchRequest]:
    """For one piece after another, until the call ends; the second once the first was answered: a call that is refused
    while more is written fails in gRPC with an error that says nothing."""
    while True:
        request.size = await flow.turn()
        flow.sent(request.size)
        yield request
        await answered.wait()
        request.offset += request.size
