"""The coordinator: one loop that takes events, asks the machine, writes the journal, and does what was decided."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, assert_never

from protomodels_cli import timeouts
from protomodels_cli.coordinator import contributions, events, machine, notices
from protomodels_cli.coordinator.alarms import LongWait, alarm_of
from protomodels_cli.coordinator.audit_reasons import OfAudits
from protomodels_cli.coordinator.auditing import Audits
from protomodels_cli.coordinator.books import known_names, known_seconds, open_books
from protomodels_cli.coordinator.claims import Claims
from protomodels_cli.coordinator.contributions import Contributions
from protomodels_cli.coordinator.deposit import Deposit
from protomodels_cli.coordinator.dispatch import Dispatch
from protomodels_cli.coordinator.failing import cannot_write, no_memory, own_fault
from protomodels_cli.coordinator.feed import Feed
from protomodels_cli.coordinator.file_names import BASES, EVENTS, JOURNAL, METRICS, SNAPSHOTS, SUMMARY
from protomodels_cli.coordinator.history import Decided, History, Record
from protomodels_cli.coordinator.journal import create
from protomodels_cli.coordinator.reasons import NoHeartbeat, UnprocessableMessage
from protomodels_cli.coordinator.run_dir import RunDir
from protomodels_cli.coordinator.sentences import sentence
from protomodels_cli.coordinator.service import Service
from protomodels_cli.coordinator.snapshots.copies import Copies, papers
from protomodels_cli.coordinator.snapshots.direct import direct_to
from protomodels_cli.coordinator.snapshots.first import FirstSnapshot
from protomodels_cli.coordinator.snapshots.store import Snapshots
from protomodels_cli.coordinator.snapshots.upkeep import Upkeep, beside
from protomodels_cli.coordinator.snapshots.uploads import Uploads
from protomodels_cli.coordinator.status import Board
from protomodels_cli.coordinator.subspace import Subspace, bases_needed
from protomodels_cli.coordinator.summary import Totals, mend_metrics
from protomodels_cli.coordinator.watching import Watching
from protomodels_cli.data.kept import keep
from protomodels_cli.data.prepare import Corpus
from protomodels_cli.errors import EXIT_INTERRUPTED, EXIT_OUTSIDE, UserError
from protomodels_cli.files import free_bytes
from protomodels_cli.observe import logs
from protomodels_cli.observe.notices import Teller
from protomodels_cli.observe.notify import Notifier, Target
from protomodels_cli.observe.page.address import Where
from protomodels_cli.observe.progress import Progress
from protomodels_cli.protocol.throughput import tokens_per_s
from protomodels_cli.spec.load import with_absolute_paths
from protomodels_cli.wire.join_link import Address, address
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.tickets import RelayLink


class Coordinator:
    def __init__(
        self,
        corpus: Corpus,
        run_dir: RunDir,
        say: Callable[[str], None],
        elsewhere: Sequence[Address] = (),
        free: Callable[[Path], int] = free_bytes,
        relays: Sequence[RelayLink] = (),
    ):
        """`elsewhere`: further addresses, where peers find whoever takes over. `free`: bytes on a folder's disk."""
        self.spec, self.run_dir, self.say, self._corpus = run_dir.spec, run_dir, say, corpus
        self._elsewhere, self._free = elsewhere, free
        self._events: asyncio.Queue[events.Event] = asyncio.Queue()
        self._teller: Teller[notices.Notice] = Teller(sentence, logs.COORDINATOR, say)
        bases, has_basis = run_dir.path / BASES, self.spec.subspace.has_basis
        self._subspace = Subspace(self.spec, bases, run_dir.resumed) if has_basis else None
        basis, t_fixed = ("", (0, "")) if self._subspace is None else self._subspace.first_hashes
        self._folder = str(run_dir.path)
        self.state = replace(machine.start(self.spec, basis, t_fixed), folder=self._folder)
        self._snapshots = Snapshots(run_dir.path / SNAPSHOTS, run_dir.identity, t_fixed, bases)
        here = with_absolute_paths(self.spec, run_dir.base)
        copy_to, init = here.snapshots.copy_to, here.model.init
        self._first = None if init is None else FirstSnapshot(self.spec, Path(init), self._snapshots)

        beside = partial(papers, run_dir.path, self.spec)
        copies = None if copy_to is None else Copies(copy_to, run_dir.name_there, beside, lambda: self.history)
        store = None if copies is None else (copies, direct_to(self.spec.snapshots, copies, self._teller))
        self._uploads, feed = Uploads(self, self._subspace, self._snapshots, store), Feed(self.spec, corpus)
        self._audits = Audits(self, self.spec, feed)
        self._service = Service(self.spec, run_dir, self, self._uploads, self._status, self._audits, relays)
        history, called = lambda: self.state.history, self.state.called
        self._dispatch = Dispatch(self._service, feed, self._subspace, t_fixed[1], history, called)
        deposit = None if copies is None else Deposit(self, copies, run_dir)
        if deposit is not None:
            call = asyncio.get_event_loop().call_soon_threadsafe
            self._service.doorkeeper.on_change = partial(call, deposit.papers_changed)
        self._upkeep = Upkeep(self, self._snapshots, copies, self._first, deposit)
        self._claims = Claims(self, self._snapshots, self._uploads, self._upkeep)
        self._progress, self._totals = Progress(self.spec.steps), Totals()
        self._contributions = Contributions()
        # Wall time that a step of the system's clock does not disturb: timeouts are measured with it.
        self._clock = time.time() - time.monotonic()
        self._board = Board(self._now())
        self._over: asyncio.Future[None] = asyncio.get_event_loop().create_future()
        self._chores: set[asyncio.Task[None]] = set()
        self._writing, self._books, self._interrupted = ThreadPoolExecutor(1), contextlib.ExitStack(), asyncio.Event()
        self._hosts: list[str] = []  # at which peers may look for a coordinator
        self._silent: dict[str, float] = {}  # when peers were lost that may still live
        self._watching: Watching | None = None
        self._notifier: Notifier | None = None
        self._long_wait = LongWait()

    def watch(self, where: Where, prompt: str | None = None) -> None:
        """Show the run on a page there; with a text that goes on from this prompt."""
        trips = self._service.round_trips
        self._watching = Watching(where, self.run_dir, lambda: self.state, self._status, trips, prompt)

    def notify(self, target: Target) -> None:
        """Tell the owner elsewhere when the run ends, stands still, or is about to."""
        failed = lambda shown, why: self._teller(notices.NotifyFailed(shown, why))  # noqa: E731
        self._notifier = notifier = Notifier(target, self.spec.name, failed)

        def also(notice: notices.Notice) -> None:
            if (text := alarm_of(notice)) is not None:
                notifier(text)

        self._teller.also = also

    async def run(self, bind: str, host: str, port: int, announce: Callable[[str], None]) -> int:
        """Open the door and lead the run to its end. Returns the exit code."""
        try:
            return await self._run(bind, host, port, announce)
        except UserError as e:
            with contextlib.suppress(OSError):  # the disk may be what failed
                self._teller.record(notices.Ended(e.kind, str(e).splitlines()[0]))
            raise
        finally:
            if self._notifier is not None:
                await self._notifier.close()
            if self._watching is not None:
                await self._watching.close()
            await self._service.close()
            self._writing.shutdown()  # a write that was under way is finished
            self._books.close()
            if self._over.done() and not self._over.cancelled():
                self._over.exception()  # looked at, whatever else was raised: asyncio would print it as forgotten

    async def _run(self, bind: str, host: str, port: int, announce: Callable[[str], None]) -> int:
        try:
            if self.run_dir.resumed:  # a journal that cannot be believed opens no door
                names = await asyncio.to_thread(known_names, self.run_dir.path / EVENTS)
                await asyncio.to_thread(self._restore)
                seconds = await asyncio.to_thread(known_seconds, self.run_dir.path / METRICS)
                history, now = self._journal.history, self._now()
                resumed = machine.resume(self.spec, self.state.t_fixed, history, now, names, seconds)
                self.state = replace(resumed, folder=self._folder)
            elif self._first is not None:
                await asyncio.to_thread(self._first.check)
            port = await self._service.open(bind, port)
            if self.run_dir.resumed:
                await self._come_back()
            else:  # only now: a start that fails leaves no run behind
                await asyncio.to_thread(self._begin)
            await asyncio.to_thread(keep, self._corpus, self.run_dir.path)
            link = await asyncio.to_thread(self.run_dir.write_link, host, port, self._elsewhere)
            self._hosts, self.state = [address(*one) for one in link.addresses], replace(self.state, home=host)
            await asyncio.to_thread(announce, str(link))
            if self._watching is not None:
                self._watching.open()
            self._upkeep.journalled()
            self._uploads.open_store()
            return await self._lead_until_over()
        except OSError as e:
            raise cannot_write(self.run_dir.path, e) from None

    def _begin(self) -> None:
        """The files of a new run. Blocks."""
        if self._subspace is not None:
            self._subspace.store_first()
        create(self.run_dir.path / JOURNAL, self.run_dir.identity, self.state.history)
        self._open_books()

    def _restore(self) -> None:
        """The files and the totals that the journal describes, before anybody can come. Blocks."""
        self._open_books()
        history = self._journal.history
        self._totals.began = mend_metrics(self.run_dir.path / METRICS, self._metrics, history, self.spec)
        self._totals.decided = self._journal.last_written
        self._contributions = contributions.read(self.run_dir.path / METRICS)
        if self._subspace is not None:
            for version, sha256 in bases_needed(history).items():
                self._subspace.load(version, sha256)
        self._snapshots.settle(lambda: history)

    def _open_books(self) -> None:
        self._journal, self._metrics = open_books(self.run_dir, self.state.history, self._teller, self._books)

    async def _lead_until_over(self) -> int:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError, RuntimeError):
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._interrupted.set)
        leading, ticking = asyncio.create_task(self._lead()), asyncio.create_task(self._tick())
        waiting = asyncio.create_task(self._interrupted.wait())
        ends: set[asyncio.Future[Any]] = {leading, waiting, self._over}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in (leading, self._over):
                if end.done():
                    await end  # raises what ended it
            await self._finish_copies()
            return self._exit_code()
        finally:
            for task in (ticking, *ends):
                task.cancel()

    async def _finish_copies(self) -> None:
        """Wait until the last snapshot is copied to the store, or until the owner interrupts that with Ctrl-C."""
        self._interrupted.clear()
        ends = [asyncio.create_task(self._upkeep.end()), asyncio.create_task(self._interrupted.wait())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        ends[1].cancel()
        if ends[0].done():
            await ends[0]  # raises what went wrong
        else:
            self._teller(notices.CopyAbandoned())

    async def _come_back(self) -> None:
        """Continue where the journal ends, before any event is taken."""
        history = self._journal.history
        self._upkeep.settle()
        for mark in history.pending:
            await self._uploads.look(mark.lineage, mark.step)
        if history.over:  # killed between the end and its last words: whoever still waits is told
            told = await asyncio.to_thread((self.run_dir.path / SUMMARY).exists)  # which is written after that
            if not told:
                await self._write_summary()
            self._teller(notices.RunDone(history.step))
            self.spawn(self._end_when_all_know(told))
            return
        self._teller(notices.Continuing(history.step, self.spec.steps, history.newest.step))

    async def _end_when_all_know(self, told: bool) -> None:
        """Peers reconnect, and are dismissed as they come."""
        began, holders = time.monotonic(), set(self.state.history.holders)
        await asyncio.sleep(timeouts.END_SPARES)
        while not told and not holders <= set(self.state.peers) and time.monotonic() - began < timeouts.END_HOLDERS:
            await asyncio.sleep(timeouts.COORDINATOR_TICK)
        self._end()

    async def _end_when_the_silent_know(self) -> None:
        """A peer that fell silent shortly before the end may reconnect to hear of it."""
        while any(time.monotonic() - lost < timeouts.END_SPARES for lost in self._silent.values()):
            await asyncio.sleep(timeouts.COORDINATOR_TICK)
        self._end()

    def _exit_code(self) -> int:
        if self.state.history.ended is not None or self.state.stopped:
            return 0
        self._teller(notices.Interrupted(self.state.history.step, str(self.run_dir.path)))
        return EXIT_INTERRUPTED

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    # What the parts of the coordinator see of the run, and may do to it (run.py)

    @property
    def history(self) -> History:
        return self._journal.history

    def hear(self, said: events.Event | events.Aside) -> None:
        if (looking := self._claims.look_at(said) or self._audits.look_at(said)) is not None:
            self._service.taken(said)
            self.spawn(self._looked_into(said, looking))
        elif not isinstance(said, events.Aside):
            self.submit(said)

    def submit(self, event: events.Event) -> None:
        self._events.put_nowait(event)

    def send(self, peer: str, **body: Any) -> None:
        self._service.send(peer, **body)

    def tell(self, notice: notices.Notice) -> None:
        self._teller(notice)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._chores.add(task := asyncio.create_task(work))
        task.add_done_callback(self._chore_ended)

    def fail(self, error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error)
        elif isinstance(error, OSError):
            self._teller(notices.DiskFailed(str(self.run_dir.path), error.strerror or str(error)))

    # Events

    async def _looked_into(self, event: events.Event | events.Aside, looking: Coroutine[Any, Any, None]) -> None:
        try:
            await looking
        except (OSError, UserError):
            raise
        except Exception as e:
            self._blame(event, e)

    def _chore_ended(self, task: asyncio.Task[None]) -> None:
        """One that failed ends the coordinator: whoever waits for what it would have done would wait for ever."""
        self._chores.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def _cut(self, layers: tuple[int, ...], first: FirstSnapshot) -> None:
        try:
            cut = await beside(first.cut, layers)
        except OSError as e:
            self.fail(e)
        except MemoryError:
            raise no_memory(self.spec.model.init or "") from None
        else:
            self.submit(events.CheckpointCut(layers, cut.parts, cut.source, cut.tied))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(timeouts.COORDINATOR_TICK)
            self.submit(events.Tick(await beside(self._room)))
            if self._notifier is not None and (text := self._long_wait.look(self.state, self._now())) is not None:
                self._notifier(text)

    def _room(self) -> int | None:
        try:
            return self._free(self.run_dir.path)
        except OSError:  # whoever writes there next finds out more
            return None

    async def _lead(self) -> None:
        """One event after another, also when the run is over: whoever comes then is told so."""
        while True:
            event, now = await self._events.get(), self._now()
            self._service.taken(event)
            over_before = self.state.history.over
            try:
                state, records, commands = machine.apply(self.state, event, now)
            except Exception as e:
                self._blame(event, e)
                continue
            if records:
                await self._in_order(self._journal.append, records, now)
            self.state = state  # from here on others see it: all that led to it is on disk
            if records:
                self._note(records)
                self._upkeep.journalled()
            self._follow(event, commands)
            if self.state.history.over and not over_before:
                await self._write_summary()
                self.spawn(self._end_when_the_silent_know())

    def _follow(self, event: events.Event, commands: list[events.Command]) -> None:
        """What an event leads to outside the machine. Where one part fails, the peer that sent the event is dismissed
        and the other parts go on: the machine counts on them."""
        parts = [partial(self._welcome, event), *(partial(self._do, command) for command in commands)]
        for part in (*parts, partial(self._claims.hear, event), partial(self._audits.hear, event)):
            try:
                part()
            except (OSError, UserError):
                raise
            except Exception as e:
                if isinstance(event, events.Left):  # it is gone, and may come back: none of that was its doing
                    traceback.print_exception(e)
                    logs.bug(e)
                else:
                    self._blame(event, e)

    def _welcome(self, event: events.Event) -> None:
        """Tells the other parts of the coordinator that a peer joined or left."""
        if isinstance(event, events.Left):
            self._dispatch.forget(event.peer)
            if isinstance(event.why, NoHeartbeat):
                self._silent[event.peer] = time.monotonic()
        if isinstance(event, events.Joined):
            self._silent.pop(event.peer.id, None)
            self._service.joined_processed(event.peer.id)
            self._dispatch.greet(event.peer.id)
            if len(self._hosts) > 1:
                self._service.send(event.peer.id, addresses=pb.Addresses(hosts=self._hosts))

    async def _in_order(self, write: Callable[..., None], *arguments: Any) -> None:
        """In a thread that does nothing else, one after another: others may be busy with large files."""
        await asyncio.get_running_loop().run_in_executor(self._writing, write, *arguments)

    def _now(self) -> float:
        return self._clock + time.monotonic()

    def _blame(self, event: events.Event | events.Aside, error: Exception) -> None:
        """An event broke the machine, whose state is as before. The peer that caused it is dismissed, nobody else.

        Without such a peer the fault is ours, and the coordinator stops. What audits found is ours too, but the run
        does not depend on it."""
        traceback.print_exception(error)
        logs.bug(error)
        peer = event.peer.id if isinstance(event, events.Joined) else getattr(event, "peer", None)
        trouble = event.what if isinstance(event, events.Trouble) else None
        if isinstance(trouble, OfAudits) or isinstance(event, events.Accused):
            return
        if not isinstance(peer, str) or isinstance(trouble, UnprocessableMessage):  # not even its dismissal works
            self.fail(own_fault(type(event).__name__, error))
            return
        why = UnprocessableMessage(type(event).__name__)
        if isinstance(event, events.Joined):  # the machine does not know this peer, and would not dismiss it
            self._service.joined_processed(peer)
            self._do(events.Dismiss(peer, why, EXIT_OUTSIDE))
        self.submit(events.Trouble(peer, why))

    def _note(self, records: list[Record]) -> None:
        logs.COORDINATOR.debug("journalled %s", records)
        if any(isinstance(r, Decided) for r in records):
            self._totals.saw_decision()

    # Commands

    def _do(self, command: events.Command) -> None:
        match command:
            case events.Tell(notice):
                self._teller(notice)
            case events.WriteRow(row):
                self._write_row(row)
            case events.MakeSpare() | events.Wait() | events.Dismiss():
                self._dispatch.explain(command)
            case events.CutCheckpoint(layers):
                assert self._first is not None
                self.spawn(self._cut(layers, self._first))
            case events.AssignStage():
                self._dispatch.assign(command)
            case events.GoOn():
                self._dispatch.go_on(command)
            case events.PrepareStage():
                self._dispatch.prepare(command)
            case events.SendTurn(_, task):
                if task is not None and task.kind == "step":
                    self._totals.saw_grant()
                self._dispatch.turn(command)
            case events.SendBasis():
                self._dispatch.basis(command)
            case events.TellPause():
                self._dispatch.pause(command)
            case events.KeepSnapshots():
                self._dispatch.keep(command)
                self._upkeep.settle()
                if self._subspace is not None:
                    history = self.state.history
                    self.spawn(self._subspace.forget(history.basis_version, set(bases_needed(history))))
            case events.Quit():
                self._end()
            case _:
                assert_never(command)

    # What the owner sees

    def _status(self) -> pb.RunStatus:
        door = self._service.door
        refused = sum(door.refused.values()) if door else 0
        return self._board.show(self.state, self._now(), refused, self._totals.began, self._contributions)

    def _write_row(self, row: dict[str, Any]) -> None:
        self._metrics.write(row)
        if row["event"] == "step":
            self._totals.add(row)
            if self._contributions.add(row):
                self._metrics.write(self._contributions.row(row["lineage"], row["step"]))
        speed = tokens_per_s(self.state.measured.decided_at, self.spec.batch.size * self.spec.model.context)
        if line := self._progress.line(row, speed):
            self.say(line)

    async def _write_summary(self) -> None:
        relayed = self._service.routes.relayed()
        await self._in_order(self._totals.write, self.run_dir.path / SUMMARY, self.state.history, self.spec, relayed)
