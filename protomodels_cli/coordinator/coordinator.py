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
from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_never

from protomodels_cli.coordinator import events, machine
from protomodels_cli.coordinator.feed import Feed
from protomodels_cli.coordinator.history import Decided, Record
from protomodels_cli.coordinator.journal import Journal
from protomodels_cli.coordinator.messages import route_pair, turn_message
from protomodels_cli.coordinator.run_dir import RunDir
from protomodels_cli.coordinator.service import Service
from protomodels_cli.coordinator.snapshots import Snapshots
from protomodels_cli.coordinator.state import Task
from protomodels_cli.coordinator.status import Totals, describe
from protomodels_cli.coordinator.subspace import Subspace
from protomodels_cli.data.prepare import Corpus
from protomodels_cli.errors import EXIT_INTERRUPTED, EXIT_OUTSIDE, EXIT_STOPPED, UserError
from protomodels_cli.files import write_whole
from protomodels_cli.model import grassmann
from protomodels_cli.model.t_fixed import VERSION as T_FIXED_VERSION
from protomodels_cli.observe.metrics import JsonLines, strict
from protomodels_cli.observe.progress import Progress
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.spec.sizes import StageMemory
from protomodels_cli.wire.pb import pmtrain_pb2 as pb

TICK = 0.5
ROOM_FOR_NAMES = 1 << 20  # beside the numbers of a snapshot's part


class Coordinator:
    def __init__(self, spec: RunSpec, corpus: Corpus, run_dir: RunDir, say: Callable[[str], None]):
        self.spec, self.run_dir, self.say = spec, run_dir, say
        self._events: asyncio.Queue[events.Event] = asyncio.Queue()
        self._feed = Feed(spec, corpus)
        self._subspace = None if spec.subspace.form == "dense" else Subspace(spec, run_dir.path / "basis")
        start = ("", (0, "")) if self._subspace is None else self._first_hashes(self._subspace)
        self.state = machine.start(spec, *start)
        self._snapshots = Snapshots(run_dir.path / "snapshots", self.state.history.lineage, spec.snapshots.keep)
        self._service = Service(spec, run_dir, self.tell, self._take_upload, self._admit_upload, self._status)
        self._progress, self._totals = Progress(spec.steps), Totals()
        # Wall time that a step of the system's clock does not disturb: timeouts are measured with it.
        self._clock = time.time() - time.monotonic()
        self._started = self._now()
        self._over = asyncio.Event()
        self._basis_offered = 0  # the last step whose basis was handed in
        self._fed = 0  # the last step whose ids stage 0 has
        self._tickets: list[str] = []
        self._first_grant: tuple[float, float] | None = None  # wall and CPU time
        self._last_commit: tuple[float, float] = (0.0, 0.0)
        self._interrupted = asyncio.Event()

    @staticmethod
    def _first_hashes(subspace: Subspace) -> tuple[str, tuple[int, str]]:
        return subspace.sha256(0), (T_FIXED_VERSION, subspace.t_fixed_sha256)

    async def run(self, bind: str, host: str, port: int, announce: Callable[[str], None]) -> int:
        """Open the door and lead the run to its end. Returns the exit code."""
        try:
            port = await self._service.open(bind, port)
        except UserError:
            await self._service.close()
            raise
        # Only now: a start that fails leaves no run behind.
        self._journal = Journal(self.run_dir.path / "journal.sqlite")
        self._metrics = JsonLines(self.run_dir.path / "metrics.jsonl")
        self._log = JsonLines(self.run_dir.path / "events.jsonl")
        link = self.run_dir.write_link(host, port)
        announce(str(link))
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError, RuntimeError):
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._interrupted.set)
        leading, ticking = asyncio.create_task(self._lead()), asyncio.create_task(self._tick())
        waiting, over = asyncio.create_task(self._interrupted.wait()), asyncio.create_task(self._over.wait())
        ends: set[asyncio.Task[Any]] = {leading, waiting, over}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if leading.done():
                await leading  # raises what ended it
            if self.state.history.stopped is not None and not self._interrupted.is_set():
                stopped = self.state.history.stopped
                self.say(
                    f"    fix:  {stopped.fix}\nthe run stays here to be looked at (pmtrain status); Ctrl-C ends it"
                )
                await waiting
            return self._exit_code()
        except OSError as e:
            self._dismiss_everyone("the coordinator's disk failed")
            raise UserError(
                f"{self.run_dir.path} cannot be written any more: {e.strerror or e}",
                "free space there; all that was decided before is in the journal",
            ) from None
        finally:
            for task in (ticking, *ends):
                task.cancel()
            await self._service.close()
            self._journal.close()
            with contextlib.suppress(OSError):  # a full disk was reported already
                self._metrics.close()
                self._log.close()

    def _exit_code(self) -> int:
        if self.state.history.ended is not None:
            return 0
        if self.state.history.stopped is not None:
            return EXIT_STOPPED
        self._dismiss_everyone("the coordinator was stopped by its owner")
        print(
            f"interrupted after step {self.state.history.step}; the run so far is in {self.run_dir.path}",
            file=sys.stderr,
        )
        return EXIT_INTERRUPTED

    def _dismiss_everyone(self, why: str) -> None:
        for peer in self.state.peers:
            fix = "join again once it runs again"
            self._service.send(peer, dismissal=pb.Dismissal(why=why, fix=fix, exit_code=EXIT_OUTSIDE))

    # Events

    def tell(self, event: events.Event) -> None:
        self._events.put_nowait(event)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self.tell(events.Tick())

    async def _lead(self) -> None:
        """One event after another, also when the run is over: whoever comes then is told so."""
        while True:
            event, now = await self._events.get(), self._now()
            try:
                self.state, records, commands = machine.apply(self.state, event, now)
            except Exception as e:
                self._blame(event, e)
                continue
            if records:
                await asyncio.to_thread(self._journal.append, records, now)
                self._note(records)
            for command in commands:
                self._do(command)
            if self.state.history.over and not self._over.is_set():
                if self.state.history.ended is not None:
                    self._write_summary()
                self._over.set()

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
            self._last_commit = time.time(), time.process_time()

    # Commands

    def _do(self, command: events.Command) -> None:
        match command:
            case events.Say(text):
                self._log.write({"at": time.time(), "text": text})
                self.say(text)
            case events.WriteRow(row):
                self._write_row(row)
            case events.KeepSpare(peer, why):
                self._service.send(peer, spare=pb.Spare(why=why))
            case events.PlaceStage():
                self._place(command)
            case events.SendTurn(decision, task):
                self._send_turn(decision, task)
            case events.SendBasis(version):
                assert self._subspace is not None
                message = pb.NewBasis(basis=self._subspace.basis_message(version))
                self._to_holders(basis=message)
            case events.CompleteSnapshot(step):
                self.tell(self._complete_snapshot(step))
            case events.DropSnapshot(step):
                self._snapshots.drop(step)
            case events.Dismiss(peer, why, fix, exit_code):
                self._service.send(peer, dismissal=pb.Dismissal(why=why, fix=fix, exit_code=exit_code))
            case _:
                assert_never(command)

    def _complete_snapshot(self, step: int) -> events.Event:
        try:
            self._snapshots.complete(step, self.state.stages)
        except OSError as e:
            return events.SnapshotFailed(step, e.strerror or str(e))
        return events.SnapshotComplete(step)

    def _to_holders(self, **body: Any) -> None:
        for peer in self.state.history.holders:
            self._service.send(peer, **body)

    def _place(self, command: events.PlaceStage) -> None:
        state, stage = self.state, command.stage
        history, holders = state.history, [state.peers[p] for p in state.history.holders]
        if stage == 0:
            self._fed = history.step
            self._renew_tickets(len(holders) - 1)
        place = pb.Place(
            task=command.task,
            generation=history.generation,
            stage=stage,
            layers_per_stage=history.layers,
        )
        if self._subspace is not None:
            place.basis.CopyFrom(self._subspace.basis_message(history.basis_version))
            place.t_fixed.CopyFrom(self._subspace.table_message())
        if stage > 0:
            pair = route_pair(holders[stage - 1], holders[stage], self._tickets[stage - 1], state.relay_all)
            place.previous.CopyFrom(pair[1])
        if stage < len(holders) - 1:
            pair = route_pair(holders[stage], holders[stage + 1], self._tickets[stage], state.relay_all)
            place.next.CopyFrom(pair[0])
        self._service.send(command.peer, place=place)

    def _renew_tickets(self, boundaries: int) -> None:
        door = self._service.door
        assert door is not None
        for ticket in self._tickets:
            door.forbid(ticket)
        self._tickets = [secrets.token_urlsafe(16) for _ in range(boundaries)]
        for ticket in self._tickets:
            door.allow(ticket)

    def _send_turn(self, decision: Decided | None, task: Task | None) -> None:
        turn = turn_message(self.state, decision, task, self._feed.evaluation_microbatches)
        if task is not None and task.kind == "sync" and self._subspace is not None:
            version, _ = self.state.history.basis_for(task.step)
            turn.sync.basis.CopyFrom(self._subspace.basis_message(version))
            turn.sync.t_fixed.CopyFrom(self._subspace.table_message())
            self._subspace.forget_before(version)
        if task is not None and task.kind == "step" and self._first_grant is None:
            self._first_grant = time.time(), time.process_time()
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

    # What peers hand in

    def _admit_upload(self, peer: str, header: pb.UploadHeader) -> Path | None:
        """Before a byte of it is taken. A path: where a snapshot's part goes. Raises ValueError: not wanted."""
        state, stage = self.state, self.state.stage_of(peer)
        if stage is None or header.generation != state.history.generation:
            raise ValueError("this peer holds no stage")
        if header.kind == pb.UploadHeader.SNAPSHOT_PART:
            saving = state.task is not None and state.task.kind == "save" and state.task.step == header.step
            if not saving or self._snapshots.has(header.step, stage):
                raise ValueError("no snapshot is being taken that this could be a part of")
            end = sum(state.history.layers[: stage + 1])
            if header.size > StageMemory(self.spec).kept(end - state.history.layers[stage], end) + ROOM_FOR_NAMES:
                raise ValueError("a part larger than its stage")
            return self._snapshots.part(header.step, stage)
        asked = stage == state.stages - 1 and state.owed == header.step and self._basis_offered < header.step
        if self._subspace is None or not asked:
            raise ValueError("nobody asked this stage for a basis")
        if header.size != (self._subspace.basis_bytes if header.moved else 0):
            raise ValueError("not the size of a basis")
        return None

    def _take_upload(self, peer: str, header: pb.UploadHeader, content: Path | bytes) -> None:
        """Raises ValueError on what cannot be."""
        stage = self.state.stage_of(peer)
        if stage is None or header.generation != self.state.history.generation:
            raise ValueError("this peer holds no stage any more")
        if isinstance(content, Path):
            self._snapshots.arrived(header.step, stage, header.sha256)
            return
        assert self._subspace is not None
        self._basis_offered = header.step
        row, sha256 = _numbers(header.row_json), None
        if header.moved:
            sha256 = self._subspace.accept(self.state.history.basis_version + 1, content).sha256
        self.tell(events.SubspaceReported(peer, header.generation, header.step, row, sha256))

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
            self.say(f"basis {row['version']} from step {row['first_step']}: turns by up to {row['angle_max']:.3f} rad")

    def _relayed(self) -> list[dict[str, int]]:
        """Bytes that each boundary's link sent through the door: none where neighbours dial each other."""
        door = self._service.door
        assert door is not None
        moved = [door.relayed(ticket) for ticket in self._tickets]
        return [{"forward": m["dial"], "backward": m["accept"]} for m in moved]  # the earlier stage dials

    def _write_summary(self) -> None:
        history, totals = self.state.history, self._totals
        assert history.ended is not None
        assert self._first_grant is not None
        seconds = self._last_commit[0] - self._first_grant[0]
        summary = {
            "steps": history.step,
            "stages": len(history.layers),
            "seconds": seconds,
            "loss_first": totals.loss_first,
            "loss_last": totals.loss_last,
            "eval_loss": history.eval_loss,
            "tokens_per_s": totals.tokens / seconds,
            **totals.bytes_summary(self.spec, len(history.layers)),
            "weights_sha256": history.ended.weights_sha256,
            "layers_per_stage": list(history.layers),
            "cpu_seconds": {
                "coordinator": self._last_commit[1] - self._first_grant[1],
                "stages": totals.cpu_s,
            },
            "relayed_bytes": self._relayed(),
            "peak_memory_bytes": totals.peak_memory,
            "most_in_flight": totals.most_in_flight,
            "spec_sha256": self.spec.sha256(),
            "run_dir": str(self.run_dir.path),
        }
        write_whole(self.run_dir.path / "summary.json", json.dumps(strict(summary), indent=1).encode() + b"\n")


def _numbers(row_json: str) -> dict[str, float]:
    """What the metrics say of a basis: these names, and numbers, whatever a peer sends."""
    try:
        said = json.loads(row_json[:10_000] or "{}")
        return {name: float(said[name]) for name in grassmann.REPORTED if name in said}
    except (TypeError, RecursionError):
        raise ValueError("the metrics of a basis must be numbers by name") from None
