"""What attackers of the coordinator's port cost a run whose pace is that of its links.

One run of real processes over an emulated line. In turns, the port of its coordinator is attacked, that of a
coordinator of another run, or none: against the second kind, what is left is what the attack costs this run beside the
processor time that it takes from the machine. The attacker is held to a share of a core (quota.py). While it lasts, a
peer with a good token joins. A phase has so many steps: few of them have no median.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
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
from protomodels_cli.bench.phases import Row, link_bound, median_step, steps_decided, wait_for_steps
from protomodels_cli.bench.quota import Held, held
from protomodels_cli.errors import UserError
from protomodels_cli.launch.local import LocalRun, local_coordinator, local_run
from protomodels_cli.quantities import duration, size
from protomodels_cli.wire.client import coordinator_channel, operator
from protomodels_cli.wire.join_link import JoinLink, fetch_authority
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.wire.pb import pmtrain_pb2_grpc as rpc
from protomodels_cli.wire.tls import new_key, public_key_of

STEP_BOUND, MEMORY_BOUND, JOIN_BOUND = 0.10, 100_000_000, 10.0  # a share, bytes, seconds
BUSY_BOUND = 0.30  # of all cores, for the run itself while nobody attacks: else it is not its links that count
PHASE_SECONDS = 900.0  # at most
SETTLE = 5.0  # seconds at the beginning of a phase that are not looked at
KINDS = ("nobody", "elsewhere", "door")
SHARE = 0.5  # of a core, for the attacker
JOIN_SECONDS = 30.0


@dataclass(frozen=True)
class Setting:
    connections: int
    slow: int
    per_second: float
    link: str
    seconds: float  # of a phase at least
    turns: int
    steps: int = 30  # of a phase at least
    share: float = SHARE


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
    joins, quiet = [p["join_s"] for p in attacked], [p["run_cores"] for p in phases if p["kind"] == "nobody"]
    busy = statistics.median(quiet) / (os.cpu_count() or 1)
    seconds = sum(p["attack_seconds"] for p in attacked)
    sent = sum(p["attack"].get("nonsense", 0) for p in attacked)
    worst = None if None in joins or not joins else max(joins)
    return {
        **of,
        "slowed": ratio,
        "slowed_bound": STEP_BOUND,
        "memory_grown_bytes": memory,
        "memory_bound_bytes": MEMORY_BOUND,
        "join_s": worst,  # the slowest; null: one did not get in
        "join_bound_s": JOIN_BOUND,
        "run_busy": busy,  # of all cores, while nobody attacks
        "run_busy_bound": BUSY_BOUND,
        "messages_per_s": sent / seconds if seconds else 0.0,
        "attacker_cores": statistics.median(p["attacker_cores"] for p in attacked) if attacked else 0.0,
        "within": ratio is not None
        and ratio < STEP_BOUND
        and memory <= MEMORY_BOUND
        and worst is not None
        and worst <= JOIN_BOUND
        and busy <= BUSY_BOUND,
    }


def _phases(setting: Setting, running: LocalRun, unrelated: LocalRun) -> list[Row]:
    found, targets = [], {"elsewhere": unrelated.link, "door": running.link}
    processes = [psutil.Process(p.pid) for p in (running.coordinator, *running.peers.values())]
    for turn in range(setting.turns):
        for kind in KINDS if turn % 2 == 0 else reversed(KINDS):  # no kind is always after another
            with contextlib.ExitStack() as closing:
                attack = closing.enter_context(_attack(setting, targets[kind])) if kind in targets else None
                time.sleep(SETTLE)
                row: Row = {"kind": kind, "began": time.time(), "memory_bytes": 0, "join_s": None}
                used, steps = _processor_seconds(processes), steps_decided(running)
                row["join_s"] = asyncio.run(join_once(running.link))
                while not _is_over(setting, row["began"], steps_decided(running) - steps):
                    memory = psutil.Process(running.coordinator.pid).memory_info().rss
                    row["memory_bytes"] = max(row["memory_bytes"], memory)
                    time.sleep(0.1)
                row["ended"] = time.time()
                row["run_cores"] = (_processor_seconds(processes) - used) / (row["ended"] - row["began"])
                row |= attack.ended() if attack is not None else {"attack": {}}
            found.append(row)
            if running.coordinator.poll() is not None:
                raise running.failure()
    return found


def _is_over(setting: Setting, began: float, steps: int) -> bool:
    passed = time.time() - began
    return passed >= setting.seconds and (steps > setting.steps or passed > PHASE_SECONDS)


def _processor_seconds(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return float(sum(one.user + one.system for one in times))


async def join_once(link: JoinLink) -> float | None:
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
def _attack(setting: Setting, link: JoinLink) -> Iterator[_Attacker]:
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
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != READY:
            raise UserError("the attacker did not start", "its traceback is above", "process_failed")
        with held(process.pid, setting.share) as quota:
            yield _Attacker(process, quota)
    finally:
        process.kill()
        process.wait()


class _Attacker:
    def __init__(self, process: subprocess.Popen[str], quota: Held):
        self._process, self._quota, self._began = process, quota, time.monotonic()

    def ended(self) -> Row:
        """What it did, and what it had for that."""
        row: Row = {"attack_seconds": time.monotonic() - self._began, "attacker_cores": self._quota.cores()}
        row |= {"quota": self._quota.how, "quota_cores": self._quota.share}
        self._quota.end()  # it need not wait to say what it did
        said, _ = self._process.communicate("\n", timeout=60)
        return row | {"attack": dict(json.loads(said))}


def in_words(found: dict[str, Any]) -> str:
    setting, slowed, join = found["setting"], found["slowed"], found["join_s"]
    rows = [f"{kind}: {r['steps']} steps of {duration(r['step_s'] or 0)}" for kind in KINDS if (r := found[kind])]
    verdict = "too few steps to compare" if slowed is None else f"{slowed:+.1%} (bound {found['slowed_bound']:.0%})"
    done: Counter[str] = Counter()
    for phase in found["phases"]:
        if phase["kind"] == "door":
            done.update(phase["attack"])
    attacked = [phase for phase in found["phases"] if phase["kind"] == "door"]
    seconds = sum(phase["attack_seconds"] for phase in attacked)
    rates = ", ".join(f"{name} {number / seconds:,.0f}/s" for name, number in sorted(done.items()))
    return (
        f"{setting['connections']} idle and {setting['slow']} slow connections, {setting['link']}: {'; '.join(rows)}\n"
        f"under attack against the same attack elsewhere: {verdict}\n"
        f"the coordinator's memory grew by {size(max(0, found['memory_grown_bytes']))} "
        f"(bound {size(found['memory_bound_bytes'])}); a new peer got in within "
        f"{'no time: it did not' if join is None else duration(join)} (bound {duration(found['join_bound_s'])})\n"
        f"{found['steps_redone']} steps were redone, {found['generations']} generations began\n"
        f"the run used {found['run_busy']:.0%} of the machine's cores while nobody attacked (bound "
        f"{found['run_busy_bound']:.0%})\n"
        f"the attacker sent {found['messages_per_s']:,.0f} messages a second and used {found['attacker_cores']:.2f} of "
        f"the {attacked[0]['quota_cores']:g} cores that it may ({attacked[0]['quota']}): {rates}"
    )
