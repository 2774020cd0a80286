"""A peer's session: does what the coordinator says, and says what came of it.

The event loop's side of a worker. Orders go to the engine, messages to the links; what the engine posts comes back
here and leaves on the right stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import torch

from protomodels_cli.errors import EXIT_INTERRUPTED, UserError
from protomodels_cli.model.basis import Basis, basis_from_bytes, basis_to_bytes
from protomodels_cli.model.shape import Shape, slices
from protomodels_cli.model.stage import Leg
from protomodels_cli.observe.usage import peak_memory
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.spec.sizes import in_flight_limit
from protomodels_cli.wire.emulated import Connection
from protomodels_cli.wire.frames import BadMessage, Message
from protomodels_cli.wire.operator import in_words
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.wire.relay import RelayedAcceptor, RelayedDialler
from protomodels_cli.wire.tls import Identity
from protomodels_cli.worker import engine as eng
from protomodels_cli.worker.links import Link, Listener, dial

PIECE = 1 << 20
GRACE = 10.0  # seconds for the coordinator to explain why a neighbour hung up


class Session:
    def __init__(
        self,
        spec: RunSpec,
        device: torch.device,
        identity: Identity,
        listener: Listener,
        stub: rpc.PeeringStub,
        metadata: tuple[tuple[str, str], ...],
        door: tuple[str, int],
        folder: Path,
        say: Callable[[str], None],
    ):
        self.spec, self.identity, self.listener, self.stub, self.metadata = spec, identity, listener, stub, metadata
        self.door, self.folder, self.say = door, folder, say
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[pb.PeerMessage] = asyncio.Queue()
        self._over: asyncio.Future[int] = self._loop.create_future()
        self._engine = eng.Engine(device, spec.compute.threads, self._post)
        self._place: pb.Place | None = None
        self._links: dict[str, Link] = {}  # previous, next
        self._connection = Connection(spec.wire.link) if spec.wire.link.emulated else None
        self._relays: list[RelayedAcceptor | RelayedDialler] = []
        self._streams: set[asyncio.Task[Any]] = set()  # of this generation
        self._chores: set[asyncio.Task[Any]] = set()
        self._one_upload = asyncio.Lock()
        self._saving = 0  # the step of the last snapshot asked for
        self._counted: dict[str, int] = {}
        self._cpu_before: float | None = None
        self._interrupts = 0
        self._shown = 0.0

    async def run(self, register: pb.Register) -> int:
        """Take part until the coordinator dismisses us. Returns the exit code."""
        if self._connection is not None:
            self.say(f"the run emulates a slow connection for every peer (wire.link): {self.spec.wire.link.in_words}")
        self._engine.start()
        self._listen_for_ctrl_c()
        self._say_to_coordinator(register=register)
        control = asyncio.create_task(self._serve_control())
        ends: set[asyncio.Future[Any]] = {control, self._over}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not self._over.done():
                await control  # raises what ended it
            return self._over.result()
        finally:
            control.cancel()
            await self._drop_generation()
            self._engine.order(None)
            for chore in self._chores:
                chore.cancel()
            await asyncio.to_thread(self._engine.join, 10)

    # The coordinator's stream

    async def _serve_control(self) -> None:
        call = self.stub.Session(self._outgoing(), metadata=self.metadata)
        try:
            async for message in call:
                await self._obey(message)
        except grpc.aio.AioRpcError as e:
            if not self._over.done():
                raise in_words(e) from None
        if not self._over.done():
            raise UserError("the coordinator closed the session without a word", "join again")

    async def _outgoing(self) -> AsyncIterator[pb.PeerMessage]:
        while True:
            yield await self._outbox.get()

    def _say_to_coordinator(self, **body: Any) -> None:
        self._outbox.put_nowait(pb.PeerMessage(**body))

    async def _obey(self, message: pb.CoordinatorMessage) -> None:
        match message.WhichOneof("body"):
            case "spare":
                if self._place is not None:
                    await self._drop_generation()
                    self._engine.order(eng.Drop())
                self.say(f"waiting: {message.spare.why}")
            case "place":
                await self._take_place(message.place)
            case "turn":
                self._take_turn(message.turn)
            case "feed":
                feed = message.feed
                leg: Leg = "evaluation" if feed.evaluation else "forward"
                self._engine.deliver(Message(leg, feed.step, feed.microbatch, 0, feed.ids, b""))
            case "basis":
                basis = self._basis(message.basis.basis)
                self._engine.order(eng.HoldBasis(basis))
                self._say_to_coordinator(basis_taken=pb.BasisTaken(version=basis.version, sha256=basis.sha256))
            case "dismissal":
                self._leave(message.dismissal)

    def _leave(self, dismissal: pb.Dismissal) -> None:
        if self._over.done():
            return
        if dismissal.exit_code:
            print(f"{dismissal.why}\n    fix:  {dismissal.fix}", file=sys.stderr, flush=True)
        else:
            self.say(dismissal.why)
        self._over.set_result(EXIT_INTERRUPTED if self._interrupts else dismissal.exit_code)

    # A stage

    async def _take_place(self, place: pb.Place) -> None:
        await self._drop_generation(place.generation)
        self._place = place
        spec = self.spec.model_copy(update={"stages": list(place.layers_per_stage)})
        part = slices(spec)[place.stage]
        stages = len(place.layers_per_stage)
        limit = in_flight_limit(spec, stages - 1 - place.stage)
        basis = self._basis(place.basis) if place.HasField("basis") else None
        for side, boundary in (("previous", place.stage - 1), ("next", place.stage)):
            if place.HasField(side):
                self._prepare_link(side, boundary, getattr(place, side), stages)
        self.say(
            f"generation {place.generation}: stage {place.stage} of {stages}, "
            f"layers {part.first_layer}–{part.end_layer - 1}"
            + (" with the embedding" if part.is_first else "")
            + (" with the head" if part.is_last else "")
        )
        self._engine.order(eng.Build(place.task, place.generation, spec, part, basis, limit))

    def _prepare_link(self, side: str, boundary: int, route: pb.Route, stages: int) -> None:
        assert self._place is not None
        tokens = (self.spec.batch.size // self.spec.batch.microbatches) * (self.spec.model.context + 1)
        link = Link(
            generation=self._place.generation,
            boundary=boundary,
            neighbour=route.peer,
            to_next=side == "next",
            window=in_flight_limit(self.spec, stages - 1 - boundary),
            most_bytes=1024 + tokens * (8 * self.spec.boundary_width + 8),
            deliver=self._engine.deliver,
            has_sent=self._engine.has_sent,
            credited=self._engine.next_has_taken if side == "next" else lambda messages: None,
            connection=self._connection,
        )
        self._links[side] = link
        self.listener.expect(link)
        if route.way == pb.Route.RELAY_LISTEN:
            acceptor = RelayedAcceptor(self.door, route.ticket, ("127.0.0.1", self.listener.port))
            acceptor.start()
            self._relays.append(acceptor)

    async def _drop_generation(self, following: int = 0) -> None:
        """Nothing of this generation goes in or out any more."""
        self._place = None
        self._engine.forget(following)
        self.listener.forget()
        for link in self._links.values():
            link.close()
        for task in self._streams:
            task.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)
        self._streams.clear()
        for relay in self._relays:
            await relay.close()
        self._relays.clear()
        self._links.clear()
        self._counted.clear()

    async def _connect(self, task: int) -> None:
        assert self._place is not None
        links = dict(self._links)
        for side, link in links.items():
            route: pb.Route = getattr(self._place, side)
            if route.way in (pb.Route.DIAL, pb.Route.RELAY_DIAL):
                self._start_stream(link, self._dial(link, route))
            else:
                self._start_stream(link, self._wait_for_end(link))
        for link in links.values():
            await link.open.wait()
        self._say_to_coordinator(done=pb.Done(task=task))

    async def _dial(self, link: Link, route: pb.Route) -> None:
        host, port = route.host, route.port
        if route.way == pb.Route.RELAY_DIAL:
            dialler = RelayedDialler(self.door, route.ticket)
            self._relays.append(dialler)
            host, port = "127.0.0.1", await dialler.open()
        await dial(link, host, port, self.identity)

    async def _wait_for_end(self, link: Link) -> None:
        await link.closed.wait()
        if link.error is not None:
            raise link.error

    def _start_stream(self, link: Link, serving: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(serving)
        self._streams.add(task)
        task.add_done_callback(lambda t: self._stream_ended(link, t))

    def _stream_ended(self, link: Link, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self._over.done():
            return
        error = task.exception()
        if isinstance(error, BadMessage):
            self._trouble(f"stage {link.neighbour_stage} sent a message that cannot be: {error}", link.neighbour_stage)
        else:
            self._chore(self._complain_unless_explained(link))

    async def _complain_unless_explained(self, link: Link) -> None:
        """A neighbour hung up. It may have been sent away, and we with it: the coordinator will say."""
        await asyncio.sleep(GRACE)
        if link in self._links.values():
            self._trouble(f"the stream to stage {link.neighbour_stage} broke", link.neighbour_stage)

    # Turns

    def _take_turn(self, turn: pb.Turn) -> None:
        if self._place is None or turn.generation != self._place.generation:
            return
        if turn.HasField("decision"):
            d = turn.decision
            self._engine.order(eng.Decide(d.step, d.apply, d.lr, d.clip))
            self._show_step(d)
        match turn.WhichOneof("next"):
            case "connect":
                connecting = self._chore(self._connect(turn.task))
                self._streams.add(connecting)  # ends with its generation
            case "step":
                if self._cpu_before is None:
                    self._cpu_before = time.process_time()
                s = turn.step
                self._engine.order(eng.Run(turn.task, "forward", s.step, s.microbatches, s.basis_version))
            case "evaluation":
                e = turn.evaluation
                self._engine.order(eng.Run(turn.task, "evaluation", e.step, e.microbatches, e.basis_version))
            case "sync":
                basis = self._basis(turn.sync.basis) if turn.sync.HasField("basis") else None
                self._engine.order(eng.ReportSync(turn.task, basis))
            case "save":
                self._saving = turn.save.step
                path = self.folder / f"stage-{self._place.stage}.safetensors"
                self._engine.order(eng.WriteState(turn.task, path))
            case "finish":
                self._engine.order(eng.HashWeights(turn.task))

    def _show_step(self, decision: pb.Decision) -> None:
        now = time.monotonic()
        if now - self._shown > 5 or decision.step == self.spec.steps:
            self._shown = now
            outcome = "" if decision.apply else " (skipped: not finite)"
            self.say(f"step {decision.step}/{self.spec.steps} | loss {decision.loss:.4f}{outcome}")

    # What the engine posts

    def _post(self, generation: int, item: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._receive, generation, item)

    def _receive(self, generation: int, item: Any) -> None:
        if self._place is None or generation != self._place.generation or self._over.done():
            return  # of a stage that we do not hold any more
        match item:
            case Message():
                self._links["previous" if item.leg == "backward" else "next"].send(item)
            case eng.Taken(leg):
                side = "next" if leg == "backward" else "previous"
                if side in self._links:  # token ids come without a link
                    self._links[side].take()
            case eng.Outcome(written=path) if path is not None:
                self._chore(self._hand_in(item, path))
            case eng.Outcome():
                self._say_to_coordinator(done=self._done(item))
            case eng.SubspaceReport():
                self._chore(self._report_subspace(item))
            case eng.Failure(error):
                self._fail(error)

    def _done(self, outcome: eng.Outcome) -> pb.Done:
        sync, used = outcome.sync, outcome.usage
        return pb.Done(
            task=outcome.task,
            t_fixed_sha256=sync.t_fixed_sha256 if sync else "",
            t_fixed_version=sync.t_fixed_version if sync else 0,
            basis_sha256=sync.basis_sha256 if sync else "",
            basis_version=sync.basis_version if sync else 0,
            norms=[pb.UnitNorm(unit=unit, squared=squared) for unit, squared in outcome.norms.items()],
            loss_sum=outcome.loss_sum,
            tokens=outcome.tokens,
            not_saved=outcome.not_saved,
            parameters=[pb.ParameterHash(name=name, sha256=sha256) for name, sha256 in outcome.parameters],
            usage=pb.Usage(
                compute_s=used.compute,
                wait_s=used.wait,
                wire_s=used.wire,
                forward_bytes=self._sent_since("next", "forward"),
                backward_bytes=self._sent_since("previous", "backward"),
                most_in_flight=used.most_in_flight,
                peak_memory=peak_memory(),
                cpu_s=0.0 if self._cpu_before is None else time.process_time() - self._cpu_before,
                refused_frames=sum(link.refused for link in self._links.values()),
            ),
        )

    def _sent_since(self, side: str, leg: str) -> int:
        """Bytes sent since the last report."""
        total = self._links[side].bytes_sent[leg] if side in self._links else 0
        before, self._counted[leg] = self._counted.get(leg, 0), total
        return total - before

    async def _hand_in(self, outcome: eng.Outcome, path: Path) -> None:
        await self._upload(pb.UploadHeader(kind=pb.UploadHeader.SNAPSHOT_PART, step=self._saving), path)
        path.unlink()
        self._say_to_coordinator(done=self._done(outcome))

    async def _report_subspace(self, report: eng.SubspaceReport) -> None:
        header = pb.UploadHeader(kind=pb.UploadHeader.BASIS, step=report.step, row_json=json.dumps(report.row))
        header.moved = report.basis is not None
        await self._upload(header, b"" if report.basis is None else basis_to_bytes(report.basis))

    async def _upload(self, header: pb.UploadHeader, content: bytes | Path) -> None:
        assert self._place is not None
        header.generation = self._place.generation
        if isinstance(content, Path):
            header.size = content.stat().st_size
            header.sha256 = await asyncio.to_thread(_hash_file, content)
        else:
            header.size, header.sha256 = len(content), hashlib.sha256(content).hexdigest()
        try:
            async with self._one_upload:  # a basis and a snapshot's part may fall together
                await self.stub.Upload(_chunks(header, content), metadata=self.metadata)
        except grpc.aio.AioRpcError as e:
            raise UserError(f"the coordinator did not take an upload: {e.details()}", "see its own output") from None

    # Ends

    def _trouble(self, what: str, about: int | None = None) -> None:
        self._say_to_coordinator(trouble=pb.Trouble(what=what, about=about))

    def _fail(self, error: Exception) -> None:
        """This peer cannot go on: tell the coordinator, then stop with the error."""
        if isinstance(error, BadMessage):  # the coordinator decides what becomes of us both
            self._trouble(f"a neighbour sent a message that cannot be: {error}")
            return
        if is_out_of_memory(error):
            error = UserError(
                f"the device ran out of memory: {str(error).splitlines()[0]}",
                "close other programs, or ask the run's owner for more microbatches or a lower batch.in_flight",
            )
        self._trouble((str(error) or type(error).__name__).splitlines()[0])
        if not self._over.done():
            self._over.set_exception(error)

    def _chore(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chore_done)
        return task

    def _chore_done(self, task: asyncio.Task[None]) -> None:
        self._chores.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._over.done():
            self._fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def _listen_for_ctrl_c(self) -> None:
        with contextlib.suppress(NotImplementedError, RuntimeError):  # Windows, or not the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.add_signal_handler(number, self._interrupt)

    def _interrupt(self) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            self.say("leaving as soon as the step is done; once more to leave at once")
            self._say_to_coordinator(leaving=pb.Leaving())
        else:
            sys.stdout.flush()
            os._exit(EXIT_INTERRUPTED)  # at once: a long operation on the device is not waited for

    def _basis(self, message: pb.Basis) -> Basis:
        shape = Shape.of(self.spec)
        basis = basis_from_bytes(message.version, message.u, (shape.width, self.spec.subspace.k), shape.dtype)
        if basis.sha256 != message.sha256:
            raise UserError(f"basis {message.version} arrived damaged", "join again")
        return basis


def is_out_of_memory(error: Exception) -> bool:
    """CUDA has a type for it, the CPU's allocator a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "not enough memory" in str(error)


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def _chunks(header: pb.UploadHeader, content: bytes | Path) -> AsyncIterator[pb.UploadChunk]:
    yield pb.UploadChunk(header=header)
    if isinstance(content, bytes):
        for start in range(0, len(content), PIECE):
            yield pb.UploadChunk(data=content[start : start + PIECE])
        return
    with content.open("rb") as file:
        while piece := await asyncio.to_thread(file.read, PIECE):
            yield pb.UploadChunk(data=piece)
