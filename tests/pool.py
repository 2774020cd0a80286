"""Real coordinators and peers for tests: processes that are started once and run one job after another.

As a program it is such a process: a line of JSON in, the job done with the real code, a line of JSON out. Faults are
put in here, from outside: the code under test has no switch for them.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


class Process:
    """One reusable process."""

    def __init__(self, log: Path):
        self._log = log.open("w")
        self._open()

    def _open(self) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,  # a line read leaves the next one to `select`
            env={**os.environ, "PYTHONPATH": path},
        )
        self._busy = self._ready = False

    def renew(self) -> None:
        """A job that was left unfinished is ended with its process."""
        if self._busy or self._process.poll() is not None:
            self.kill()
            self._open()

    def start(self, **job: Any) -> None:
        """Begin a job."""
        self.renew()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._busy = True

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def gone(self) -> bool:
        return self._process.poll() is not None

    def wait_until_ready(self) -> None:
        """Until all is imported."""
        if not self._ready:
            self._ready = self._line(60)["ready"]

    def result(self, seconds: float = 120) -> dict[str, Any]:
        self.wait_until_ready()
        result = self._line(seconds)
        self._busy = False
        return result

    def _line(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        if not ready:
            self.tell_what_it_does()
            raise AssertionError(f"no result after {seconds:g} s: {Path(self._log.name).read_text()[-6000:]}")
        line = self._process.stdout.readline()
        assert line, f"the process died: {Path(self._log.name).read_text()[-2000:]}"
        return json.loads(line)

    def tell_what_it_does(self) -> None:
        """The stacks of its threads, into its log."""
        if not self.gone:
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(1.0)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._log.close()


class Pool:
    """A coordinator's process and four peers'."""

    def __init__(self, folder: Path, peers: int = 4):
        self.folder, self.runs = folder, 0
        self.coordinator = Process(folder / "coordinator.log")
        self.peers = [Process(folder / f"peer-{i}.log") for i in range(peers)]

    def start(self, spec: Any, peers: list[dict[str, Any]], **job: Any) -> Path:
        """Start a run with these peers (each a dict of job options). Returns its directory.

        All are ready before the first begins: a run is short, and a spare must not come after its end."""
        self.runs += 1
        processes = [self.coordinator, *self.peers[: len(peers)]]
        for process in processes:
            process.renew()
        for process in processes:
            process.wait_until_ready()
        run_dir = self.folder / f"run-{self.runs}"
        self.coordinator.start(kind="coordinator", spec=spec.model_dump(mode="json"), run_dir=str(run_dir), **job)
        link = wait_for_link(run_dir)
        for i, options in enumerate(peers):
            self.peers[i].start(
                kind="join", **{"link": link, "name": f"peer-{i}", "dir": str(run_dir / f"p{i}"), **options}
            )
        return run_dir

    def run(
        self, spec: Any, peers: int | list[dict[str, Any]], **job: Any
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """A whole run: the coordinator's result and the peers'."""
        options = [{} for _ in range(peers)] if isinstance(peers, int) else peers
        run_dir = self.start(spec, options, **job)
        results = [p.result() for p in self.peers[: len(options)]]
        led = self.coordinator.result()
        if (run_dir / "summary.json").exists():
            led["summary"] = json.loads((run_dir / "summary.json").read_text())
        led["run_dir"] = run_dir
        return led, results

    def close(self) -> None:
        for process in (self.coordinator, *self.peers):
            process.close()


def wait_for_link(run_dir: Path, seconds: float = 60) -> str:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (run_dir / "link").exists():
            return (run_dir / "link").read_text().strip()
        time.sleep(0.02)
    raise AssertionError("no link")


# The process itself


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the code under test prints goes to the log
    faulthandler.register(signal.SIGUSR1)
    import protomodels_cli.coordinator.coordinator
    import protomodels_cli.worker.join  # noqa: F401

    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        result: dict[str, Any] = {"said": []}
        with fault(**job.get("fault", {})):
            try:
                result["exit"] = asyncio.run(
                    lead(job, result) if job["kind"] == "coordinator" else take_part(job, result)
                )
            except Exception as e:
                result |= {"exit": getattr(e, "exit_code", 1), "error": str(e), "kind": type(e).__name__}
        print(json.dumps(result), file=out, flush=True)


async def lead(job: dict[str, Any], result: dict[str, Any]) -> int:
    from protomodels_cli.coordinator.coordinator import Coordinator
    from protomodels_cli.coordinator.events import StopRun
    from protomodels_cli.coordinator.run_dir import open_run_dir
    from protomodels_cli.data.prepare import prepare
    from protomodels_cli.spec import spec_from

    spec = spec_from(job["spec"])
    folder = open_run_dir(Path(job["run_dir"]), spec, Path())
    coordinator = Coordinator(prepare(spec), folder, result["said"].append)
    port = before[1] if (before := folder.last_address()) else 0
    leading = asyncio.create_task(coordinator.run("127.0.0.1", "127.0.0.1", port, lambda link: None))
    while not leading.done():
        await asyncio.sleep(0.05)
        if (folder.path / "stop").exists():
            coordinator._interrupted.set()
            break
        if coordinator.state.history.paused is not None:  # nobody comes to look at it
            coordinator.tell(StopRun())
    return await leading


async def take_part(job: dict[str, Any], result: dict[str, Any]) -> int:
    from protomodels_cli.wire.link import JoinLink
    from protomodels_cli.worker.join import Options, join

    options = Options(JoinLink.parse(job["link"]), "cpu", job["name"], Path(job["dir"]), 0)
    return await join(options, result["said"].append)


@contextmanager
def fault(kind: str = "", **options: Any) -> Iterator[None]:
    """Something wrong with this process, for one job."""
    if not kind:
        yield
        return
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        FAULTS[kind](patch, **options)
        yield


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


def first_time(mark: str) -> bool:
    """For whoever asks first, in whichever process."""
    try:
        Path(mark).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def poison(patch: Any, once: str = "", **key: int) -> None:
    """One message of the run is not finite where it is packed: in a peer, or (called by hand) in the reference. Each
    time it is packed, or `once`."""
    import torch

    from protomodels_cli.protocol.messages import MessageKey
    from protomodels_cli.wire.codecs import End

    encode, bad = End.encode, MessageKey(**key)  # type: ignore[arg-type]

    def and_spoil(self: End, message: Any, slot: Any) -> Any:
        spoilt = slot.key == bad and (not once or first_time(once))
        return encode(self, torch.full_like(message, torch.nan) if spoilt else message, slot)

    patch.setattr(End, "encode", and_spoil)


def fail_at(patch: Any, phase: str, once: str, stage: int = 0, step: int = 0, signal: str = "SIGKILL") -> None:
    """The process that comes first to this point of a step gets a signal: for peers, whoever holds the stage."""
    import signal as signals

    from protomodels_cli.coordinator.coordinator import Coordinator
    from protomodels_cli.coordinator.history import Adopted, Decided, Ended
    from protomodels_cli.coordinator.journal import Journal
    from protomodels_cli.worker.parts import Parts
    from protomodels_cli.worker.session import Session
    from protomodels_cli.worker.stage_work import StageWork

    def here(*place: Any) -> None:
        if place == (phase, stage, step) and first_time(once):
            os.kill(os.getpid(), getattr(signals, signal))

    def before(owner: Any, name: str, where: Any) -> None:
        method = getattr(owner, name)

        def first_fail(self: Any, *arguments: Any) -> Any:
            here(*where(self, *arguments))
            return method(self, *arguments)

        patch.setattr(owner, name, first_fail)

    def after(owner: Any, name: str, where: Any) -> None:
        method = getattr(owner, name)

        def then_fail(self: Any, *arguments: Any) -> Any:
            result = method(self, *arguments)
            here(*where(self, *arguments))
            return result

        patch.setattr(owner, name, then_fail)

    def decided(records: Any, kind: type) -> int:
        return next((r.step if kind is Decided else r.after for r in records if isinstance(r, kind)), -1)

    before(StageWork, "forward", lambda w, work, message: ("forward", w.part.index, work.step))
    before(StageWork, "backward", lambda w, work, message: ("backward", w.part.index, work.step))
    after(StageWork, "prepare", lambda w, work, *_: ("prepared", w.part.index, work.step))
    before(StageWork, "decide", lambda w, s, *_: ("before decide", w.part.index, s))
    after(StageWork, "decide", lambda w, s, *_: ("decided", w.part.index, s))
    before(StageWork, "switch_basis", lambda w, *_: ("switch", w.part.index, w.step + 1))
    after(Session, "_take_basis", lambda s, basis: ("basis", s._place.stage if s._place else -1, basis.version))
    before(Parts, "write", lambda p, lineage, s, i, state: ("saving", i, s))
    # The coordinator; it has no stage
    before(
        Coordinator,
        "_send_turn",
        lambda c, d, task, save: ("grant", 0, task.step if task and task.kind == "step" else -1),
    )
    before(Journal, "append", lambda j, records, now: ("ready", 0, decided(records, Decided)))
    after(Journal, "append", lambda j, records, now: ("commit", 0, decided(records, Decided)))
    after(Journal, "append", lambda j, records, now: ("adopted", 0, decided(records, Adopted)))
    after(Journal, "append", lambda j, records, now: ("ended", 0, -any(isinstance(r, Ended) for r in records)))


def lose_turn(patch: Any, stage: int, step: int) -> None:
    """The coordinator's word on this step does not reach a peer, whose connection stays."""
    from protomodels_cli.coordinator.service import Conversation

    say, lost = Conversation.say, []

    def or_not(self: Conversation, message: Any) -> None:
        say(self, message)
        if message.HasField("turn") and message.turn.decision.step == step:
            lost.append(message)
            if len(lost) == stage + 1:
                self.outbox._queue.pop()  # type: ignore[attr-defined]

    patch.setattr(Conversation, "say", or_not)


def damage_frame(patch: Any, step: int) -> None:
    """One bit of one message changes between packing and sending, once."""
    from protomodels_cli.worker import links

    cut, done = links.frames_of, []

    def damaged(message: Any, generation: int) -> Any:
        for frame in cut(message, generation):
            if message.step == step and frame.payload and not done:
                done.append(step)
                frame.payload = bytes([frame.payload[0] ^ 1]) + frame.payload[1:]
            yield frame

    patch.setattr(links, "frames_of", damaged)


def cut_link(patch: Any, step: int) -> None:
    """The stream to the next stage breaks in the middle of a step, once."""
    from protomodels_cli.worker.links import Link

    send, done = Link.send, []

    def or_break(self: Link, message: Any) -> None:
        if message.step == step and self.to_next and not done:
            done.append(step)
            self.close()
            return
        send(self, message)

    patch.setattr(Link, "send", or_break)


def other_protocol(patch: Any) -> None:
    patch.setattr("protomodels_cli.worker.join.PROTOCOL", 99)


def other_table(patch: Any) -> None:
    patch.setattr("protomodels_cli.model.t_fixed.VERSION", 99)
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
    from protomodels_cli.worker.engine import Build, Engine

    order = Engine.order
    patch.setattr(Engine, "order", lambda self, o: None if isinstance(o, Build) else order(self, o))


def wrong_clock(patch: Any) -> None:
    now = time.time
    patch.setattr("protomodels_cli.worker.join.time.time", lambda: now() + 3600)


def little_memory(patch: Any) -> None:
    patch.setattr("protomodels_cli.worker.device.free_memory", lambda device: 1000)


def full_disk_once(patch: Any) -> None:
    """The first snapshot part cannot be written."""
    from protomodels_cli.worker import parts

    save, tries = parts.save_file, []

    def fails_once(*arguments: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise OSError(28, "No space left on device")
        save(*arguments)

    patch.setattr(parts, "save_file", fails_once)


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
    from protomodels_cli.worker.parts import Parts

    write, done = Parts.write, []

    def and_spoil(self: Parts, lineage: int, at: int, *rest: Any) -> Any:
        part = write(self, lineage, at, *rest)
        if at == step and not done:
            done.append(at)
            self.path(part).write_bytes(b"x" + self.path(part).read_bytes()[1:])
        return part

    patch.setattr(Parts, "write", and_spoil)


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


def stuck_device(patch: Any, stage: int, step: int, once: str, patience: float) -> None:
    """The first holder of this stage never comes back from this step's forward, and soon notices."""
    import threading

    from protomodels_cli.worker import session
    from protomodels_cli.worker.stage_work import StageWork

    forward = StageWork.forward

    def or_never(self: StageWork, work: Any, message: Any) -> Any:
        if (self.part.index, work.step) == (stage, step) and first_time(once):
            session.STUCK_TIMES, session.STUCK_LOOKS = patience / self.spec.limits.place_seconds, 20
            threading.Event().wait()
        return forward(self, work, message)

    patch.setattr(StageWork, "forward", or_never)
    patch.setattr(session, "STUCK_LOOKS", 6000)  # all look often, and only that one soon has seen enough
    patch.setattr(session, "STUCK_TIMES", session.STUCK_TIMES)


def lose_message(patch: Any, step: int, once: str) -> None:
    """One message to the next stage is never sent, and nobody notices."""
    from protomodels_cli.worker.links import Link

    send = Link.send

    def or_not(self: Link, message: Any) -> None:
        is_last = (message.step, message.microbatch) == (step, 1)  # a gap would be noticed
        if not (is_last and self.to_next and first_time(once)):
            send(self, message)

    patch.setattr(Link, "send", or_not)


def feed_out_of_order(patch: Any, step: int, once: str) -> None:
    """The coordinator hands the ids of a step to the first stage the wrong way round."""
    from protomodels_cli.coordinator.feed import Feed

    feed = Feed.step

    def reversed_once(self: Feed, at: int) -> Any:
        return reversed(list(feed(self, at))) if at == step and first_time(once) else feed(self, at)

    patch.setattr(Feed, "step", reversed_once)


def impatient(patch: Any, seconds: float) -> None:
    """A coordinator that no longer believes in a task after this time."""
    patch.setattr("protomodels_cli.coordinator.machine.STALL_SECONDS", seconds)


def unreachable(patch: Any) -> None:
    """As behind a home router: the coordinator cannot dial back."""

    async def nobody(*_: Any) -> str:
        return "no answer"

    patch.setattr("protomodels_cli.coordinator.service.Service._dial_back", nobody)


FAULTS = {
    f.__name__: f
    for f in (
        flip_bit,
        poison,
        other_protocol,
        other_table,
        other_basis,
        other_defaults,
        never_ready,
        wrong_clock,
        little_memory,
        unreachable,
        full_disk_once,
        cannot_build,
        spoils_its_part,
        slow_disk,
        slow,
        stuck_device,
        lose_message,
        feed_out_of_order,
        impatient,
        fail_at,
        lose_turn,
        damage_frame,
        cut_link,
    )
}

if __name__ == "__main__":
    main()
