"""Two peers for one script of coordinator messages: the simulated one in virtual time, and the real session over gRPC.

Each records what it answers in the same words: over its stream, in order (`said`), and beside it (`handed`: parts of
snapshots, and what becomes of the subspace). A script is written in the simulation's words; see test_conformance.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
from conftest import corpus_of
from simulated_peer import Process
from simulated_words import Assignment, Keep, NewBasis, PartFile, Turn
from simulated_world import World
from test_session import a_session
from waiting import until

from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator.feed import Feed
from protomodels_cli.coordinator.messages import decision_message, event_of, explanation, peer_of
from protomodels_cli.coordinator.peers import Peer
from protomodels_cli.model.basis import basis_to_bytes, initial_basis
from protomodels_cli.protocol.parts import Part
from protomodels_cli.spec import RunSpec
from protomodels_cli.spec.cut import layers_per_stage
from protomodels_cli.wire.parts import part_message
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc

Answer = tuple[Any, ...]


# What is said to both, beside the coordinator's words


@dataclass(frozen=True)
class Again:
    """The last word, with its number, a second time."""


@dataclass(frozen=True)
class Lost:
    """This word does not arrive; the next heartbeat tells that there was one."""

    word: Any


@dataclass(frozen=True)
class HangUp:
    """The stream ends, and nothing else."""


@dataclass(frozen=True)
class DiskFull:
    """From now on, or no longer."""

    full: bool


@dataclass(frozen=True)
class Rot:
    """All parts on the peer's disk are damaged."""


def introduced(peer: Peer) -> Answer:
    h = peer.holding
    holds = None if h is None else (h.lineage, h.stage, h.layers, h.applied, h.prepared, h.generation)
    return "register", holds, tuple(sorted((*p.snapshot, p.stage) for p in peer.parts))


def answer_of(event: ev.Event) -> Answer:
    match event:
        case ev.Done(_, generation, task):
            return "done", generation, task
        case ev.BasisTaken(_, generation, version):
            return "basis taken", generation, version
        case ev.SubspaceReported(_, generation, step, _, sha256):
            return "subspace", generation, step, sha256 is not None
        case ev.PartFailed(_, lineage, step, stage):
            return "part failed", lineage, step, stage
        case ev.SnapshotLost(_, generation, lineage, step):
            return "snapshot lost", generation, lineage, step
        case ev.Prefetched(_, part):
            return "fetched", *part.snapshot, part.stage
        case ev.Lacking(_, part):
            return "lacking", *part.snapshot, part.stage
        case ev.Ready(_, part):
            return "ready", *part.snapshot, part.stage
        case _:
            return (type(event).__name__,)


class SimulatedPeer(World):
    """The simulated peer, led by a script instead of a coordinator."""

    def __init__(self, spec: RunSpec):
        super().__init__(0, peers=1, calm=True)
        assert self.coordinator is not None
        self.coordinator.alive = False
        self._queue.clear()
        self.spec, self.bad_steps, self.coordinator = spec, frozenset(), self  # type: ignore[assignment]
        self.rules._decided[1] = spec.steps
        self.said: list[Answer] = []
        self.handed: list[Answer] = []
        self._number, self._last = 0, None
        home = self.machines[0]
        self.process = home.process = Process(self, home, "p")
        self.run_until(self.now + 10)

    @property
    def over(self) -> bool:
        return False

    def register(self, process: Process) -> None:
        process.session, process.expected, self._number = process.session + 1, 0, 0
        self.said.append(introduced(process.describe()))

    def to_coordinator(self, process: Process, event: ev.Event) -> None:
        beside = isinstance(event, ev.SubspaceReported)
        (self.handed if beside else self.said).append(answer_of(event))

    def hang_up(self, process: Process) -> None:
        process.redial()

    def take_part(self, process: Process, part: PartFile) -> bool:
        self.handed.append(("part", *part.key))
        self.disk.parts[part.key] = part
        return True

    def sha256_of(self, key: tuple[int, int, int]) -> str:
        return self.disk.parts[key].sha256

    def tell(self, word: Any) -> None:
        p = self.process
        match word:
            case Again():
                p.hear(p.session, self._number - 1, self._last)
            case Lost():
                p.hear(p.session, self._number + 1, None)
            case HangUp():
                self.hang_up(p)
            case DiskFull(full):
                self.machines[0].disk_full = full
            case Rot():
                disk = self.machines[0].disk
                disk.update({key: replace(part, spoilt=True) for key, part in disk.items()})
            case _:
                p.hear(p.session, self._number, with_hashes(word, self.sha256_of))
                self._number, self._last = self._number + 1, word
        self.run_until(self.now + 30)
        if not p.alive and ("ended",) not in self.said:
            self.said.append(("ended",))


def with_hashes(word: Any, sha256_of: Any) -> Any:
    """A script does not know what parts hash to: whoever has them does. What nobody has, has some hash."""

    def known(part: Part) -> Part:
        try:
            return replace(part, sha256=sha256_of((*part.snapshot, part.stage)))
        except KeyError:
            return replace(part, sha256="0" * 64)

    if isinstance(word, Assignment) and word.mark.parts:
        mark = word.mark
        return replace(word, mark=replace(mark, parts=tuple(known(p).sha256 for p in mark.as_parts())))
    if isinstance(word, ev.PrepareStage):
        return replace(word, part=known(word.part))
    if isinstance(word, Keep):
        return replace(word, newest=tuple(map(known, word.newest)))
    return word


class RealPeer(rpc.PeeringServicer):
    """The real session with the real engine; this is the coordinator's side of it."""

    def __init__(self, spec: RunSpec, folder: Path):
        self.spec, self.folder = spec, folder
        self.said: list[Answer] = []
        self.handed: list[Answer] = []
        self._parts: dict[tuple[int, int, int], tuple[str, bytes]] = {}
        self._feed = Feed(spec, corpus_of(spec))
        self._outbox: asyncio.Queue[pb.CoordinatorMessage | None] = asyncio.Queue()
        self._number, self._last = 0, pb.CoordinatorMessage()

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[asyncio.Task[int]]:
        """The session, as a task that ends with it."""
        server = grpc.aio.server()
        rpc.add_PeeringServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            session = a_session(self.folder, channel, self.spec)

            async def introduce() -> pb.Register:
                return pb.Register()

            running = asyncio.create_task(session.run(introduce))
            try:
                await until(lambda: self.said or running.done(), "it did not register")
                yield running
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                await server.stop(None)

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.CoordinatorMessage]:
        outbox = self._outbox = asyncio.Queue()
        self._number = 0
        listening = asyncio.create_task(self._listen(request_iterator, outbox))
        try:
            while (message := await outbox.get()) is not None:
                yield message
        finally:
            listening.cancel()

    async def _listen(self, messages: Any, outbox: asyncio.Queue[pb.CoordinatorMessage | None]) -> None:
        async for message in messages:
            if message.HasField("register"):
                self.said.append(introduced(peer_of("p", message.register, "", (), 0.0)))
            elif (event := event_of("p", message, self.spec)) is not None:
                self.said.append(answer_of(event))
        outbox.put_nowait(None)

    async def Offer(self, request: pb.UploadHeader, context: Any) -> pb.OfferReply:
        return pb.OfferReply(wanted=True)

    async def Upload(self, request_iterator: Any, context: Any) -> None:
        header, content = (await anext(aiter(request_iterator))).header, b""
        async for chunk in request_iterator:
            content += chunk.data
            await context.write(pb.UploadReply())
        assert hashlib.sha256(content).hexdigest() == header.sha256
        if header.kind == pb.UploadHeader.BASIS:
            answer: Answer = "subspace", header.generation, header.step, header.moved
        else:
            key = header.lineage, header.step, header.stage
            self._parts[key] = header.sha256, content
            answer = "part", *key
        context.add_done_callback(lambda _: self.handed.append(answer))  # only then may it be asked for again

    async def Fetch(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.Piece]:
        async for request in request_iterator:
            key = request.lineage, request.step, request.stage
            if key not in self._parts:
                await context.abort(grpc.StatusCode.NOT_FOUND, "no such part")
            yield pb.Piece(data=self._parts[key][1][request.offset :][: request.size])

    def sha256_of(self, key: tuple[int, int, int]) -> str:
        return self._parts[key][0]

    def tell(self, word: Any) -> None:
        match word:
            case Again():
                self._outbox.put_nowait(self._last)
            case Lost():
                self._number += 1
                self._outbox.put_nowait(pb.CoordinatorMessage(number=self._number, heartbeat=pb.Heartbeat()))
            case HangUp():
                self._outbox.put_nowait(None)
            case DiskFull(full):
                self._fill_disk(full)
            case Rot():
                for path in (self.folder / "parts").glob("*.safetensors"):
                    path.write_bytes(path.read_bytes()[:-9] + bytes(9))
            case _:
                for body in self._bodies(with_hashes(word, self.sha256_of)):
                    self._number += 1
                    self._last = pb.CoordinatorMessage(number=self._number, **body)
                    self._outbox.put_nowait(self._last)

    def _fill_disk(self, full: bool) -> None:
        """For the part that a peer writes after step 2: a folder is in the way of its file."""
        work = self.folder / "parts" / f"1-2-0.{os.getpid()}.partial"
        if full:
            work.mkdir()
        else:
            work.rmdir()

    def _bodies(self, word: Any) -> list[dict[str, Any]]:
        """As the coordinator says it: a task's ids go before it here, so that a word can be the last."""
        match word:
            case ev.MakeSpare() | ev.Wait() | ev.Dismiss():
                return [explanation(word)]
            case Keep(snapshots, begun, newest):
                names = [[pb.SnapshotName(lineage=a, step=s) for a, s in sorted(n)] for n in (snapshots - begun, begun)]
                keep = pb.Keep(complete=names[0], begun=names[1], newest=map(part_message, newest))
                return [{"keep": keep}]
            case NewBasis(_, version):
                return [{"basis": pb.NewBasis(basis=self._basis(version))}]
            case Assignment():
                return [{"assignment": self._assignment(word)}]
            case ev.PrepareStage(_, part):
                restore = pb.Restore(lineage=part.lineage, step=part.step, sha256=part.sha256)
                layers = layers_per_stage(self.spec)
                prepare = pb.Assignment(stage=part.stage, layers_per_stage=layers, step=part.step, restore=restore)
                return [{"prepare": prepare}]
            case Turn():
                return [*self._feeds(word), {"turn": self._turn(word)}]
        raise AssertionError(word)

    def _basis(self, version: int) -> pb.Basis:
        basis = replace(initial_basis(self.spec.model.width, self.spec.subspace.k, version), version=version)
        return pb.Basis(version=version, u=basis_to_bytes(basis), sha256=basis.sha256)

    def _assignment(self, word: Assignment) -> pb.Assignment:
        assignment = pb.Assignment(
            task=word.task,
            generation=word.generation,
            stage=word.stage,
            layers_per_stage=word.layers,
            lineage=word.lineage,
            step=word.step,
            reuse=word.reuse,
            owed=word.owed,
        )
        if word.reuse:
            if word.decision is not None:
                assignment.decision.CopyFrom(decision_message(word.decision))
        elif word.mark.parts:
            mark = word.mark
            assignment.restore.CopyFrom(pb.Restore(lineage=mark.lineage, step=mark.step, sha256=mark.parts[word.stage]))
        else:
            assignment.basis.CopyFrom(self._basis(0))
        return assignment

    def _feeds(self, word: Turn) -> list[dict[str, Any]]:
        _, kind, step = word.task or (0, "", 0)
        if kind not in ("step", "evaluation"):
            return []
        return [{"feed": feed} for feed in (self._feed.step if kind == "step" else self._feed.evaluation)(step)]

    def _turn(self, word: Turn) -> pb.Turn:
        turn = pb.Turn(generation=word.generation, save=word.save)
        if word.decision is not None:
            turn.decision.CopyFrom(decision_message(word.decision))
        turn.task, kind, step = word.task or (0, "", 0)
        version, microbatches = word.basis_version, self.spec.batch.microbatches
        match kind:
            case "link":
                turn.connect.SetInParent()
            case "step":
                turn.step.CopyFrom(pb.Step(step=step, microbatches=microbatches, basis_version=version))
            case "evaluation":
                microbatches = self._feed.evaluation_microbatches
                turn.evaluation.CopyFrom(pb.Evaluation(step=step, microbatches=microbatches, basis_version=version))
            case "sync":
                turn.sync.step = step
            case "finish":
                turn.finish.step = step
        return turn
