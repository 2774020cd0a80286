"""A peer's session: does what the coordinator says, and says what came of it.

The event loop's side of a worker. Orders go to the engine, messages to the links; what the engine posts comes back
here and leaves on the right stream. A connection that breaks is opened again: the stage stays in memory meanwhile, and
the coordinator is told what it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import torch

from protomodels_cli.errors import EXIT_INTERRUPTED, UserError
from protomodels_cli.model.basis import Basis, basis_from_bytes, basis_to_bytes
from protomodels_cli.model.shape import Shape, slices
from protomodels_cli.model.stage import Sync
from protomodels_cli.observe.usage import peak_memory
from protomodels_cli.protocol.messages import BadMessage, Leg
from protomodels_cli.protocol.parts import Part
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.spec.sizes import in_flight_limit
from protomodels_cli.wire.emulated import Connection
from protomodels_cli.wire.frames import Message
from protomodels_cli.wire.operator import Refused, in_words
from protomodels_cli.wire.parts import part_message
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.wire.relay import RelayedAcceptor, RelayedDialler
from protomodels_cli.wire.tls import Identity
from protomodels_cli.worker import engine as eng
from protomodels_cli.worker import transfer
from protomodels_cli.worker.keeper import Keeper
from protomodels_cli.worker.links import Link, Listener, dial

GRACE = 1.0  # seconds for the coordinator to explain why a neighbour hung up
REDIAL = 0.2, 2.0  # seconds between tries to reach the coordinator: at first, at most
LAST_WORDS = 2.0  # seconds for what was said last to arrive
BEATS = 5  # in a lease
STUCK_TIMES, STUCK_LOOKS = 2, 20  # a device hangs if it is at one work for so many place_seconds, seen in so many looks


class Lost(Exception):
    """The connection to the coordinator is gone; why, in words."""


class Session:
    def __init__(
        self,
        spec: RunSpec,
        device: torch.device,
        identity: Identity,
        listener: Listener,
        stub: rpc.PeeringStub,
        metadata: transfer.Metadata,
        door: tuple[str, int],
        folder: Path,
        say: Callable[[str], None],
    ):
        self.spec, self.identity, self.listener, self.stub, self.metadata = spec, identity, listener, stub, metadata
        self.door, self.say = door, say
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[pb.PeerMessage | None] = asyncio.Queue()  # None: the end
        self._over: asyncio.Future[int] = self._loop.create_future()
        self._described: asyncio.Future[eng.Described] = self._loop.create_future()
        self._engine = eng.Engine(device, spec.compute.threads, self._post)
        self._heard = 0  # the number of the coordinator's last message
        self._place: pb.Place | None = None
        self._seat: pb.Place | None = None  # of the stage in memory, also while its generation is over
        self._right: pb.Sync | None = None  # U and T_fixed as a sync under way has them
        self._links: dict[str, Link] = {}  # previous, next
        self._connection = Connection(spec.wire.link) if spec.wire.link.emulated else None
        self._relays: list[RelayedAcceptor | RelayedDialler] = []
        self._streams: set[asyncio.Task[Any]] = set()  # of this generation
        self._chores: set[asyncio.Task[Any]] = set()
        self._keeper = Keeper(
            spec.snapshots, folder / "parts", stub, metadata, self._chore, self._say_to_coordinator, say
        )
        self._counted: dict[str, int] = {}
        self._cpu_before: float | None = None
        self._interrupts = 0
        self._shown = 0.0

    async def run(self, introduce: Callable[[], Awaitable[pb.Register]]) -> int:
        """Take part until the coordinator dismisses us. Returns the exit code."""
        if self._connection is not None:
            self.say(f"the run emulates a slow connection for every peer (wire.link): {self.spec.wire.link.in_words}")
        self._engine.start()
        self._listen_for_ctrl_c()
        self._chore(self._watch_the_device())
        conversing = asyncio.create_task(self._converse_until_dismissed(introduce))
        ends: set[asyncio.Future[Any]] = {conversing, self._over}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not self._over.done():
                await conversing  # raises what ended it
            return self._over.result()
        finally:
            self._outbox.put_nowait(None)  # the coordinator hears all before that, and hangs up
            await asyncio.wait({conversing}, timeout=LAST_WORDS)
            conversing.cancel()
            await self._drop_generation()
            self._engine.order(None)
            for chore in self._chores:
                chore.cancel()
            await asyncio.to_thread(self._engine.join, 10)

    # The coordinator's stream

    async def _converse_until_dismissed(self, introduce: Callable[[], Awaitable[pb.Register]]) -> None:
        tries, been_in, why = 0, False, ""
        while not self._over.done():
            self._heard = 0
            try:
                register = await introduce()
                await self._add_what_is_here(register)
                await self._converse(register)
            except Refused:
                raise
            except (Lost, grpc.aio.AioRpcError, UserError) as e:
                if not been_in and not self._heard:
                    raise in_words(e) if isinstance(e, grpc.aio.AioRpcError) else e from None
                why = e.details() or "" if isinstance(e, grpc.aio.AioRpcError) else str(e).splitlines()[0]
            if self._over.done():
                return
            if self._heard:
                been_in, tries = True, 0
            if tries == 0:
                keeps = f"; stage {self._seat.stage} stays in memory here" if self._seat is not None else ""
                self.say(f"the coordinator is not there ({why[:120]}){keeps}. Trying again …")
            await asyncio.sleep(min(REDIAL[0] * 2**tries, REDIAL[1]) * random.uniform(0.5, 1.0))
            tries = min(tries + 1, 10)

    async def _add_what_is_here(self, register: pb.Register) -> None:
        """What is in memory, as the engine has it once all orders so far are carried out, and on disk."""
        self._described = self._loop.create_future()
        self._engine.order(eng.Describe())
        found = (await self._described).found
        if found is not None and self._seat is not None:
            lineage, applied, prepared = found
            register.holding.CopyFrom(
                pb.Holding(
                    lineage=lineage,
                    stage=self._seat.stage,
                    layers_per_stage=self._seat.layers_per_stage,
                    applied=applied,
                    prepared=prepared,
                )
            )
        register.parts.extend(part_message(part) for part in self._keeper.parts.all())

    async def _converse(self, register: pb.Register) -> None:
        """One connection, from the registration to its end."""
        self._outbox = asyncio.Queue()  # what was said to nobody has no meaning now
        self._say_to_coordinator(register=register)
        if self._interrupts:
            self._say_to_coordinator(leaving=pb.Leaving())
        call = self.stub.Session(self._outgoing(self._outbox), metadata=self.metadata)
        beating = asyncio.create_task(self._beat(self._outbox))
        try:
            while not self._over.done():
                try:
                    async with asyncio.timeout(2 * self.spec.limits.lease_seconds):
                        message = await call.read()
                except TimeoutError:
                    raise Lost("not a word from it") from None
                if message is grpc.aio.EOF:
                    raise Lost("it hung up")
                if self._is_next(message):
                    await self._obey(message)
        except grpc.aio.AioRpcError as e:
            error = in_words(e)
            raise error if isinstance(error, Refused) else Lost(e.details() or "it hung up") from None
        finally:
            beating.cancel()
            call.cancel()

    def _is_next(self, message: pb.CoordinatorMessage) -> bool:
        """Not one that came before. One that did not come is missed, if only at the next beat."""
        is_beat = message.WhichOneof("body") == "beat"
        if message.number > self._heard + (not is_beat):
            raise Lost("a message of its was lost")
        if is_beat or message.number <= self._heard:
            return False
        self._heard = message.number
        return True

    async def _beat(self, outbox: asyncio.Queue[pb.PeerMessage | None]) -> None:
        while True:
            await asyncio.sleep(self.spec.limits.lease_seconds / BEATS)
            outbox.put_nowait(pb.PeerMessage(beat=pb.Beat()))

    async def _outgoing(self, outbox: asyncio.Queue[pb.PeerMessage | None]) -> AsyncIterator[pb.PeerMessage]:
        while (message := await outbox.get()) is not None:
            yield message

    def _say_to_coordinator(self, **body: Any) -> None:
        self._outbox.put_nowait(pb.PeerMessage(**body))

    async def _obey(self, message: pb.CoordinatorMessage) -> None:
        match message.WhichOneof("body"):
            case "spare":
                await self._drop_generation()
                self._seat = None
                self._engine.order(eng.Drop())
                self.say(f"waiting: {message.spare.why}")
                await self._keeper.be_spare(True)
            case "hold_on":
                await self._drop_generation()
                self.say(f"waiting, with its stage in memory: {message.hold_on.why}")
            case "place":
                await self._take_place(message.place)
            case "turn":
                self._take_turn(message.turn)
            case "feed":
                feed = message.feed
                leg: Leg = "evaluation" if feed.evaluation else "forward"
                if self._place is not None:
                    self._engine.deliver(Message(leg, feed.step, feed.microbatch, 0, feed.ids, b""))
            case "basis":
                self._take_basis(self._basis(message.basis.basis))
            case "keep":
                await self._keeper.keep(message.keep)
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
        await self._keeper.be_spare(False)
        self._place = self._seat = place
        spec = self.spec.model_copy(update={"stages": list(place.layers_per_stage)})
        part = slices(spec)[place.stage]
        stages = len(place.layers_per_stage)
        limit = in_flight_limit(spec, stages - 1 - place.stage)
        for side, boundary in (("previous", place.stage - 1), ("next", place.stage)):
            if place.HasField(side):
                self._prepare_link(side, boundary, getattr(place, side), stages)
        source = ", as it is in memory" if place.keep else f", as it was after step {place.step}" if place.step else ""
        self.say(
            f"generation {place.generation}: stage {place.stage} of {stages}, "
            f"layers {part.first_layer}–{part.end_layer - 1}"
            + (" with the embedding" if part.is_first else "")
            + (" with the head" if part.is_last else "")
            + source
        )
        seat = eng.Seat(place.task, place.generation, place.lineage, place.step, limit, place.owed)
        if place.keep:
            d = place.decision
            self._engine.order(eng.Keep(seat, eng.Decide(d.step, d.apply, d.lr, d.clip) if d.step else None))
        elif place.HasField("restore"):
            self._streams.add(self._chore(self._restore(place, seat, spec)))  # ends with its generation
        else:
            basis = self._basis(place.basis) if place.HasField("basis") else None
            self._engine.order(eng.Build(seat, spec, part, basis, None))

    async def _restore(self, place: pb.Place, seat: eng.Seat, spec: RunSpec) -> None:
        """Build the stage from its part of a snapshot, wherever that can be had."""
        self._engine.order(eng.Drop())  # the memory will be needed
        wanted = Part(place.restore.lineage, place.restore.step, place.stage, place.restore.sha256)
        try:
            path = await self._keeper.find(wanted)
        except ValueError as e:
            lost = pb.SnapshotLost(generation=place.generation, lineage=wanted.lineage, step=wanted.step)
            lost.why = str(e)
            self._say_to_coordinator(snapshot_lost=lost)
            return
        self._engine.order(eng.Build(seat, spec, slices(spec)[place.stage], None, path))

    def _take_basis(self, basis: Basis) -> None:
        if self._place is not None:
            self._engine.order(eng.HoldBasis(basis))
            taken = pb.BasisTaken(version=basis.version, sha256=basis.sha256, generation=self._place.generation)
            self._say_to_coordinator(basis_taken=taken)

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
        self._place = self._right = None
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
        self._say_to_coordinator(done=pb.Done(task=task, generation=self._place.generation))

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
        """A neighbour hung up. It may be gone, or have been sent away: the coordinator will say."""
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
        if turn.save:
            self._engine.order(eng.CopyState())
        match turn.WhichOneof("next"):
            case "connect":
                self._streams.add(self._chore(self._connect(turn.task)))  # ends with its generation
            case "step":
                if self._cpu_before is None:
                    self._cpu_before = time.process_time()
                s = turn.step
                self._engine.order(eng.Run(turn.task, "forward", s.step, s.microbatches, s.basis_version))
            case "evaluation":
                e = turn.evaluation
                self._engine.order(eng.Run(turn.task, "evaluation", e.step, e.microbatches, e.basis_version))
            case "sync":
                self._right = turn.sync
                self._engine.order(eng.ReportSync(turn.task))
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
        if isinstance(item, eng.Described):
            if not self._described.done():
                self._described.set_result(item)
            return
        if isinstance(item, eng.Failure) and not isinstance(item.error, BadMessage):
            self._fail(item.error)  # whichever generation it was in: what is in memory may be half done
            return
        if self._place is None or generation != self._place.generation or self._over.done():
            return  # of a stage that we do not hold any more
        match item:
            case Message():
                self._links["previous" if item.leg == "backward" else "next"].send(item)
            case eng.Taken(leg):
                side = "next" if leg == "backward" else "previous"
                if side in self._links:  # token ids come without a link
                    self._links[side].take()
            case eng.Copied():
                self._chore(self._keeper.save(item.lineage, item.step, self._place.stage, item.state))
            case eng.Outcome():
                self._hold_against_the_runs(item.sync)
                self._say_to_coordinator(done=self._done(item))
            case eng.SubspaceReport():
                self._streams.add(self._chore(self._report_subspace(item)))  # ends with its generation
            case eng.Failure(error, leg):
                self._blame_sender(error, leg)

    def _hold_against_the_runs(self, found: Sync | None) -> None:
        """What the coordinator broadcasts at a sync against the bytes in use here."""
        right, self._right = self._right, None
        if found is not None and right is not None:
            same = (found.basis_sha256, found.t_fixed_sha256) == (right.basis.sha256, right.t_fixed.sha256)
            if not same:
                self.say("the bytes of U or T_fixed in use here are not the run's: its stage will be made anew")

    def _done(self, outcome: eng.Outcome) -> pb.Done:
        sync, used = outcome.sync, outcome.usage
        assert self._place is not None
        return pb.Done(
            task=outcome.task,
            generation=self._place.generation,
            t_fixed_sha256=sync.t_fixed_sha256 if sync else "",
            t_fixed_version=sync.t_fixed_version if sync else 0,
            basis_sha256=sync.basis_sha256 if sync else "",
            basis_version=sync.basis_version if sync else 0,
            norms=[pb.UnitNorm(unit=unit, squared=squared) for unit, squared in outcome.norms.items()],
            loss_sum=outcome.loss_sum,
            tokens=outcome.tokens,
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

    async def _report_subspace(self, report: eng.SubspaceReport) -> None:
        assert self._place is not None
        header = pb.UploadHeader(kind=pb.UploadHeader.BASIS, step=report.step, row_json=json.dumps(report.row))
        header.moved, header.generation = report.basis is not None, self._place.generation
        content = b"" if report.basis is None else basis_to_bytes(report.basis)
        while True:
            try:
                await transfer.hand_in_bytes(self.stub, self.metadata, header, content)
                return
            except grpc.aio.AioRpcError as e:
                if e.code() == grpc.StatusCode.INVALID_ARGUMENT:
                    return  # not wanted; whoever misses it asks again with the next place
                await asyncio.sleep(REDIAL[1] * random.uniform(0.5, 1.0))

    # Ends

    def _trouble(self, what: str, about: int | None = None) -> None:
        generation = self._place.generation if self._place is not None else 0
        self._say_to_coordinator(trouble=pb.Trouble(what=what, about=about, generation=generation))

    def _blame_sender(self, error: Exception, leg: Leg | None) -> None:
        """Of a message that cannot be. Token ids come from the coordinator: then this stage has to begin anew."""
        assert self._place is not None
        stage = self._place.stage
        about = stage + 1 if leg == "backward" else max(0, stage - 1)
        sender = "the coordinator" if about == stage else f"stage {about}"
        self._trouble(f"{sender} sent a message that cannot be: {error}", about)

    def _fail(self, error: Exception) -> None:
        """This peer cannot go on: tell the coordinator, then stop with the error."""
        if is_out_of_memory(error):
            error = UserError(
                f"the device ran out of memory: {str(error).splitlines()[0]}",
                "close other programs, or ask the run's owner for more microbatches or a lower batch.in_flight",
            )
        self._trouble((str(error) or type(error).__name__).splitlines()[0])
        if not self._over.done():
            self._over.set_exception(error)

    async def _watch_the_device(self) -> None:
        """A driver that hangs raises nothing, and the beats go on. Looks are counted, not seconds: whoever stopped this
        process stopped its device too."""
        looks, before = 0, 0
        while looks < STUCK_LOOKS:
            await asyncio.sleep(STUCK_TIMES * self.spec.limits.place_seconds / STUCK_LOOKS)
            now = self._engine.busy_with
            looks, before = (looks + 1 if now and now == before else 0), now
        seconds = STUCK_TIMES * self.spec.limits.place_seconds
        raise UserError(
            f"the device has been at one piece of work for {seconds:.0f} s",
            "if it hangs, start the machine again or use another device (--device); if it is only slow, ask the run's "
            "owner for more microbatches or a higher limits.place_seconds",
        )

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
