"""A peer's session: does what the coordinator says, and says what came of it.

The event loop's side of a worker, and the one place where control stream, generation, engine and snapshots meet: orders
go to the engine, messages to the links, and what the engine posts leaves on the right stream. It must not know sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc

from protomodels_cli.errors import EXIT_INTERRUPTED
from protomodels_cli.model.basis import Basis, basis_from_bytes, basis_to_bytes
from protomodels_cli.model.shape import Shape
from protomodels_cli.model.stage import Sync
from protomodels_cli.protocol.messages import BadMessage, Leg
from protomodels_cli.retry import Backoff, retry
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire import troubles
from protomodels_cli.wire.cap import Cap
from protomodels_cli.wire.client import Line
from protomodels_cli.wire.emulated import Connection
from protomodels_cli.wire.frames import Message
from protomodels_cli.wire.parts import part_message
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.worker import device as devices
from protomodels_cli.worker import notices, orders, problems
from protomodels_cli.worker.auditing import Auditing
from protomodels_cli.worker.building import Building
from protomodels_cli.worker.cards import Cards
from protomodels_cli.worker.control import ControlStream, Lost
from protomodels_cli.worker.engine import Engine
from protomodels_cli.worker.figures import Figures
from protomodels_cli.worker.generation import Generation
from protomodels_cli.worker.listener import Listener
from protomodels_cli.worker.messages import decision_of, done_message, lost_message
from protomodels_cli.worker.papers import Papers
from protomodels_cli.worker.paths import Network, follow_address
from protomodels_cli.worker.resting import LOOK_SECONDS, Wishes
from protomodels_cli.worker.signals import signals_call
from protomodels_cli.worker.snapshots import transfer
from protomodels_cli.worker.snapshots.exchange import SnapshotExchange
from protomodels_cli.worker.snapshots.pacing import Activations
from protomodels_cli.worker.telling import PeerError, Tell, trouble_of

LAST_WORDS = 2.0  # seconds for what was said last to arrive
RESTING = "resting"  # the kind of a spare that is to have no stage, and prefetches nothing
UPLOAD_AGAIN = 2.0  # seconds until an upload that the run waits for is tried again


class Session:
    """Dispatches between one peer's parts, from its first registration to its end. It must not do their work."""

    def __init__(
        self,
        spec: RunSpec,
        cards: Cards,
        papers: Papers,
        listener: Listener,
        line: Line,
        folder: Path,
        tell: Tell,
        give_up_after: float,
        figures: Figures | None = None,
        cap: Cap | None = None,
        wishes: Wishes | None = None,
    ):
        self.spec, self._line, self._papers, self.tell = spec, line, papers, tell
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[int] = self._loop.create_future()
        self._described: asyncio.Future[orders.Described] = self._loop.create_future()
        self._control = ControlStream(
            line, papers.metadata, spec.limits.lease_seconds, give_up_after, self._over, self._tell_of_loss
        )
        self._engine = Engine(cards.first, spec.compute.threads, self._post, cards.reset_peak)
        connection = Connection(spec.wire.link) if spec.wire.link.emulated else None
        if connection is not None:
            line.lead_over(connection)
        self._network = Network(lambda: papers.identity, listener, lambda: line.address, connection, cap)
        self._wishes, self._rests = wishes, None if wishes is None else wishes.now()
        self._rests_by_owner = False  # as the coordinator has said
        self._generation: Generation | None = None
        self._in_memory: pb.Assignment | None = None  # the stage there, also while its generation is over
        self._right: pb.Sync | None = None  # the hashes of U and T_fixed that a sync under way compares with
        self._chores: set[asyncio.Task[Any]] = set()
        activations = Activations(
            leaving=lambda: self._generation is not None and self._generation.sending,
            awaited=lambda: self._engine.starving,
        )
        self._snapshots = SnapshotExchange(
            spec, folder / "parts", line, papers.metadata, self._chore, self._control.send, tell, activations, cap
        )
        send = self._control.send
        self._building = Building(spec, cards, self._engine, self._snapshots, self._basis, self._chore, send, tell)
        self._auditing = Auditing(line, papers.metadata, self._building, self._snapshots, send, folder)
        self._cpu_before: float | None = None
        self._figures, self._interrupts, self._shown = figures or Figures(), 0, 0.0

    async def run(self, introduce: Callable[[], Awaitable[pb.Register]]) -> int:
        """Take part until the coordinator dismisses us. Returns the exit code."""
        if self._network.connection is not None:
            self.tell(notices.LinkEmulated(self.spec.wire.link.in_words))

        async def introduce_all() -> list[pb.PeerMessage]:
            register = await introduce()
            await self._add_what_is_here(register)
            if (rest := self._rest()) is not None:
                register.rest.CopyFrom(rest)
            said = [pb.PeerMessage(register=register)]
            if self._generation is not None and self._generation.done is not None:
                said.append(pb.PeerMessage(done=self._generation.done))  # it may not have been heard
            return said

        with signals_call(self._loop, self._interrupt):
            self._engine.start()
            self._chore(follow_address(self._take_move))
            self._chore(self._papers.keep_good(self._line, self.tell, self._listener.use))
            if self._wishes is not None:
                self._chore(self._follow_wishes(self._wishes))
            watch = self._chore(devices.watch(lambda: self._engine.busy_with, self.spec.limits.device_seconds))
            led = asyncio.create_task(self._control.run(introduce_all, self._obey))
            ends: set[asyncio.Future[Any]] = {led, self._over}
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if not self._over.done():
                    await led  # raises what ended it
                    return EXIT_INTERRUPTED  # we asked to leave, and nobody is there to answer
                return self._over.result()
            finally:
                self._control.end()
                nobody_listens = self._interrupts and not self._control.connected
                await asyncio.wait({led}, timeout=0 if nobody_listens else LAST_WORDS)
                led.cancel()
                await self._end_generation()
                self._engine.order(None)
                hangs = watch.done()  # the device: what its thread is at has no end to wait for
                for chore in self._chores:
                    chore.cancel()
                await asyncio.to_thread(self._engine.join, 0 if hangs else 10)

    def _rest(self) -> pb.Rest | None:
        if self._rests is not None:
            return pb.Rest(until=self._rests)
        return pb.Rest(by_owner=True) if self._rests_by_owner else None

    async def _follow_wishes(self, wishes: Wishes) -> None:
        if self._rests is not None:
            self.tell(notices.Rests(self._rests))
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if (rests := wishes.now()) == self._rests:
                continue
            self._rests, self._rests_by_owner = rests, False
            self._control.send(rest=self._rest() or pb.Rest(over=True))  # without a connection: with the next one
            self.tell(notices.Wakes() if rests is None else notices.Rests(rests))

    async def _add_what_is_here(self, register: pb.Register) -> None:
        """Add the stage in memory, as it is once all orders so far are carried out, and the parts on disk."""
        self._described = self._loop.create_future()
        self._engine.order(orders.Describe())
        found = (await self._described).found
        if found is not None and self._in_memory is not None:
            here, holding = self._in_memory, register.holding
            holding.lineage, holding.applied, holding.prepared = found
            holding.stage, holding.generation = here.stage, 0 if self._generation is None else self._generation.number
            holding.layers_per_stage.extend(here.layers_per_stage)
        register.parts.extend(part_message(part) for part in self._snapshots.parts.all())

    def _tell_of_loss(self, reason: problems.Loss) -> None:
        self.tell(notices.ConnectionLost(reason, self._stage_in_memory))

    async def _take_move(self) -> None:
        self._control.reconnect()
        if self._generation is not None:
            await self._generation.begin_anew()

    @property
    def _stage_in_memory(self) -> int | None:
        return None if self._in_memory is None else self._in_memory.stage

    # What the coordinator says

    async def _obey(self, message: pb.CoordinatorMessage) -> None:
        match message.WhichOneof("body"):
            case "spare":
                await self._end_generation()
                await self._building.drop()
                self._in_memory = None
                self._engine.order(orders.Drop())
                self._figures.stage = None
                self.tell(notices.Spare(message.spare.kind, message.spare.why))
                rests = message.spare.kind == RESTING
                self._rests_by_owner = rests and self._rests is None
                await self._snapshots.be_spare(not rests)
            case "wait":
                await self._end_generation()
                self.tell(notices.Waiting(message.wait.kind, message.wait.why, self._stage_in_memory))
            case "paused":
                self._take_pause(message.paused)
            case "assignment":
                await self._take_assignment(message.assignment)
            case "turn":
                self._take_turn(message.turn)
            case "routes" if self._generation is not None:
                await self._generation.reroute(message.routes)
            case "feed":
                feed, generation = message.feed, self._generation
                leg: Leg = "evaluation" if feed.evaluation else "forward"
                if generation is not None and generation.heard.is_news(feed):
                    self._engine.deliver(Message(leg, feed.step, feed.microbatch, 0, feed.ids, b""))
            case "basis":
                self._take_basis(self._basis(message.basis.basis))
            case "keep":
                await self._snapshots.keep(message.keep)
            case "prove":
                self._chore(self._snapshots.prove(message.prove))
            case "show" | "audit":
                self._chore(self._auditing.obey(message, self._generation))
            case "prepare":
                await self._end_generation()
                self._in_memory = None
                await self._snapshots.be_spare(False)  # what it prefetches may be what it fetches now
                await self._building.prepare(message.prepare)
            case "dismissal":
                self._leave(message.dismissal)

    def _leave(self, dismissal: pb.Dismissal) -> None:
        if self._over.done():
            return
        why, fix, code = dismissal.why, dismissal.fix, dismissal.exit_code
        if code and not self._interrupts:
            self._over.set_exception(PeerError(problems.Dismissed(dismissal.kind, why, fix, code)))
        else:
            self.tell(notices.Released(dismissal.kind, why))
            self._over.set_result(EXIT_INTERRUPTED if self._interrupts else 0)

    def _take_pause(self, paused: pb.Paused) -> None:
        if not paused.kind:
            self._figures.at_rest()
            self.tell(notices.Resumed())
        else:
            self.tell(notices.Paused(paused.kind, paused.why, self._stage_in_memory))

    async def _take_assignment(self, assigned: pb.Assignment) -> None:
        await self._end_generation(assigned.generation)
        await self._snapshots.be_spare(False)
        self._in_memory = assigned
        spec, _ = self._building.cut(assigned)
        recording = self._auditing.recording(spec, assigned.generation)
        self._generation = Generation(assigned, spec, self._network, self._engine, self._report, self.tell, recording)
        if (fetching := self._building.take(assigned)) is not None:
            self._generation.own(fetching)

    async def _end_generation(self, following: int = 0) -> None:
        ended, self._generation, self._right = self._generation, None, None
        self._figures.at_rest()
        self._engine.forget(following)
        if ended is not None:
            await ended.end()

    def _take_basis(self, basis: Basis) -> None:
        if self._generation is not None:
            self._engine.order(orders.HoldBasis(basis))
            taken = pb.BasisTaken(version=basis.version, sha256=basis.sha256, generation=self._generation.number)
            self._control.send(basis_taken=taken)

    def _basis(self, message: pb.Basis) -> Basis:
        shape = Shape.of(self.spec)
        basis = basis_from_bytes(message.version, message.u, (shape.width, self.spec.subspace.k), shape.dtype)
        if basis.sha256 != message.sha256:
            raise Lost(problems.BasisDamaged(message.version))
        return basis

    def _take_turn(self, turn: pb.Turn) -> None:
        generation = self._generation
        if generation is None or turn.generation != generation.number:
            return
        heard = generation.heard
        if turn.HasField("decision") and turn.decision.step > heard.decided:
            heard.decided = turn.decision.step
            self._engine.order(decision_of(turn.decision))
            self._figures.decided(turn.decision, time.monotonic())
            self._show_step(turn.decision)
        if turn.save:
            self._engine.order(orders.CopyState())
        if turn.task <= heard.task:
            return  # none, or one that is under way
        heard.task = turn.task
        match turn.WhichOneof("next"):
            case "connect":
                generation.own(self._chore(self._connect(generation, turn.task)))
            case "step":
                self._figures.granted(time.monotonic())
                if self._cpu_before is None:
                    self._cpu_before = time.process_time()
                s = turn.step
                generation.begin(s)
                self._engine.order(orders.Run(turn.task, "forward", s.step, s.microbatches, s.basis_version))
            case "evaluation":
                e = turn.evaluation
                self._engine.order(orders.Run(turn.task, "evaluation", e.step, e.microbatches, e.basis_version))
            case "sync":
                self._right = turn.sync
                self._engine.order(orders.ReportSync(turn.task))
            case "finish":
                self._engine.order(orders.HashWeights(turn.task))

    async def _connect(self, generation: Generation, task: int) -> None:
        await generation.connect()
        generation.done = pb.Done(task=task, generation=generation.number)
        self._control.send(done=generation.done)

    def _show_step(self, decision: pb.Decision) -> None:
        now = time.monotonic()
        if now - self._shown > 5 or decision.step == self.spec.steps:
            self._shown = now
            tokens = self.spec.batch.size * self.spec.model.context
            self.tell(self._figures.as_notice(decision, self.spec.steps, tokens))

    # What the engine posts

    def _post(self, generation: int, item: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._receive, generation, item)

    def _receive(self, number: int, item: Any) -> None:
        if isinstance(item, orders.Described):
            if not self._described.done():
                self._described.set_result(item)
            return
        if isinstance(item, notices.NotCompiled | notices.NotPinned):
            self.tell(item)  # of the machine, whichever generation it is in
            return
        if isinstance(item, orders.Failure) and not isinstance(item.error, BadMessage):
            self._fail(item.error)  # whichever generation it was in: what is in memory may be half done
            return
        if number < 0:
            self._building.hear(number, item)
            return
        generation = self._generation
        if generation is None or number != generation.number or self._over.done():
            return  # of a stage that we do not hold any more
        match item:
            case Message():
                generation.send(item)
            case orders.Taken(leg):
                generation.take(leg)
            case orders.PartUnusable(why) if self._in_memory is not None:
                self._control.send(snapshot_lost=lost_message(self._in_memory, why))
            case orders.Copied():
                self._chore(self._snapshots.save(item.lineage, item.step, generation.stage, item.state))
            case orders.TaskReport():
                self._compare_with_the_runs(generation.stage, item.sync)
                cpu = 0.0 if self._cpu_before is None else time.process_time() - self._cpu_before
                machine = {**self._building.memory_used(), **self._figures.of_card()}
                generation.done = done_message(item, generation, machine, cpu)
                self._control.send(done=generation.done)
                self._figures.finished(generation.done, generation.stage)
            case orders.SubspaceReport():
                generation.own(self._chore(self._report_subspace(generation.number, item)))
            case orders.Failure(error, leg):
                self._blame_sender(generation.stage, error, leg)

    def _compare_with_the_runs(self, stage: int, found: Sync | None) -> None:
        """Compare the hashes that a sync names with those of the bytes in use here, and tell of each difference."""
        right, self._right = self._right, None
        if found is not None and right is not None:
            if found.basis_sha256 != right.basis_sha256:
                self.tell(notices.HashMismatch("U", stage))
            if found.t_fixed_sha256 != right.t_fixed_sha256:
                self.tell(notices.HashMismatch("T_fixed", stage))

    async def _report_subspace(self, generation: int, report: orders.SubspaceReport) -> None:
        header = pb.UploadHeader(kind=pb.UploadHeader.BASIS, step=report.step, row_json=json.dumps(report.row))
        header.moved, header.generation = report.basis is not None, generation
        content = b"" if report.basis is None else basis_to_bytes(report.basis)

        async def upload() -> None:
            try:
                await transfer.upload_bytes(self._line, self._papers.metadata, header, content)
            except grpc.aio.AioRpcError as e:
                if e.code() not in transfer.NOT_WANTED:  # whoever misses it asks again with the next assignment
                    raise

        log = transfer.logging_why(f"the upload of the basis after step {report.step}")
        await retry(upload, Backoff(UPLOAD_AGAIN), grpc.aio.AioRpcError, log)

    # Ends

    def _report(self, trouble: troubles.Trouble) -> None:
        """Report a trouble to the coordinator, which decides what follows from it."""
        if not self._over.done():
            generation = self._generation.number if self._generation is not None else 0
            self._control.send(trouble=troubles.to_message(trouble, generation))
            self.tell(notices.TroubleReported(trouble))

    def _blame_sender(self, stage: int, error: Exception, leg: Leg | None) -> None:
        """Report who sent a message that no correct program sends: the coordinator or a neighbour."""
        if leg != "backward" and stage == 0:
            self._report(troubles.InvalidFeed(stage, str(error)))
        else:
            self._report(troubles.InvalidInput(stage + 1 if leg == "backward" else stage - 1, str(error)))

    def _fail(self, error: Exception) -> None:
        """This peer cannot go on: tell the coordinator, then stop with the error."""
        error = devices.as_problem(error)
        self._report(trouble_of(error))
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

    def _interrupt(self) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            sys.stdout.flush()
            os._exit(EXIT_INTERRUPTED)  # at once: a long operation on the device is not waited for
        if self._control.ask_to_leave():
            self.tell(notices.LeavingAfterStep())
        elif not self._over.done():
            self.tell(notices.LeavingAtOnce())
            self._over.set_result(EXIT_INTERRUPTED)
