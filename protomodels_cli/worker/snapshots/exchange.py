"""What a peer does about snapshots: saves its stage, uploads the part, fetches one back, prefetches as a spare.

All of it beside the steps. It must not know the engine or the links; which snapshots count is the coordinator's to say.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from torch import Tensor

from protomodels_cli import timeouts
from protomodels_cli.cost.saving import SLOW_LINE, least_rate
from protomodels_cli.protocol.parts import Part
from protomodels_cli.protocol.possession import proof
from protomodels_cli.retry import Backoff, retry
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.cap import Cap
from protomodels_cli.wire.client import Metadata
from protomodels_cli.wire.parts import REFUSED, part_message, part_of
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.wire.store import StoreBroken
from protomodels_cli.wire.troubles import PartNotWritten
from protomodels_cli.worker import notices
from protomodels_cli.worker.snapshots import transfer
from protomodels_cli.worker.snapshots.direct import StoreAccess
from protomodels_cli.worker.snapshots.flow import Flow, Throttle
from protomodels_cli.worker.snapshots.pacing import Activations, Pace
from protomodels_cli.worker.snapshots.part_store import PartStore
from protomodels_cli.worker.telling import PeerError, Tell

BROKEN = grpc.aio.AioRpcError, StoreBroken

Chore = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class SnapshotExchange:
    """Knows this peer's parts and the coordinator's wishes. It must not know what is in a part, nor decide which
    snapshots are kept."""

    def __init__(
        self,
        spec: RunSpec,
        folder: Path,
        stub: rpc.PeeringStub,
        metadata: Metadata,
        chore: Chore,
        send: Callable[..., None],
        tell: Tell,
        activations: Activations,
        cap: Cap | None = None,
    ):
        self._spec, self._stub, self._metadata, self._activations = spec, stub, metadata, activations
        self._upload_cap = math.inf if cap is None or cap.upload is None else cap.upload
        self._chore, self._send, self._tell = chore, send, tell  # to the coordinator, and to whoever looks on
        self.parts = PartStore(folder)
        self._throttle, self._store = (
            Throttle(spec.snapshots.bits_per_second),
            StoreAccess(spec.snapshots.is_direct, tell, cap),
        )
        self._saving: set[tuple[int, int, int]] = set()  # lineage, step and stage of what is being written
        self._to_upload: dict[Part, None] = {}  # in order
        self._uploading: asyncio.Task[None] | None = None
        self._failed: dict[tuple[int, int], pb.PartFailed] = {}  # by lineage and step
        self._lacking: set[Part] = set()  # damaged here, and not fetched yet
        self._is_spare = False
        self._newest: list[Part] = []  # all parts of the newest complete snapshot
        self._prefetching: asyncio.Task[None] | None = None

    async def keep(self, keep: pb.Keep) -> None:
        """Delete the parts of all other snapshots, and upload those of snapshots that were begun."""
        await self._stop_prefetching()
        begun = {(name.lineage, name.step) for name in keep.begun}
        try:
            self.parts.keep(begun | {(name.lineage, name.step) for name in keep.complete})
        except OSError as e:  # only the space is not freed
            self._tell(notices.PartsNotDeleted(str(self.parts.folder), e.strerror or str(e)))
        for part in self.parts.all():
            if part.snapshot in begun:
                self._upload(part)
        self._failed = {snapshot: failed for snapshot, failed in self._failed.items() if snapshot in begun}
        for failed in self._failed.values():  # it is still waited for: nobody heard us
            self._send(part_failed=failed)
        self._newest = [part_of(message) for message in keep.newest]
        self._prefetch()

    # To the coordinator

    async def save(self, lineage: int, step: int, stage: int, state: dict[str, Tensor]) -> None:
        """Write the stage's part to this peer's disk and upload it from there, while the next step is computed."""
        name = lineage, step, stage
        if name in self._saving:
            return  # asked twice
        if here := [p for p in self.parts.all() if (*p.snapshot, p.stage) == name]:
            self._upload(here[0])  # asked again: it may not have arrived
            return
        self._saving.add(name)
        self._failed.pop((lineage, step), None)
        try:
            part = await asyncio.to_thread(self.parts.write, *name, state)
        except OSError as e:
            self._tell_failure(*name, e.strerror or str(e))
            return
        finally:
            self._saving.discard(name)
        self._upload(part)

    def _upload(self, part: Part) -> None:
        self._to_upload[part] = None
        if self._uploading is None or self._uploading.done():
            self._uploading = self._chore(self._upload_all())

    async def _upload_all(self) -> None:
        while self._to_upload:
            part = next(iter(self._to_upload))
            work, log = partial(self._upload_one, part), transfer.logging_why(f"the upload of {_named(part)}")
            await retry(work, Backoff(timeouts.PART_RETRY), BROKEN, log)
            self._to_upload.pop(part, None)

    async def _upload_one(self, part: Part) -> None:
        """Upload a part, or give it up. Raises BROKEN where a retry may help."""
        try:
            least = least_rate(self._spec, self.parts.path(part).stat().st_size, self._upload_cap)

            def flow() -> Flow:
                return Flow(Pace(least), self._activations.leaving, self._throttle)

            if at := await transfer.upload_part(self._stub, self._metadata, self.parts, part, flow, self._store):
                self._tell(notices.PartUploaded(part.step, part.stage, to_store=at == "store"))
        except FileNotFoundError:
            pass  # we were told that it is not needed
        except OSError as e:
            self._give_up(part, e.strerror or str(e))
        except grpc.aio.AioRpcError as e:
            if e.code() in transfer.NOT_WANTED:
                return  # not any more
            if e.code() == REFUSED:
                self.parts.remove(part)
                self._tell(notices.PartRefused(part.step, part.stage, e.details() or ""))
            elif e.code() == grpc.StatusCode.DATA_LOSS and not await asyncio.to_thread(self.parts.is_whole, part):
                self._give_up(part, "damaged on the peer's disk (hash mismatch)")
            else:
                raise

    def _give_up(self, part: Part, why: str) -> None:
        self.parts.remove(part)
        self._tell_failure(part.lineage, part.step, part.stage, why)

    def _tell_failure(self, lineage: int, step: int, stage: int, why: str) -> None:
        failed = pb.PartFailed(lineage=lineage, step=step, stage=stage, why=why)
        self._failed[lineage, step] = failed
        self._send(part_failed=failed)
        self._tell(notices.PartFailed(step, stage, why))

    # From the coordinator

    async def find(self, part: Part) -> bool:
        """Have the part on this disk: whether it had to be fetched. Raises ValueError where the coordinator does not
        have it whole."""
        work, log = partial(self._fetch, part, urgent=True), transfer.logging_why(f"the fetch of {_named(part)}")
        try:
            # Without end: this generation will be over soon, if the coordinator is gone.
            return await retry(work, Backoff(timeouts.PART_RETRY_URGENT), BROKEN, log)
        except OSError as e:
            self.parts.remove(part)
            raise PeerError(PartNotWritten(f"{self.parts.folder}: {e.strerror or e}")) from None

    async def _fetch(self, part: Part, urgent: bool) -> bool:
        if await asyncio.to_thread(self.parts.is_whole, part):
            return False
        if part in self.parts.all() and part not in self._lacking:
            self._lacks(part)

        def flow() -> Flow:
            throttle = Throttle(None) if urgent else self._throttle
            return Flow(Pace(SLOW_LINE / 8, urgent), self._activations.awaited, throttle)

        await transfer.fetch_part(self._stub, self._metadata, self.parts, part, flow, self._store)
        self._lacking.discard(part)
        return True

    def _lacks(self, part: Part) -> None:
        """It is damaged here. The coordinator takes it to be there: whoever has a part is asked first."""
        self._lacking.add(part)
        self.parts.remove(part)
        self._send(lacking=part_message(part))

    async def prove(self, asked: pb.Prove) -> None:
        """That a part is here, without reading all of it."""
        part = part_of(asked.part)

        def read() -> str:
            with self.parts.path(part).open("rb") as file:
                return proof(file, asked.nonce)

        try:
            self._send(proof=pb.Proof(part=asked.part, nonce=asked.nonce, sha256=await asyncio.to_thread(read)))
        except OSError:
            self._send(lacking=asked.part)

    async def be_spare(self, is_spare: bool) -> None:
        """Prefetch while this peer is a spare: whoever holds a stage does not have the time."""
        self._is_spare = is_spare
        if not is_spare:
            await self._stop_prefetching()
        elif self._prefetching is None or self._prefetching.done():
            self._prefetch()

    async def _stop_prefetching(self) -> None:
        if self._prefetching is not None:
            self._prefetching.cancel()
            await asyncio.wait([self._prefetching])

    def _prefetch(self) -> None:
        """Each spare begins with another stage: together they soon have them all."""
        if self._spec.snapshots.warm_spares and self._is_spare and self._newest:
            first = zlib.crc32(repr(self._metadata[:1]).encode()) % len(self._newest)
            wanted = self._newest[first:] + self._newest[:first]
            self._prefetching = self._chore(self._fetch_ahead(wanted))

    async def _fetch_ahead(self, wanted: list[Part]) -> None:
        here, fetched = set(self.parts.all()), 0
        for part in [p for p in wanted if p not in here]:
            work = partial(self._fetch, part, urgent=False)
            log = transfer.logging_why(f"the prefetch of {_named(part)}")
            try:
                await retry(work, Backoff(timeouts.PART_RETRY), BROKEN, log)
            except ValueError:
                return  # the coordinator does not have it any more: another snapshot took its place
            except OSError as e:
                self.parts.remove(part)
                self._tell(notices.PrefetchFailed(part.step, e.strerror or str(e)))
                return
            fetched += 1
            self._send(prefetched=part_message(part))
        if fetched:
            self._tell(notices.Prefetched(wanted[0].step))


def _named(part: Part) -> str:
    return f"stage {part.stage}'s part of the snapshot at step {part.step}"
