"""What attackers of the coordinator's port cost a run whose pace is that of its links.

One run of real processes over an emulated line. In turns, the port of its coordinator is attacked, that of a
coordinator of another run, or none: against the second kind, what is left is what the attack costs this run beside the
processor time that it takes from the machine. The attacker is held to a share of a core where the system allows it.
While it lasts, peers with a good token join.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil

from protomodels_cli import PROTOCOL, __version__
from protomodels_cli.bench.attack import READY, Order
from protomodels_cli.bench.loopback import small
from protomodels_cli.bench.phases import Row, link_bound, median_step, wait_for_steps
from protomodels_cli.errors import UserError
from protomodels_cli.launch.local import LocalRun, local_coordinator, local_run
from protomodels_cli.quantities import duration, size
from protomodels_cli.wire.client import coordinator_channel, operator
from protomodels_cli.wire.join_link import JoinLink, fetch_authority
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.wire.tls import new_key, public_key_of

STEP_BOUND, MEMORY_BOUND, JOIN_BOUND = 0.10, 100_000_000, 10.0  # a share, bytes, seconds
SETTLE = 5.0  # seconds at the beginning of a phase that are not looked at
KINDS = ("nobody", "elsewhere", "door")
SHARE = 0.5  # of a core, for the attacker
CPU = Path("/sys/fs/cgroup/cpu")  # of the first version of cgroups
JOIN_SECONDS = 30.0


@dataclass(frozen=True)
class Setting:
    connections: int
    slow: int
    per_second: float
    link: str
    seconds: float  # of a phase
    turns: int


def measure(setting: Setting, say: Callable[[str], None]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        other = small(name="unrelated", steps=1_000_000, stages=2, model={"layers": 2})
        with (
            local_run(link_bound("abuse", setting.link), Path(name) / "run") as running,
            local_coordinator(other, Path(name) / "other") as unrelated,
        ):
            wait_for_steps(running)
            began = asyncio.run(_status(running.link))
            phases = _phases(setting, running, unrelated)
            ended = asyncio.run(_status(running.link))
            log = (running.folder / "coordinator.log").stat().st_size
        rows = [json.loads(line) for line in (running.folder / "metrics.jsonl").read_text().splitlines()]
    found = {
        "setting": asdict(setting),
        **compared([row for row in rows if row["event"] == "step"], phases),
        "generations": ended.generation - began.generation,
        "steps_redone": ended.steps_redone,
        "log_bytes": log,
        "phases": phases,
    }
    say(in_words(found))
    return found


def compared(steps: Sequence[Row], phases: Sequence[Row]) -> dict[str, Any]:
    """The median step of each kind of phase; `slowed`: under attack against the same attack elsewhere."""
    of = {kind: median_step(steps, [p for p in phases if p["kind"] == kind]) for kind in KINDS}
    ratio = of["door"]["step_s"] / of["elsewhere"]["step_s"] - 1 if all(row["steps"] for row in of.values()) else None
    attacked = [phase for phase in phases if phase["kind"] == "door"]
    memory = max((p["memory_bytes"] for p in attacked), default=0) - phases[0]["memory_bytes"]
    joins = [p["join_s"] for p in attacked]
    worst = None if None in joins or not joins else max(joins)
    return {
        **of,
        "slowed": ratio,
        "slowed_bound": STEP_BOUND,
        "memory_grown_bytes": memory,
        "memory_bound_bytes": MEMORY_BOUND,
        "join_s": worst,  # the slowest; null: one did not get in
        "join_bound_s": JOIN_BOUND,
        "within": ratio is not None
        and ratio < STEP_BOUND
        and memory <= MEMORY_BOUND
        and worst is not None
        and worst <= JOIN_BOUND,
    }


def _phases(setting: Setting, running: LocalRun, unrelated: LocalRun) -> list[Row]:
    found, targets = [], {"elsewhere": unrelated.link, "door": running.link}
    for turn in range(setting.turns):
        for kind in KINDS if turn % 2 == 0 else reversed(KINDS):  # no kind is always after another
            with contextlib.ExitStack() as closing:
                attack = closing.enter_context(_attack(setting, targets[kind])) if kind in targets else None
                time.sleep(SETTLE)
                row: Row = {"kind": kind, "began": time.time(), "memory_bytes": 0, "join_s": None}
                row["join_s"] = asyncio.run(_join(running.link))
                while time.time() - row["began"] < setting.seconds:
                    memory = psutil.Process(running.coordinator.pid).memory_info().rss
                    row["memory_bytes"] = max(row["memory_bytes"], memory)
                    time.sleep(0.1)
                row["ended"] = time.time()
                row["attack"] = _ended(attack) if attack is not None else {}
            found.append(row)
            if running.coordinator.poll() is not None:
                raise running.failure()
    return found


async def _join(link: JoinLink) -> float | None:
    """Seconds until a peer with the token has its first message; None: it did not get in. It cannot hold a stage."""
    began = time.monotonic()
    while time.monotonic() - began < JOIN_SECONDS:
        with contextlib.suppress(UserError, OSError, grpc.aio.AioRpcError):  # a peer tries again, too
            async with coordinator_channel(link, await fetch_authority(link, 5)) as channel:
                stub, key = rpc.PeeringStub(channel), public_key_of(new_key())
                request = pb.EnrolRequest(version=__version__, protocol=PROTOCOL, public_key_pem=key)
                enrolled = await stub.Enrol(request, metadata=(("token", link.token),), timeout=5)
                call = stub.Session(metadata=(("peer", enrolled.peer), ("secret", enrolled.secret)))
                register = pb.Register(spec_sha256=enrolled.spec_sha256, device="none", memory=1, flops=1.0, name="new")
                await call.write(pb.PeerMessage(register=register))
                async with asyncio.timeout(5):
                    await call.read()
                took = time.monotonic() - began
                await call.write(pb.PeerMessage(leaving=pb.Leaving()))
                async with asyncio.timeout(5):
                    while await call.read() is not grpc.aio.EOF:
                        pass
                return took
        await asyncio.sleep(0.2)
    return None


async def _status(link: JoinLink) -> pb.RunStatus:
    async with operator(link) as coordinator:
        return await coordinator.status()


@contextlib.contextmanager
def _attack(setting: Setting, link: JoinLink) -> Iterator[subprocess.Popen[str]]:
    request = pb.EnrolRequest(version=__version__, protocol=PROTOCOL, public_key_pem=public_key_of(new_key()))
    order = Order(
        link.port,
        link.token,
        request.SerializeToString().hex(),
        setting.connections,
        setting.slow,
        setting.per_second,
    )
    pipe, command = subprocess.PIPE, [sys.executable, "-m", "protomodels_cli.bench.attack", json.dumps(asdict(order))]
    with _quota() as hold:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        try:
            assert process.stdout is not None
            if process.stdout.readline().strip() != READY:
                raise UserError("the attacker did not start", "its traceback is above", "process_failed")
            hold(process.pid)
            yield process
        finally:
            process.kill()
            process.wait()


def _ended(process: subprocess.Popen[str]) -> dict[str, int]:
    said, _ = process.communicate("\n", timeout=60)
    return dict(json.loads(said))


@contextlib.contextmanager
def _quota() -> Iterator[Callable[[int], None]]:
    """Holds a process to its share of a core; where cgroups cannot be had, it only makes way for others."""
    group = CPU / f"pmtrain-abuse-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text(str(int(SHARE * 100_000)))
        (group / "cpu.cfs_period_us").write_text("100000")
    except OSError:
        yield lambda pid: os.setpriority(os.PRIO_PROCESS, pid, 19)
        return
    try:
        yield lambda pid: _write(group / "cgroup.procs", str(pid))
    finally:
        until = time.monotonic() + 5
        while time.monotonic() < until:  # the process in it is gone only once it was waited for
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def in_words(found: dict[str, Any]) -> str:
    setting, slowed, join = found["setting"], found["slowed"], found["join_s"]
    rows = [f"{kind}: {r['steps']} steps of {duration(r['step_s'] or 0)}" for kind in KINDS if (r := found[kind])]
    verdict = "too few steps to compare" if slowed is None else f"{slowed:+.1%} (bound {found['slowed_bound']:.0%})"
    done: Counter[str] = Counter()
    for phase in found["phases"]:
        if phase["kind"] == "door":
            done.update(phase["attack"])
    seconds = sum(p["ended"] - p["began"] + SETTLE for p in found["phases"] if p["kind"] == "door")
    rates = ", ".join(f"{name} {number / seconds:,.0f}/s" for name, number in sorted(done.items()))
    return (
        f"{setting['connections']} idle and {setting['slow']} slow connections, {setting['link']}: {'; '.join(rows)}\n"
        f"under attack against the same attack elsewhere: {verdict}\n"
        f"the coordinator's memory grew by {size(max(0, found['memory_grown_bytes']))} "
        f"(bound {size(found['memory_bound_bytes'])}); a new peer got in within "
        f"{'no time: it did not' if join is None else duration(join)} (bound {duration(found['join_bound_s'])})\n"
        f"{found['steps_redone']} steps were redone, {found['generations']} generations began\n"
        f"the attacker had {SHARE:g} of a core: {rates}"
    )
