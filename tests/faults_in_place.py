"""Faults inside a process: its memory, disk, device and clock, and the version it is of."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from marks import first_time


def flip_bit(patch: Any, what: str, after_step: int, once: str) -> None:
    """Turn one bit of U or T_fixed in the memory of the stage that comes first to this step."""
    import torch

    from protomodels_cli.worker.stage_work import StageWork

    decide = StageWork.decide

    def and_flip(self: StageWork, step: int, *rest: Any) -> None:
        decide(self, step, *rest)
        if step == after_step and first_time(once):
            bits = self.stage.basis.u.view(torch.int32) if what == "u" else self.stage.t_fixed.signs
            bits[1, 1] ^= 1

    patch.setattr(StageWork, "decide", and_flip)


def other_protocol(patch: Any) -> None:
    patch.setattr("protomodels_cli.worker.join.PROTOCOL", 99)


def other_table(patch: Any) -> None:
    patch.setattr("protomodels_cli.protocol.t_fixed.VERSION", 99)
    patch.setattr("protomodels_cli.model.stage.VERSION", 99)


def other_basis(patch: Any) -> None:
    """Builds its stage with a basis that is off by a bit."""
    import torch

    from protomodels_cli.worker.stage_work import StageWork

    begin = StageWork.__init__

    def wrong(self: StageWork, spec: Any, part: Any, basis: Any, *rest: Any) -> None:
        basis.u.view(torch.int32)[0, 0] ^= 1
        begin(self, spec, part, basis, *rest)

    patch.setattr(StageWork, "__init__", wrong)


def other_defaults(patch: Any) -> None:
    """Reads the spec as another version of pmtrain would."""
    from protomodels_cli.spec.schema import RunSpec

    patch.setattr(RunSpec, "sha256", lambda self: "0" * 64)


def never_ready(patch: Any) -> None:
    from protomodels_cli.worker.engine import Engine
    from protomodels_cli.worker.orders import Build

    order = Engine.order
    patch.setattr(Engine, "order", lambda self, o: None if isinstance(o, Build) else order(self, o))


def wrong_clock(patch: Any) -> None:
    now = time.time
    patch.setattr("protomodels_cli.worker.join.time.time", lambda: now() + 3600)


def little_memory(patch: Any) -> None:
    patch.setattr("protomodels_cli.worker.device.free_memory", lambda device: 1000)


def full_disk_once(patch: Any) -> None:
    """The first snapshot part cannot be written."""
    from protomodels_cli.worker.snapshots import part_store

    save, tries = part_store.save_file, []

    def fails_once(*arguments: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise OSError(28, "No space left on device")
        save(*arguments)

    patch.setattr(part_store, "save_file", fails_once)


def cannot_build(patch: Any, once: str) -> None:
    """The first that builds its stage from a snapshot has no memory for it."""
    from protomodels_cli.worker.stage_work import StageWork

    begin = StageWork.__init__

    def or_not(self: StageWork, spec: Any, part: Any, basis: Any, device: Any, saved: Any, *rest: Any) -> None:
        if saved is not None and first_time(once):
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
        return part

    patch.setattr(PartStore, "write", and_spoil)


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
            time.sleep(seconds)
        sync(handle)

    patch.setattr(os, "fsync", slowly)


def slow(patch: Any, seconds: float) -> None:
    """Takes its time over every microbatch."""
    from protomodels_cli.worker.stage_work import StageWork

    forward = StageWork.forward

    def slowly(self: StageWork, *arguments: Any) -> Any:
        time.sleep(seconds)
        return forward(self, *arguments)

    patch.setattr(StageWork, "forward", slowly)


def stuck_device(patch: Any, stage: int, step: int, once: str) -> None:
    """The first holder of this stage never comes back from this step's forward."""
    import threading

    from protomodels_cli.worker.stage_work import StageWork

    forward = StageWork.forward

    def or_never(self: StageWork, work: Any, message: Any) -> Any:
        if (self.part.index, work.step) == (stage, step) and first_time(once):
            threading.Event().wait()
        return forward(self, work, message)

    patch.setattr(StageWork, "forward", or_never)


def impatient(patch: Any, seconds: float) -> None:
    """A coordinator that no longer believes in a task after this time."""
    patch.setattr("protomodels_cli.coordinator.machine.STALL_SECONDS", seconds)
