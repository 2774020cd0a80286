"""A peer's part in audits: shows what it recorded, and as a spare recomputes what another stage sent.

The stage is built from its part of the snapshot before the step, by the engine's thread and only while no stage is in
memory; what should have been sent is made by the code that trains. It must not judge: the coordinator does.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
from torch import Tensor

from protomodels_cli.codecs import End
from protomodels_cli.codecs.base import Slot
from protomodels_cli.errors import first_line
from protomodels_cli.model.shape import Slice
from protomodels_cli.model.stage import Layout
from protomodels_cli.observe.logs import WIRE
from protomodels_cli.protocol.audit import Compared
from protomodels_cli.protocol.messages import Leg
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.channels import PIECE
from protomodels_cli.wire.client import Metadata, why_failed
from protomodels_cli.wire.frames import LEG_NUMBERS, Message
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.worker.building import Building, part_to_build
from protomodels_cli.worker.comparing import compare
from protomodels_cli.worker.generation import Generation
from protomodels_cli.worker.recording import Recording
from protomodels_cli.worker.snapshots.exchange import SnapshotExchange
from protomodels_cli.worker.snapshots.loading import load_part
from protomodels_cli.worker.snapshots.transfer import upload_bytes
from protomodels_cli.worker.stage_work import StageWork
from protomodels_cli.worker.transfers import Payload, Transfers

AUDIT_SECONDS = 900.0  # in which the engine must have done it: it may be told something else meanwhile


class Auditing:
    def __init__(
        self,
        stub: rpc.PeeringStub,
        metadata: Metadata,
        building: Building,
        snapshots: SnapshotExchange,
        send: Callable[..., None],
        folder: Path,
    ):
        """`folder`: of this peer's."""
        self._stub, self._metadata = stub, metadata
        self._building, self._snapshots, self._send, self._folder = building, snapshots, send, folder / "frames"

    def recording(self, spec: RunSpec, generation: int) -> Recording | None:
        return Recording(self._folder / str(generation)) if spec.audit else None

    async def obey(self, message: pb.CoordinatorMessage, generation: Generation | None) -> None:
        if message.HasField("show"):
            await self._show(generation, message.show)
        else:
            await self._audit(message.audit)

    async def _show(self, generation: Generation | None, asked: pb.Show) -> None:
        """Upload what was recorded, or say that it is not there any more."""
        recording = None if generation is None or generation.number != asked.generation else generation.recording
        content = None
        if generation is not None and recording is not None:
            to_next = asked.boundary == generation.stage
            content = await asyncio.to_thread(recording.show, asked.step, asked.microbatch, to_next)
        if content is None:
            self._send(verdict=pb.Verdict(audit=asked.audit, failed="nothing recorded"))
            return
        header = pb.UploadHeader(kind=pb.UploadHeader.FRAMES, audit=asked.audit, generation=asked.generation)
        header.step = asked.step
        try:
            await upload_bytes(self._stub, self._metadata, header, content)
        except grpc.aio.AioRpcError as e:
            WIRE.info("recorded messages of step %d were not uploaded: %s", asked.step, why_failed(e))

    async def _audit(self, asked: pb.Audit) -> None:
        verdict = pb.Verdict(audit=asked.audit)
        try:
            async with asyncio.timeout(AUDIT_SECONDS):
                for found in await self._found(asked):
                    verdict.compared.add(leg=LEG_NUMBERS[found.leg], numbers=found.numbers, wild=found.wild)
        except Exception as e:  # whatever it was, only the audit fails
            verdict.failed = first_line(e) or type(e).__name__
        self._send(verdict=verdict)

    async def _found(self, asked: pb.Audit) -> list[Compared]:
        content = await self._fetch(asked)
        part = part_to_build(asked.stage)
        await self._snapshots.find(part)
        spec, layers = self._building.cut(asked.stage)
        layout, path = self._building.layout(spec, layers), self._snapshots.parts.path(part)
        frames = pb.Audited.FromString(content)
        result = self._building.compute(lambda: recomputed(asked, frames, spec, layers, layout, path))
        if found := await asyncio.wrap_future(result):
            return found
        raise RuntimeError("the auditor has a stage of its own by now")

    async def _fetch(self, asked: pb.Audit) -> bytes:
        content, sizes = bytearray(), range(0, max(1, asked.size), PIECE)

        async def requests() -> AsyncIterator[pb.FetchRequest]:
            for offset in sizes:
                yield pb.FetchRequest(audit=asked.audit, offset=offset, size=PIECE)

        async for piece in self._stub.Fetch(requests(), metadata=self._metadata):
            content += piece.data
        if hashlib.sha256(content).hexdigest() != asked.sha256:
            raise ValueError("the frames arrived damaged (hash mismatch)")
        return bytes(content)


class Seen(Transfers):
    """Keeps what is to be sent, as it is before it is encoded, and the end as it was then."""

    sent: dict[Leg, tuple[End, Slot, Tensor]]

    def send(self, end: End, message: Tensor, slot: Slot) -> Callable[[], Payload | None]:
        self.sent[slot.key.leg] = end.twin(), slot, message
        return super().send(end, message, slot)


def recomputed(
    asked: pb.Audit, frames: pb.Audited, spec: RunSpec, layers: Slice, layout: Layout, path: Path
) -> list[Compared]:
    """What the stage should have sent, beside what it sent: a comparison for each neighbour."""
    restored = asked.stage.restore
    saved = load_part(path, spec, layers.layers, restored.step)
    work = StageWork(spec, layers, None, layout, saved, restored.step)
    seen = work.transfers = Seen(work.device)
    seen.sent = {}
    step, microbatch = asked.step, asked.microbatch
    run = work.begin("forward", step, spec.batch.microbatches)
    if layers.is_first:
        coming = Message("forward", step, microbatch, 0, frames.ids, b"")
    else:
        coming = _message("forward", step, microbatch, frames.before.forward)
    work.forward(run, coming)
    if not layers.is_last:
        work.backward(run, _message("backward", step, microbatch, frames.behind.backward))
    went: dict[Leg, tuple[bool, pb.Carried]]
    went = {"forward": (layers.is_last, frames.behind.forward), "backward": (layers.is_first, frames.before.backward)}
    found = []
    for leg, (is_none, carried) in went.items():
        if not is_none:
            end, slot, right = seen.sent[leg]
            said = None if carried.poison else carried.payload
            one = compare(end, slot, right, said, asked.noise)
            changed = leg == "forward" and carried.ids != coming.ids
            found.append(Compared(leg, one.numbers, one.numbers if changed else one.wild))
    return found


def _message(leg: Leg, step: int, microbatch: int, carried: pb.Carried) -> Message:
    payload = None if carried.poison else carried.payload
    return Message(leg, step, microbatch, carried.basis_version, carried.ids, payload)
