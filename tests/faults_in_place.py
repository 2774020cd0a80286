"""Faults inside a process: its memory, disk, device and clock, and the version it is of."""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import Any

from marks import first, mark


def flip_bit(patch: Any, what: str, after_step: int) -> None:
    """Turn one bit of U or T_fixed in the memory of the stage that comes first to this step."""
    import torch

    from protomodels_cli.worker.stage_work import StageWork

    decide = StageWork.decide

    def and_flip(self: StageWork, step: int, *rest: Any) -> None:
        decide(self, step, *rest)
        if step == after_step and first():
            bits = self.stage.basis.u.view(torch.int32) if what == "u" else self.stage.t_fixed.signs
            bits[1, 1] ^= 1
            mark(what=what, after_step=step, stage=self.slice.index)

    patch.setattr(StageWork, "decide", and_flip)


def other_protocol(patch: Any) -> None:
    patch.setattr("protomodels_cli.worker.join.PROTOCOL", 99)
    mark()


def other_table(patch: Any) -> None:
    patch.setattr("protomodels_cli.protocol.t_fixed.VERSION", 99)
    patch.setattr("protomodels_cli.model.stage.VERSION", 99)
    mark()


def other_basis(patch: Any) -> None:
    """Builds its stage with a basis that is off by a bit."""
    import torch

    from protomodels_cli.worker.stage_work import StageWork

    begin = StageWork.__init__

    def wrong(self: StageWork, spec: Any, part: Any, basis: Any, *rest: Any) -> None:
        basis.u.view(torch.int32)[0, 0] ^= 1
        mark()
        begin(self, spec, part, basis, *rest)

    patch.setattr(StageWork, "__init__", wrong)


def other_defaults(patch: Any) -> None:
    """Reads the spec as another version of pmtrain would."""
    from protomodels_cli.spec.schema import RunSpec

    def other(self: RunSpec) -> str:
        mark()
        return "0" * 64

    patch.setattr(RunSpec, "sha256", other)


def never_ready(patch: Any) -> None:
    from protomodels_cli.worker.engine import Engine
    from protomodels_cli.worker.orders import Build

    order = Engine.order

    def or_not(self: Engine, o: Any) -> None:
        if isinstance(o, Build):
            mark()
        else:
            order(self, o)

    patch.setattr(Engine, "order", or_not)


def claims_parts(patch: Any) -> None:
    """A peer says that it has every part, answers what it is asked to prove, and never builds a stage."""
    from protomodels_cli.worker.snapshots.exchange import SnapshotExchange

    keep = SnapshotExchange.keep

    async def and_lie(self: SnapshotExchange, told: Any) -> None:
        await keep(self, told)
        for part in told.newest:
            mark()
            self._send(prefetched=part)

    async def make_up(self: SnapshotExchange, asked: Any) -> None:
        from protomodels_cli.wire.pb import pmtrain_pb2 as pb

        self._send(proof=pb.Proof(part=asked.part, nonce=asked.nonce, sha256="0" * 64))

    patch.setattr(SnapshotExchange, "keep", and_lie)
    patch.setattr(SnapshotExchange, "prove", make_up)
    never_ready(patch)


def wrong_clock(patch: Any) -> None:
    now, told = time.time, []

    def an_hour_ahead() -> float:
        if not told:
            told.append(True)
            mark()
        return now() + 3600

    patch.setattr("protomodels_cli.worker.join.time.time", an_hour_ahead)


def little_memory(patch: Any) -> None:
    def a_thousand_bytes(device: Any) -> int:
        mark()
        return 1000

    patch.setattr("protomodels_cli.worker.device.free_memory", a_thousand_bytes)


def full_disk_once(patch: Any) -> None:
    """The first snapshot part cannot be written."""
    from protomodels_cli.worker.snapshots import part_store

    save, tries = part_store.save_file, []

    def fails_once(*arguments: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            mark()
            raise OSError(28, "No space left on device")
        save(*arguments)

    patch.setattr(part_store, "save_file", fails_once)


def cannot_build(patch: Any) -> None:
    """The first that builds its stage from a snapshot has no memory for it."""
    from protomodels_cli.worker.stage_work import StageWork

    begin = StageWork.__init__

    def or_not(self: StageWork, spec: Any, part: Any, basis: Any, device: Any, saved: Any, *rest: Any) -> None:
        if saved is not None and first():
            mark(stage=part.index)
            raise MemoryError("not enough memory: you tried to allocate a stage")
        begin(self, spec, part, basis, device, saved, *rest)

    patch.setattr(StageWork, "__init__", or_not)


def spoils_its_part(patch: Any, step: int) -> None:
    """What is written of this step is damaged before it is handed in, once."""
    from protomodels_cli.worker.snapshots.part_store import PartStore

    write, done = PartStore.write, []

    def and_spoil(self: PartStore, lineage: int, at: int, *rest: Any) -> Any:
        part = write(self, lineage, at, *rest)
        if at == step and not done:
            done.append(at)
            self.path(part).write_bytes(b"x" + self.path(part).read_bytes()[1:])
            mark(step=at, stage=part.stage)
        return part

    patch.setattr(PartStore, "write", and_spoil)


def withholds_its_part(patch: Any, stage: int) -> None:
    """The first that holds this stage never hands a part in, and is well otherwise."""
    import asyncio

    from protomodels_cli.worker.snapshots import transfer

    upload, liar = transfer.upload_part, list[bool]()

    async def or_never(stub: Any, metadata: Any, parts: Any, part: Any, *how: Any) -> Any:
        if part.stage == stage and not liar:
            liar.append(first())
        if part.stage == stage and liar[0]:
            mark(stage=stage)
            await asyncio.Event().wait()
        return await upload(stub, metadata, parts, part, *how)

    patch.setattr(transfer, "upload_part", or_never)


def saves_nonsense(patch: Any, stage: int, what: str) -> None:
    """The first that holds this stage saves parts with the right hash whose norm is of another shape, or no number."""
    import torch

    from protomodels_cli.worker.snapshots.part_store import PartStore

    write, liar = PartStore.write, list[bool]()

    def or_nonsense(self: PartStore, lineage: int, step: int, of: int, state: Any) -> Any:
        if of == stage and not liar:
            liar.append(first())
        if of == stage and liar[0]:
            mark(stage=stage, what=what, step=step)
            name = next(name for name in state if name.endswith("attn_norm.weight"))
            norm = state[name][:1].clone() if what == "shape" else torch.full_like(state[name], torch.nan)
            state = {**state, name: norm}
        return write(self, lineage, step, of, state)

    patch.setattr(PartStore, "write", or_nonsense)


def slow_disk(patch: Any, seconds: float) -> None:
    """Whatever is synced of snapshots, parts and bases takes its time, and must not take the event loop's."""
    import threading

    sync = os.fsync

    def slowly(handle: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        if any(f"/{folder}" in path for folder in ("snapshots", "parts", "basis")):
            if threading.current_thread() is threading.main_thread():
                print(f"the event loop waits for {path}", file=sys.stderr, flush=True)
                os._exit(1)
            mark(path=path)
            time.sleep(seconds)
        sync(handle)

    patch.setattr(os, "fsync", slowly)


def slow(patch: Any, seconds: float) -> None:
    """Takes its time over every microbatch, and marks it."""
    from protomodels_cli.worker.stage_work import StageWork

    forward = StageWork.forward

    def slowly(self: StageWork, work: Any, message: Any) -> Any:
        mark(stage=self.slice.index, leg=work.leg, step=work.step, microbatch=message.microbatch)
        time.sleep(seconds)
        return forward(self, work, message)

    patch.setattr(StageWork, "forward", slowly)


def stuck_device(patch: Any, stage: int, step: int) -> None:
    """The first holder of this stage never comes back from this step's forward."""
    import threading

    from protomodels_cli.worker.stage_work import StageWork

    forward = StageWork.forward

    def or_never(self: StageWork, work: Any, message: Any) -> Any:
        if (self.slice.index, work.step) == (stage, step) and first():
            mark(stage=stage, step=step)
            threading.Event().wait()
        return forward(self, work, message)

    patch.setattr(StageWork, "forward", or_never)


def impatient(patch: Any, seconds: float) -> None:
    """A coordinator that no longer believes in a task after this time."""
    patch.setattr("protomodels_cli.coordinator.patience.STALL_SECONDS", seconds)
    mark(seconds=seconds)


def no_record(patch: Any) -> None:
    """Reports on every step without the hashes of its messages, by which audits are held."""

    def nothing(self: Any, step: int) -> None:
        mark(step=step)

    patch.setattr("protomodels_cli.worker.recording.Recording.reported", nothing)


def false_verdicts(patch: Any) -> None:
    """A liar: finds in audits the contrary of what is true."""
    from dataclasses import replace

    from protomodels_cli.worker import auditing

    right = auditing.recomputed

    def wrong(*arguments: Any) -> Any:
        mark()
        found = right(*arguments)
        lied = any(one.is_lie for one in found)
        return [replace(one, wild=0 if lied else one.numbers) for one in found]

    patch.setattr(auditing, "recomputed", wrong)


def reseats_nobody(patch: Any) -> None:
    """A coordinator that leaves stages where they are: on a busy machine any holder may look slow."""
    patch.setattr("protomodels_cli.coordinator.reseating.consider", lambda moves: None)
    mark()


def false_claim(patch: Any, stage: int) -> None:
    """A peer says that it has another's stage in memory, just as that one has it."""
    from protomodels_cli.wire.pb import pmtrain_pb2 as pb
    from protomodels_cli.worker.session import Session

    add = Session._add_what_is_here

    async def and_lie(self: Session, register: pb.Register) -> None:
        await add(self, register)
        layers = [1, 1, 2] if self.spec.model.layers == 4 else []
        assert layers, "the cut of the run that is lied to"
        register.holding.CopyFrom(
            pb.Holding(lineage=1, stage=stage, layers_per_stage=layers, applied=7, prepared=1, generation=1)
        )
        mark(stage=stage)

    patch.setattr(Session, "_add_what_is_here", and_lie)


# What the system does with files, by the name of Python's audit event. Two calls have none: they are replaced.
FILE_CALLS = {
    "open",
    "os.listdir",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.scandir",
    "os.truncate",
    "shutil.rmtree",
    "sqlite3.connect",
}
_watched: list[str] = []  # the run directory, while its coordinator leads


def files_in_the_loop(patch: Any) -> None:
    """No fault: whatever the coordinator's event loop itself does with files of the run leaves a mark."""
    import asyncio

    from protomodels_cli.coordinator.coordinator import Coordinator

    run = Coordinator.run

    def note(call: str, path: Any) -> None:
        try:
            asyncio.get_running_loop()  # there is none in other threads
        except RuntimeError:
            return
        name = os.fsdecode(path)
        if _watched and (not os.path.isabs(name) or name.startswith(_watched[0])):
            stack = [f"{frame.name}:{frame.lineno}" for frame in traceback.extract_stack()[-9:-2]]
            mark(call=call, path=name, stack=stack)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if _watched and event in FILE_CALLS and isinstance(arguments[0], str | bytes | os.PathLike):
            note(event, arguments[0])

    fsync, statvfs = os.fsync, os.statvfs
    patch.setattr(os, "fsync", lambda file: (note("os.fsync", str(file)), fsync(file))[1])
    patch.setattr(os, "statvfs", lambda path: (note("os.statvfs", path), statvfs(path))[1])
    sys.addaudithook(hear)  # for as long as the process lives, but it hears nothing once nothing is watched

    async def watched(self: Coordinator, *arguments: Any) -> int:
        mark(call="")
        _watched.append(str(self.run_dir.path))
        try:
            return await run(self, *arguments)
        finally:
            _watched.clear()

    patch.setattr(Coordinator, "run", watched)
