"""Uploads of peers: parts of snapshots, and new bases. Only what was asked for is taken, and counts once complete."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from io import BufferedWriter
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from protomodels_cli.coordinator import bad_requests, events, part_rights, reasons, refusals
from protomodels_cli.coordinator.bad_requests import BadRequest
from protomodels_cli.coordinator.history import Mark
from protomodels_cli.coordinator.run import Run
from protomodels_cli.coordinator.sentences import part_failure
from protomodels_cli.coordinator.snapshots import failures
from protomodels_cli.coordinator.snapshots.content import LONGEST_HEADER, ROOM_FOR_NAMES, unfit, unfit_by_header
from protomodels_cli.coordinator.snapshots.copies import Copies, OutOfReach, in_words
from protomodels_cli.coordinator.snapshots.direct import LARGEST, Direct
from protomodels_cli.coordinator.snapshots.manifest import folder_name, part_name, stored_name
from protomodels_cli.coordinator.snapshots.store import Snapshots, patiently
from protomodels_cli.coordinator.snapshots.upkeep import within
from protomodels_cli.coordinator.subspace import Subspace
from protomodels_cli.cost.memory import stage_memory
from protomodels_cli.files import hash_file
from protomodels_cli.observe.logs import SNAPSHOTS
from protomodels_cli.protocol import steps
from protomodels_cli.protocol.parts import Part
from protomodels_cli.spec.cut import spans
from protomodels_cli.wire.channels import PIECE
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

Chunks = AsyncIterator[pb.UploadChunk]
T = TypeVar("T")
AFAR_SECONDS = 60.0  # in which the store must answer the coordinator
MOST_OFFSET = 2**63 - 1  # at which a file can be read
_NO_STORE: tuple[Copies | None, Direct | None] = None, None


class Later(Exception):
    """The upload is needed, but not now: the peer retries."""


class Refused(Exception):
    """A part that cannot be its stage's: a retry does not help."""


class Damaged(Exception):
    """Hash mismatch: the bytes that arrived are not those announced."""


class Uploads:
    def __init__(
        self,
        run: Run,
        subspace: Subspace | None,
        snapshots: Snapshots,
        store: tuple[Copies, Direct | None] | None = None,  # and the peers' own way there
    ):
        self._run, self._subspace, self._snapshots = run, subspace, snapshots
        self._copies, self._direct = store or _NO_STORE
        self._basis_offered = (0, 0)  # generation and step of the last basis that was uploaded
        self._one_basis, self._one_look = asyncio.Lock(), asyncio.Lock()
        self._coming: set[Path] = set()

    def open_store(self) -> None:
        """See whether peers can use the store themselves."""
        if self._direct is not None:
            self._direct.try_out()

    # Parts of snapshots

    async def offered(self, peer: str, header: pb.UploadHeader) -> int | None:
        """The byte from which on this part is needed; None: not at all. Raises BadRequest, and Refused, with which the
        snapshot is given up."""
        history = self._run.state.history
        if not self._is_pending(header):
            return None
        stages = len(history.layers)
        if header.stage >= stages or not re.fullmatch(r"[0-9a-f]{64}", header.sha256):
            raise BadRequest(bad_requests.UnknownPart(header.stage))
        if history.holders[header.stage : header.stage + 1] != (peer,):
            raise BadRequest(bad_requests.NotHolder(header.stage))
        span = spans(history.layers)[header.stage]
        most = stage_memory(self._run.state.spec).saved(span.start, span.stop) + ROOM_FOR_NAMES
        if header.size > most:
            raise self._refused(peer, header, failures.TooLarge(header.size, most))
        which = header.lineage, header.step, header.stage, header.sha256
        have = await asyncio.to_thread(self._snapshots.needed_from, *which)
        return have if self._is_pending(header) else None

    async def offer(self, peer: str, header: pb.UploadHeader) -> pb.OfferReply:
        """Is this part needed, and how does it get here? One that its peer has put into the store is taken from there.
        Raises what `offered` raises, and Later."""
        have = await self.offered(peer, header)
        if have is None:
            return pb.OfferReply()
        if have or not header.direct or self._direct is None:
            return pb.OfferReply(wanted=True, offset=have)
        if header.size > LARGEST:
            SNAPSHOTS.warning("stage %d's part is too large for one PUT: it goes through here", header.stage)
            return pb.OfferReply(wanted=True)
        self._direct.try_out()
        snapshot = folder_name(header.lineage, header.step)
        if not await self._direct.usable() or not self._direct.may_put(peer, snapshot, header.stage, header.sha256):
            return pb.OfferReply(wanted=True)
        path = self._snapshots.partial(header.lineage, header.step, header.stage, header.sha256)
        if path in self._coming:
            raise Later("another upload of the part is under way; retry")
        self._coming.add(path)
        try:
            reply = await self._look_in_store(peer, header, self._direct)
            return await self._take_stored(header) if reply is None else reply
        finally:
            self._coming.discard(path)

    async def _look_in_store(self, peer: str, header: pb.UploadHeader, direct: Direct) -> pb.OfferReply | None:
        """None: it lies there. Raises Refused."""
        try:
            return await self._from_store(peer, header, direct)
        except Refused:
            raise
        except Exception as e:  # a store may raise anything
            direct.failed(e)
            return pb.OfferReply(wanted=True)

    async def _from_store(self, peer: str, header: pb.UploadHeader, direct: Direct) -> pb.OfferReply | None:
        """None: the part lies there, and is what it should be by its header: its name and the URL that put it there
        vouch for the other bytes. If not, that URL."""
        snapshot, name = folder_name(header.lineage, header.step), stored_name(header.stage, header.sha256)
        if await direct.size(snapshot, name) != header.size:
            return pb.OfferReply(wanted=True, url=await direct.upload_url(snapshot, name, header.size, header.sha256))
        beginning = await direct.beginning(snapshot, name, min(header.size, LONGEST_HEADER))
        state, mark = self._run.state, self._pending(header)
        if mark is None:  # given up meanwhile
            return pb.OfferReply()
        flaw = unfit_by_header(beginning, header.size, state.spec, state.history.layers, mark, header.stage)
        if flaw is not None:
            await direct.delete(snapshot, name)
            raise self._refused(peer, header, flaw)
        return None

    async def _take_stored(self, header: pb.UploadHeader) -> pb.OfferReply:
        """Raises Later, and OSError where our own disk fails."""
        try:
            await asyncio.to_thread(
                self._snapshots.arrived_in_store,
                header.lineage,
                header.step,
                header.stage,
                header.sha256,
                header.size,
            )
        except FileNotFoundError:
            raise Later(f"the snapshot at step {header.step} was given up or begun again; retry") from None
        SNAPSHOTS.info("stage %d's part of the snapshot at step %d is in the store", header.stage, header.step)
        await self.look(header.lineage, header.step)
        return pb.OfferReply(stored=True)

    def refusal(
        self, peer: str, request: pb.FetchRequest, audited: Collection[Part]
    ) -> refusals.NoSession | refusals.PartNotAssigned | None:
        """Why this peer may not fetch this part, or locate it."""
        return part_rights.refusal(self._run.state, peer, (request.lineage, request.step), request.stage, audited)

    async def locate(self, request: pb.FetchRequest) -> str:
        """Where a peer finds this part of a complete snapshot in the store; empty: here, or nowhere."""
        mark = self._complete(request)
        if mark is None or self._direct is None or self._copies is None or not await self._direct.usable():
            return ""
        snapshot, stage = folder_name(*mark.key), request.stage
        if await asyncio.to_thread(self._snapshots.is_in_store, mark, stage):
            name = stored_name(stage, mark.parts[stage])
        elif snapshot in self._copies.copied:
            name = part_name(stage)
        else:
            return ""
        try:
            return await self._direct.fetch_url(snapshot, name)
        except Exception as e:  # a store may raise anything
            self._direct.failed(e)
            return ""

    def _refused(self, peer: str, header: pb.UploadHeader, why: failures.TooLarge | failures.Unfit) -> Refused:
        self._run.submit(events.PartFailed(peer, header.lineage, header.step, header.stage, why))
        return Refused(part_failure(why))

    async def receive(self, peer: str, header: pb.UploadHeader, chunks: Chunks) -> None:
        """Returns once all of it is on our disk. Raises BadRequest, Refused, Damaged and Later; Later also where our
        own disk failed, which is not the peer's fault."""
        if header.kind == pb.UploadHeader.BASIS:
            await self._receive_basis(peer, header, chunks)
            return
        try:
            await self._receive_part(peer, header, chunks)
        except FileNotFoundError:
            raise Later(f"the snapshot at step {header.step} was given up or begun again; retry") from None
        except OSError as e:
            if self._is_pending(header) and header.step not in self._run.state.saving.whole:
                # First: the journal needs the room too.
                await asyncio.to_thread(self._snapshots.drop, header.lineage, header.step)
            why = failures.NotWritten(e.strerror or str(e))
            self._run.submit(events.PartFailed(None, header.lineage, header.step, header.stage, why))
            raise Later(f"the coordinator cannot write the part: {why.detail}") from None

    async def _receive_part(self, peer: str, header: pb.UploadHeader, chunks: Chunks) -> None:
        path = self._snapshots.partial(header.lineage, header.step, header.stage, header.sha256)
        if path in self._coming:
            raise Later("another upload of the part is under way; retry")
        self._coming.add(path)
        try:
            have = await self.offered(peer, header)
            if have is None:
                if await asyncio.to_thread(self._snapshots.has, header.lineage, header.step, header.stage):
                    return
                raise BadRequest(bad_requests.SnapshotGivenUp(header.step))
            if have != header.offset:
                raise Later(f"the coordinator has {have:,} bytes of the part; retry")
            arrived = await self._append(chunks, header, path)
            if arrived < header.size:
                raise Later(f"the upload broke off after {arrived:,} of {header.size:,} bytes; retry")
            await self._check(peer, header, path)
            await asyncio.to_thread(self._snapshots.arrived, path)
            SNAPSHOTS.info("stage %d's part of the snapshot at step %d arrived", header.stage, header.step)
        finally:
            self._coming.discard(path)
        await self.look(header.lineage, header.step)

    async def _check(self, peer: str, header: pb.UploadHeader, path: Path) -> None:
        """A part that is not what it should be is deleted. Raises Damaged and Refused."""
        if await asyncio.to_thread(hash_file, path) != header.sha256:
            await asyncio.to_thread(path.unlink)
            raise Damaged(f"the part of stage {header.stage} arrived damaged (hash mismatch)")
        if (flaw := await asyncio.to_thread(self._unfit, path, header)) is not None:
            await asyncio.to_thread(path.unlink)
            raise self._refused(peer, header, flaw)

    def _pending(self, header: pb.UploadHeader) -> Mark | None:
        """The snapshot that was begun and that this part is of."""
        marks = self._run.state.history.pending
        return next((m for m in marks if m.key == (header.lineage, header.step)), None)

    def _is_pending(self, header: pb.UploadHeader) -> bool:
        return self._pending(header) is not None

    def _unfit(self, path: Path, header: pb.UploadHeader) -> failures.Unfit | None:
        state, mark = self._run.state, self._pending(header)
        if mark is None:  # given up meanwhile
            return None
        return unfit(path, state.spec, state.history.layers, mark, header.stage)

    async def _append(self, chunks: Chunks, header: pb.UploadHeader, path: Path) -> int:
        """Returns the size of the file then. The bytes of an upload that broke off stay."""
        arrived, unwritten = header.offset, bytearray()
        file = await asyncio.to_thread(path.open, "ab")
        writing: asyncio.Future[int] | None = None
        try:
            async for chunk in chunks:
                arrived += len(chunk.data)
                if arrived > header.size:
                    raise BadRequest(bad_requests.TooManyBytes(header.size))
                if not self._is_pending(header):
                    raise BadRequest(bad_requests.SnapshotGivenUp(header.step))
                unwritten += chunk.data
                if len(unwritten) >= PIECE:  # chunks are small, and a thread for each would cost more than they do
                    written, unwritten = unwritten, bytearray()
                    writing = asyncio.ensure_future(asyncio.to_thread(file.write, written))
                    await asyncio.shield(writing)
        finally:
            if writing is not None:  # a peer that goes ends the wait for it, not the write
                await asyncio.wait([writing])
                writing.exception()  # looked at: a write that fails after its peer has gone is nobody's loss
            await asyncio.to_thread(_end, file, unwritten)
        return arrived

    async def look(self, lineage: int, step: int) -> None:
        """Which parts of this snapshot are here? One look at a time: the machine hears of them in order."""
        async with self._one_look:
            here = await asyncio.to_thread(self._snapshots.here, lineage, step)
            stages = len(self._run.state.history.layers)
            if len(here) == stages:
                self._run.submit(events.SnapshotWhole(lineage, step, tuple(here[i] for i in range(stages))))
            else:
                self._run.submit(events.PartsArrived(lineage, step, frozenset(here)))

    async def unfit(self, mark: Mark, stage: int) -> failures.Unfit | None:
        """What is wrong with a part of a complete snapshot, its numbers included. Raises OSError."""

        def look() -> failures.Unfit | None:
            state, part = self._run.state, self._snapshots.open_part(mark, stage)
            if part is None:
                raise FileNotFoundError
            with part:
                return unfit(part, state.spec, state.history.layers, mark, stage, numbers=True)

        return await patiently(look)

    async def read_part(self, first: pb.FetchRequest, others: AsyncIterator[pb.FetchRequest]) -> AsyncIterator[bytes]:
        """For each request a piece of a part of a complete snapshot; from the store, if it lies there alone. Raises
        BadRequest, FileNotFoundError where there is no such part, OSError where it cannot be read for a while, and
        OutOfReach where the store cannot."""
        request: pb.FetchRequest | None = first
        block, start = b"", 0  # what was read last: pieces are small, and asked for in order
        _check_offset(first)
        part, read = await self._opened(first)
        with part as file:
            while request is not None:
                _check_offset(request)
                size = min(request.size, PIECE)
                if not start <= request.offset <= start + len(block) - size:
                    block, start = await read(_read_at, file, request.offset), request.offset
                yield block[request.offset - start :][:size]
                request = await anext(others, None)

    async def _opened(self, request: pb.FetchRequest) -> tuple[BinaryIO, Callable[..., Awaitable[bytes]]]:
        """The part, and how it is read."""
        if (mark := self._complete(request)) is not None:
            if (part := await patiently(self._snapshots.open_part, mark, request.stage)) is not None:
                return part, patiently
            in_store = self._copies is not None and await asyncio.to_thread(
                self._snapshots.is_in_store, mark, request.stage
            )
            if self._copies is not None and in_store:
                name = stored_name(request.stage, mark.parts[request.stage])
                return await _from_afar(self._copies.open, folder_name(*mark.key), name), _from_afar
        what = f"the coordinator has no part of stage {request.stage} of a snapshot at step {request.step}"
        raise FileNotFoundError(what)

    def _complete(self, request: pb.FetchRequest) -> Mark | None:
        """The complete snapshot that this part is of."""
        marks = [m for m in self._run.state.history.snapshots if m.key == (request.lineage, request.step)]
        return next((m for m in marks if request.stage < len(m.parts)), None)

    # Bases

    async def _receive_basis(self, peer: str, header: pb.UploadHeader, chunks: Chunks) -> None:
        self._admit_basis(peer, header)
        content = await bytes_of(chunks, header)
        async with self._one_basis:  # at a time: of two with one version the later one counts
            await self._take_basis(peer, header, content)

    async def _take_basis(self, peer: str, header: pb.UploadHeader, content: bytes) -> None:
        self._admit_basis(peer, header)  # it may have taken a while
        assert self._subspace is not None
        row, sha256 = _numbers(header.row_json), None
        if header.moved:
            try:
                version = self._run.state.history.basis_version + 1
                sha256 = await self._subspace.accept(version, content)
            except OSError as e:
                self._run.fail(e)
                raise Later(f"the coordinator cannot write the basis: {e.strerror or e}") from None
            except ValueError as e:
                self._run.submit(events.Trouble(peer, reasons.InvalidBasis(str(e))))
                raise BadRequest(bad_requests.InvalidBasis(str(e))) from None
        self._basis_offered = header.generation, header.step
        self._run.submit(events.SubspaceReported(peer, header.generation, header.step, row, sha256))

    def _admit_basis(self, peer: str, header: pb.UploadHeader) -> None:
        state = self._run.state
        stage = state.stage_of(peer)
        if stage is None or header.generation != state.history.generation:
            raise BadRequest(bad_requests.NotHolder(None))
        asked = stage == state.stages - 1 and state.owed == header.step
        if self._subspace is None or not asked or self._basis_offered == (header.generation, header.step):
            raise BadRequest(bad_requests.BasisNotRequested(header.step))
        right = self._subspace.basis_bytes if header.moved else 0
        if header.size != right:
            raise BadRequest(bad_requests.BasisSize(header.size, right))


def _numbers(row_json: str) -> dict[str, float]:
    """The metrics of a basis: known names with numbers, whatever else a peer sends."""
    try:
        row = json.loads(row_json[:10_000] or "{}")
        return {name: float(row[name]) for name in steps.REPORTED if name in row}
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise BadRequest(bad_requests.InvalidMetrics()) from None


async def bytes_of(chunks: Chunks, header: pb.UploadHeader) -> bytes:
    content = bytearray()
    async for chunk in chunks:
        content += chunk.data
        if len(content) > header.size:
            raise BadRequest(bad_requests.TooManyBytes(header.size))
    found = await asyncio.to_thread(hashlib.sha256, content)
    if (len(content), found.hexdigest()) != (header.size, header.sha256):
        raise BadRequest(bad_requests.OtherBytes())
    return bytes(content)


async def _from_afar(work: Callable[..., T], *arguments: Any) -> T:
    """In a thread that may hang. One try: who asked retries. Raises FileNotFoundError where it is not there."""
    try:
        return await within(AFAR_SECONDS, work, *arguments)
    except FileNotFoundError:
        raise
    except Exception as e:
        raise OutOfReach(in_words(e)) from None


def _check_offset(request: pb.FetchRequest) -> None:
    if request.offset > MOST_OFFSET:
        raise BadRequest(bad_requests.InvalidOffset(request.offset))


def _read_at(file: BinaryIO, offset: int) -> bytes:
    file.seek(offset)
    return file.read(PIECE)


def _end(file: BufferedWriter, last: bytearray) -> None:
    """All of it is on disk then."""
    with file:
        file.write(last)
        file.flush()
        os.fsync(file.fileno())
