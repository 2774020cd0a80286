"""The coordinator: one loop that takes events, asks the machine, writes the journal, and does what was decided."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, assert_never

from protomodels_cli.coordinator import events, machine
from protomodels_cli.coordinator.feed import Feed
from protomodels_cli.coordinator.history import Decided, History, Record
from protomodels_cli.coordinator.journal import Journal, create
from protomodels_cli.coordinator.messages import keep_message, place_message, route_pair, turn_message
from protomodels_cli.coordinator.rebuild import check_beside, rebuild
from protomodels_cli.coordinator.run_dir import BASES, JOURNAL, METRICS, SNAPSHOTS, RunDir
from protomodels_cli.coordinator.service import Service
from protomodels_cli.coordinator.snapshots.copies import Copies
from protomodels_cli.coordinator.snapshots.store import Snapshots
from protomodels_cli.coordinator.snapshots.upkeep import Upkeep
from protomodels_cli.coordinator.snapshots.uploads import Uploads
from protomodels_cli.coordinator.state import Task
from protomodels_cli.coordinator.status import Totals, bytes_summary, describe
from protomodels_cli.coordinator.subspace import Subspace
from protomodels_cli.data.prepare import Corpus
from protomodels_cli.errors import EXIT_INTERRUPTED, UserError
from protomodels_cli.files import write_whole
from protomodels_cli.observe.metrics import JsonLines, first_step, last_step, strict
from protomodels_cli.observe.progress import Progress
from protomodels_cli.protocol.t_fixed import VERSION as T_FIXED_VERSION
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

TICK = 0.5
# How long peers may take to come back and hear that the run is done: spares, whom the journal does not know (they try
# every other second), and those that held a stage, where a kill came before they were told.
SPARES_SECONDS, HOLDERS_SECONDS = 10.0, 60.0


class Coordinator:
    def __init__(self, corpus: Corpus, run_dir: RunDir, say: Callable[[str], None]):
        self.spec, self.run_dir, self.say = run_dir.spec, run_dir, say
        self._events: asyncio.Queue[events.Event] = asyncio.Queue()
        self._feed = Feed(self.spec, corpus)
        self._subspace = Subspace(self.spec, run_dir.path / BASES) if self.spec.subspace.has_basis else None
        basis, t_fixed = ("", (0, "")) if self._subspace is None else self._first_hashes(self._subspace)
        self.state = machine.start(self.spec, basis, t_fixed)
        self._snapshots = Snapshots(run_dir.path / SNAPSHOTS, run_dir.identity, t_fixed, run_dir.path / BASES)
        self._uploads = Uploads(lambda: self.state, self._subspace, self._snapshots, self.tell, self._fail)
        self._service = Service(self.spec, run_dir, self.tell, self._uploads, self._status)
        copy_to, name = self.spec.snapshots.copy_to, f"{self.spec.name}-{run_dir.authority.fingerprint[:8]}"
        copies = None if copy_to is None else Copies(copy_to, name)
        self._upkeep = Upkeep(self._snapshots, copies, lambda: self._journal.history, self._say, self._fail)
        self._progress, self._totals = Progress(self.spec.steps), Totals()
        # Wall time that a step of the system's clock does not disturb: timeouts are measured with it.
        self._clock = time.time() - time.monotonic()
        self._started = self._now()
        self._over: asyncio.Future[None] = asyncio.get_event_loop().create_future()
        self._chores: set[asyncio.Task[None]] = set()
        self._writing, self._books = ThreadPoolExecutor(1), contextlib.ExitStack()
        self._fed = 0  # the last step whose ids stage 0 has
        self._tickets: list[str] = []
        self._began: float | None = None  # when the run's first step was granted
        self._decided = 0.0  # when its last one was decided
        self._cpu_s: tuple[float, float] | None = None  # of this process, at its first grant and at its last decision
        self._interrupted = asyncio.Event()

    @staticmethod
    def _first_hashes(subspace: Subspace) -> tuple[str, tuple[int, str]]:
        return subspace.sha256(0), (T_FIXED_VERSION, subspace.t_fixed_sha256)

    async def run(self, bind: str, host: str, port: int, announce: Callable[[str], None]) -> int:
        """Open the door and lead the run to its end. Returns the exit code."""
        try:
            if self.run_dir.resumed:  # a journal that cannot be believed opens no door
                self._open_books()
            port = await self._service.open(bind, port)
            if self.run_dir.resumed:
                self._come_back()
            else:  # only now: a start that fails leaves no run behind
                create(self.run_dir.path / JOURNAL, self.run_dir.identity, self.state.history)
                self._open_books()
            announce(str(self.run_dir.write_link(host, port)))
            return await self._lead_until_over()
        except OSError as e:
            raise UserError(
                f"{self.run_dir.path} cannot be written any more: {e.strerror or e}",
                "free space there and start it again with the same command: all that was decided is in the journal",
            ) from None
        finally:
            await self._service.close()
            self._writing.shutdown()  # a write that was under way is finished
            self._books.close()
            if self._over.done() and not self._over.cancelled():
                self._over.exception()  # looked at, whatever else was raised: asyncio would print it as forgotten

    def _open_books(self) -> None:
        path, identity, found = self.run_dir.path, self.run_dir.identity, list[str]()
        if self.run_dir.rebuild:
            rebuild(path, identity, self.state.history, found.append)
        self._journal = Journal(path / JOURNAL, identity)
        self._books.callback(self._journal.close)
        check_beside(path, identity, self._journal.history)
        self._metrics, self._log = (JsonLines(path / f, self.run_dir.resumed) for f in (METRICS, "events.jsonl"))
        for file in (self._metrics, self._log):
            self._books.callback(_close, file)
        for text in found:
            self._say(text)

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
        """Of the last snapshot, unless the owner does not want to wait for that."""
        self._interrupted.clear()
        ends = [asyncio.create_task(self._upkeep.end()), asyncio.create_task(self._interrupted.wait())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        ends[1].cancel()
        if ends[0].done():
            await ends[0]  # raises what went wrong
        else:
            self._say("not waited for: the last snapshot is not copied")

    def _come_back(self) -> None:
        """As the journal has it."""
        history = self._journal.history
        self._mend_metrics(history)
        self._decided = self._journal.last_written
        self.state = machine.resume(self.spec, self.state.t_fixed, history, self._now())
        if self._subspace is not None:
            for version, sha256 in _bases(history).items():
                self._subspace.load(version, sha256)
        self._snapshots.settle(history.snapshots, history.dropped)
        self._upkeep.settle()
        for mark in history.pending:
            self._uploads.look(mark.lineage, mark.step)
        if history.over:  # killed between the end and its last words: whoever still waits is told
            told = (self.run_dir.path / "summary.json").exists()  # which is written after that
            if not told:
                self._write_summary()
            self._say("the run is done")
            self._chore(self._end_when_all_know(told))
            return
        newest = f"the snapshot of step {history.newest.step}" if history.newest.step else "no snapshot yet"
        self._say(f"going on after step {history.step} of {self.spec.steps} ({newest})")

    async def _end_when_all_know(self, told: bool) -> None:
        """Peers redial, and are dismissed as they come."""
        began, holders = time.monotonic(), set(self.state.history.holders)
        await asyncio.sleep(SPARES_SECONDS)
        while not told and not holders <= set(self.state.peers) and time.monotonic() - began < HOLDERS_SECONDS:
            await asyncio.sleep(TICK)
        self._end()

    def _mend_metrics(self, history: History) -> None:
        """The journal may be one decision ahead of the metrics: its row is made up for, without what only the stages
        knew."""
        path, d = self.run_dir.path / METRICS, history.decision
        last = last_step(path)
        if d is not None and (last is None or (last["lineage"], last["step"]) != (history.lineage, d.step)):
            row = {"event": "step", "lineage": history.lineage, "step": d.step, "loss": d.loss, "lr": d.lr}
            tokens = self.spec.batch.size * self.spec.model.context
            self._metrics.write(row | {"grad_norm": d.norm, "applied": d.apply, "tokens": tokens, "seconds": None})
        first = first_step(path)
        self._began = None if first is None else first["at"] - (first["seconds"] or 0.0)

    def _exit_code(self) -> int:
        if self.state.history.ended is not None or self.state.stopped:
            return 0
        print(
            f"interrupted after step {self.state.history.step}; peers wait for it to come back. To go on: "
            f"pmtrain coordinator --resume --run-dir {self.run_dir.path}",
            file=sys.stderr,
        )
        return EXIT_INTERRUPTED

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _fail(self, error: OSError) -> None:
        """The disk: nothing can be decided any more."""
        if not self._over.done():
            self._over.set_exception(error)
        else:
            self._say(f"{self.run_dir.path} cannot be written any more: {error.strerror or error}")

    # Events

    def tell(self, event: events.Event) -> None:
        if isinstance(event, events.SnapshotLost):
            self._chore(self._look_into(event))
        else:
            self._events.put_nowait(event)

    def _chore(self, work: Coroutine[Any, Any, None]) -> None:
        self._chores.add(task := asyncio.create_task(work))
        task.add_done_callback(self._chores.discard)

    async def _look_into(self, lost: events.SnapshotLost) -> None:
        """A peer cannot read its part of a snapshot. What is here decides: a peer's word costs nobody a snapshot."""
        stage, history = self.state.stage_of(lost.peer), self.state.history
        mark = next((m for m in history.snapshots if (m.lineage, m.step) == (lost.lineage, lost.step)), None)
        if stage is None or lost.generation != history.generation or mark is None or not mark.parts:
            return
        whole = await self._upkeep.is_whole(mark, stage)
        self._events.put_nowait(replace(lost, whole_here=whole))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self.tell(events.Tick())

    async def _lead(self) -> None:
        """One event after another, also when the run is over: whoever comes then is told so."""
        while True:
            event, now = await self._events.get(), self._now()
            over_before = self.state.history.over
            try:
                self.state, records, commands = machine.apply(self.state, event, now)
            except Exception as e:
                self._blame(event, e)
                continue
            if records:
                # In a thread of its own: others may be busy with large files.
                await asyncio.get_running_loop().run_in_executor(self._writing, self._journal.append, records, now)
                self._note(records)
            if isinstance(event, events.Joined):
                self._service.has_heard_of(event.peer.id)
                # It may have parts that are not needed, or that never arrived.
                self._service.send(event.peer.id, keep=keep_message(self.state.history))
            for command in commands:
                self._do(command)
            if self.state.history.over and not over_before:
                self._write_summary()
                self._end()

    def _now(self) -> float:
        return self._clock + time.monotonic()

    def _blame(self, event: events.Event, error: Exception) -> None:
        """What a peer said broke the machine, whose state is as before: the peer goes, the traceback stays for us."""
        peer = getattr(event, "peer", None)
        if not isinstance(peer, str) or isinstance(event, events.Trouble):
            raise error
        traceback.print_exception(error)
        self.tell(events.Trouble(peer, f"it sent what the coordinator cannot take ({type(event).__name__})"))

    def _note(self, records: list[Record]) -> None:
        if any(isinstance(r, Decided) for r in records):
            self._decided, cpu = time.time(), time.process_time()
            self._cpu_s = (self._cpu_s or (cpu, cpu))[0], cpu

    # Commands

    def _do(self, command: events.Command) -> None:
        match command:
            case events.Say(text):
                self._say(text)
            case events.WriteRow(row):
                self._write_row(row)
            case events.KeepSpare(peer, why):
                self._service.send(peer, spare=pb.Spare(why=why))
            case events.HoldOn(peer, why):
                self._service.send(peer, hold_on=pb.HoldOn(why=why))
            case events.PlaceStage():
                self._place(command)
            case events.SendTurn(decision, task, save):
                self._send_turn(decision, task, save)
            case events.SendBasis(version):
                assert self._subspace is not None
                self._to_holders(basis=pb.NewBasis(basis=self._subspace.basis_message(version)))
            case events.KeepSnapshots():
                self._service.send_all(keep=keep_message(self.state.history))
                self._upkeep.settle()
                if self._subspace is not None:
                    self._subspace.forget(self.state.history.basis_version, set(_bases(self.state.history)))
            case events.Dismiss(peer, why, fix, exit_code):
                self._service.send(peer, dismissal=pb.Dismissal(why=why, fix=fix, exit_code=exit_code))
            case events.Quit():
                self._end()
            case _:
                assert_never(command)

    def _say(self, text: str) -> None:
        self._log.write({"text": text})
        self.say(text)

    def _to_holders(self, **body: Any) -> None:
        for peer in self.state.history.holders:
            self._service.send(peer, **body)

    def _place(self, command: events.PlaceStage) -> None:
        state, stage = self.state, command.stage
        history, holders = state.history, [state.peers[p] for p in state.history.holders]
        if stage == 0:
            self._fed = history.step
            self._renew_tickets(len(holders) - 1)
        place = place_message(state, stage, command.task, command.keep)
        if self._subspace is not None:
            place.t_fixed.CopyFrom(self._subspace.table_message())
            if not command.keep and not history.newest.parts:
                place.basis.CopyFrom(self._subspace.basis_message(0))
        if stage > 0:
            pair = route_pair(holders[stage - 1], holders[stage], self._tickets[stage - 1], state.relay_all)
            place.previous.append(pair[1])
        if stage < len(holders) - 1:
            pair = route_pair(holders[stage], holders[stage + 1], self._tickets[stage], state.relay_all)
            place.next.append(pair[0])
        self._service.send(command.peer, place=place)

    def _renew_tickets(self, boundaries: int) -> None:
        door = self._service.door
        assert door is not None
        for ticket in self._tickets:
            door.forbid(ticket)
        self._tickets = [secrets.token_urlsafe(16) for _ in range(boundaries)]
        for ticket in self._tickets:
            door.allow(ticket)

    def _send_turn(self, decision: Decided | None, task: Task | None, save: bool) -> None:
        turn = turn_message(self.state, decision, task, save, self._feed.evaluation_microbatches)
        if task is not None and task.kind == "step" and self._cpu_s is None:
            self._cpu_s = time.process_time(), time.process_time()
            self._began = self._began or time.time()
            self._progress = Progress(self.spec.steps)  # its clock starts here
        self._to_holders(turn=turn)
        if task is not None:
            self._feed_first_stage(task)

    def _feed_first_stage(self, task: Task) -> None:
        """This task's ids, and the next step's ahead of its turn."""
        first = self.state.history.holders[0]
        if task.kind == "evaluation":
            for feed in self._feed.evaluation(task.step):
                self._service.send(first, feed=feed)
        if task.kind == "step":
            for step in range(max(self._fed + 1, task.step), min(task.step + 1, self.spec.steps) + 1):
                for feed in self._feed.step(step):
                    self._service.send(first, feed=feed)
                self._fed = step

    # What the owner sees

    def _status(self) -> pb.RunStatus:
        door = self._service.door
        refused = sum(door.refused.values()) if door else 0
        return describe(self.state, self._now(), self._started, refused)

    def _write_row(self, row: dict[str, Any]) -> None:
        self._metrics.write(row)
        if row["event"] == "step":
            self._totals.add(row)
            line = self._progress.line(
                row["step"], row["loss"], row["lr"], row["grad_norm"], row["tokens"], row["applied"]
            )
            if line:
                self.say(line)
        elif row["event"] == "eval":
            self.say(f"eval  at step {row['step']}: held-out loss {row['loss']:.4f}")
        elif row["event"] == "subspace" and "first_step" in row:
            turn = row.get("angle_max", 0.0)
            self.say(f"basis {row['version']} from step {row['first_step']}: turns by up to {turn:.3f} rad")

    def _relayed(self) -> list[dict[str, int]]:
        """Bytes that each boundary's link sent through the door: none where neighbours dial each other."""
        door = self._service.door
        assert door is not None
        moved = [door.relayed(ticket) for ticket in self._tickets]
        return [{"forward": m["dial"], "backward": m["accept"]} for m in moved]  # the earlier stage dials

    def _write_summary(self) -> None:
        history, totals = self.state.history, self._totals
        assert history.ended is not None
        seconds = self._decided - (self._began or self._decided)
        cpu_before, cpu = self._cpu_s or (0.0, 0.0)  # none, if all that was left was to finish
        tokens = history.step * self.spec.batch.size * self.spec.model.context
        summary = {
            "steps": history.step,
            "stages": len(history.layers),
            "seconds": seconds,
            "loss_first": history.loss_first,
            "loss_last": history.decision.loss if history.decision else None,
            "eval_loss": history.eval_loss,
            "tokens_per_s": tokens / seconds if seconds else 0.0,
            **bytes_summary(history, self.spec),
            "weights_sha256": history.ended.weights_sha256,
            "layers_per_stage": list(history.layers),
            "cpu_seconds": {
                "coordinator": cpu - cpu_before,
                "stages": totals.cpu_s,
            },
            "relayed_bytes": self._relayed(),
            "peak_memory_bytes": totals.peak_memory,
            "most_in_flight": totals.most_in_flight,
            "steps_redone": history.redone,
            "lineage": history.lineage,
            "generations": history.generation,
            "spec_sha256": self.spec.sha256(),
            "run_dir": str(self.run_dir.path),
        }
        write_whole(self.run_dir.path / "summary.json", json.dumps(strict(summary), indent=1).encode() + b"\n")


def _close(lines: JsonLines) -> None:
    with contextlib.suppress(OSError):  # a full disk was reported already
        lines.close()


def _bases(history: History) -> dict[int, str]:
    """Version and hash of every basis that may still be needed."""
    found = {mark.basis_version: mark.basis_sha256 for mark in (*history.snapshots, *history.pending)}
    found[history.basis_version] = history.basis_sha256
    waiting = [mark.next_basis for mark in (*history.snapshots, *history.pending)]
    found |= {new.version: new.sha256 for new in (*waiting, history.next_basis) if new is not None}
    return found
