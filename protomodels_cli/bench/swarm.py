"""What a crowd costs the coordinator: a real one, and light peers that join, send heartbeats, hold stages and leave.

A pipeline is measured with a few peers first: what the crowd of spares adds is the difference. All processes share this
machine, and those of the crowd make way for the coordinator's and for that of the first holders; what is said of
processor time and memory is the coordinator's alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from protomodels_cli.bench.swarm_process import CHURN, READY, Order
from protomodels_cli.errors import UserError
from protomodels_cli.launch.local import LocalRun, local_coordinator
from protomodels_cli.observe.process import peak_memory_of
from protomodels_cli.quantities import duration, plural, size
from protomodels_cli.spec.load import spec_from
from protomodels_cli.spec.schema import RunSpec

FEW = 8  # clients, and stages, of what the crowd is compared with
CLIENTS_A_PROCESS = 250
JOINS_PER_S = 25.0
LATENCY_BOUND, CORES_BOUND, MEMORY_BOUND = 0.05, 1.0, 500_000_000  # seconds above the few's, cores, bytes
Say = Callable[[str], None]


@dataclass(frozen=True)
class Crowd:
    clients: int
    stages: int
    minutes: float
    churn: float  # share of the clients that leaves, and is replaced, in a minute
    step_seconds: float


def spec_of(crowd: Crowd) -> RunSpec:
    """A model that is as small as its number of stages lets it be: nobody computes it."""
    return spec_from(
        {
            "name": "swarm",
            "stages": crowd.stages,
            "steps": 1_000_000,
            "model": {"layers": crowd.stages, "width": 16, "heads": 2, "kv_heads": 2, "context": 16},
            "subspace": {"form": "reparam", "k": 4, "sync_interval": 20, "update": {"interval": 0}},
            "batch": {"size": 4, "microbatches": 4},
            "data": {"source": "python", "max_bytes": 200_000},
            "tokenizer": {"kind": "bytes"},
            "eval": {"windows": 1, "interval": 0},
            "snapshots": {"interval": 0},
            "limits": {"connections": 4 * crowd.clients + 64, "connections_per_address": 4 * crowd.clients + 64},
        }
    )


def measure(crowd: Crowd, say: Say) -> dict[str, Any]:
    """Each pipeline with few clients, and with all of them."""
    rows = []
    for stages in sorted({min(FEW, crowd.stages), crowd.stages}):
        few = replace(crowd, clients=min(max(FEW, stages), crowd.clients), stages=stages, churn=0.0)
        alone, crowded = (_row(one, say) for one in (few, replace(crowd, stages=stages)))
        above = crowded["commit_p99_above_s"] = crowded["commit_s"]["p99"] - alone["commit_s"]["p99"]
        say(f"commit p99 is {duration(max(0.0, above))} above that with {plural(few.clients, 'client')}")
        rows += [alone, crowded]
    bounds = f"{duration(LATENCY_BOUND)} above, {CORES_BOUND:g} core and {size(MEMORY_BOUND)} for the coordinator"
    say(f"the bounds: {bounds}")
    return {
        "rows": rows,
        "commit_p99_above_bound_s": LATENCY_BOUND,
        "coordinator_cores_bound": CORES_BOUND,
        "coordinator_memory_bound_bytes": MEMORY_BOUND,
    }


def _row(crowd: Crowd, say: Say) -> dict[str, Any]:
    spec = spec_of(crowd)
    with (
        tempfile.TemporaryDirectory() as name,
        local_coordinator(spec, Path(name) / "run") as running,
        contextlib.ExitStack() as stack,
    ):
        holders, others = _orders(crowd, spec, running)
        processes = [stack.enter_context(_process(holders))]
        _expect_ready(processes[0], running)
        processes += [stack.enter_context(_process(order)) for order in others]
        for process in processes[1:]:
            _expect_ready(process, running)
        coordinator, began = psutil.Process(running.coordinator.pid), time.monotonic()
        before = coordinator.cpu_times()
        for process in processes:
            _say(process, CHURN)
        while time.monotonic() - began < 60 * crowd.minutes:
            if running.coordinator.poll() is not None:
                raise running.failure()
            time.sleep(0.1)
        after, seconds = coordinator.cpu_times(), time.monotonic() - began
        memory = peak_memory_of(running.coordinator.pid)
        seen = [_result(process) for process in processes]
    commits = commit_latencies([row for one in seen for row in one["commits"]], crowd.stages, began)
    if not commits:
        what = f"no step was decided within {duration(seconds)}"
        raise UserError(what, "measure for longer, or with fewer clients", "no_commits")
    row = {
        **asdict(crowd),
        "steps": len(commits),
        "commit_s": spread(commits),
        "join_s": spread([join for one in seen for join in one["joins"]]),
        "status_s": spread([status for one in seen for status in one["statuses"]]),
        "coordinator_cores": (after.user + after.system - before.user - before.system) / seconds,
        "coordinator_memory_bytes": memory,
        **{name: dict(sum((Counter(one[name]) for one in seen), Counter())) for name in ("leaves", "lost", "failed")},
    }
    say(in_words(row))
    return row


def commit_latencies(rows: Sequence[Sequence[float]], stages: int, since: float) -> list[float]:
    """Of each step whose reports and turns were all seen: the seconds from its last report to the last stage's turn.

    A row is what one process saw of a step: generation, step, reports, when the last one left, turns, when the last one
    came."""
    steps: dict[tuple[float, float], tuple[float, float, float, float]] = {}
    for generation, step, reported, last_report, turned, last_turn in rows:
        had = steps.get((generation, step), (0, 0.0, 0, 0.0))
        steps[generation, step] = (
            had[0] + reported,
            max(had[1], last_report),
            had[2] + turned,
            max(had[3], last_turn),
        )
    return [
        turn - report
        for reported, report, turned, turn in steps.values()
        if reported == turned == stages and report >= since
    ]


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Half and 99 of 100 took so long at most."""
    ordered = sorted(seconds)
    return {"count": len(ordered), **{f"p{n}": ordered[math.ceil(len(ordered) * n / 100) - 1] for n in (50, 99)}}


def _orders(crowd: Crowd, spec: RunSpec, running: LocalRun) -> tuple[Order, list[Order]]:
    """Of those that join first, and so hold the stages, and of the others."""
    spares = crowd.clients - crowd.stages
    many = -(-spares // CLIENTS_A_PROCESS)
    crowds = [crowd.stages, *(spares // many + (i < spares % many) for i in range(many))]
    holders, *others = (
        Order(
            link=str(running.link),
            lease_seconds=spec.limits.lease_seconds,
            step_seconds=crowd.step_seconds,
            tokens=spec.batch.size * spec.model.context,
            number=i,
            clients=clients,
            joins_per_s=JOINS_PER_S / max(1, many),
            leaves_per_s=clients * crowd.churn / 60,
            watch=i == 0,
            makes_way=i > 0,
        )
        for i, clients in enumerate(crowds)
    )
    return holders, others


Process = subprocess.Popen  # of text


@contextlib.contextmanager
def _process(order: Order) -> Iterator[Process[str]]:
    """In a session of its own: Ctrl-C reaches this process, which ends it."""
    pipe, command = subprocess.PIPE, [sys.executable, "-m", "protomodels_cli.bench.swarm_process"]
    process = Process(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    try:
        _say(process, json.dumps(asdict(order)))
        yield process
    finally:
        process.kill()
        process.wait()


def _say(process: Process[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _expect_ready(process: Process[str], running: LocalRun) -> None:
    assert process.stdout is not None
    if process.stdout.readline().strip() != READY:
        if running.coordinator.poll() is not None:
            raise running.failure()
        raise _failed()


def _result(process: Process[str]) -> dict[str, Any]:
    said, _ = process.communicate()  # closes its input, which ends it
    if process.returncode:
        raise _failed()
    return dict(json.loads(said))


def _failed() -> UserError:
    what = "a process of light peers ended before its time"
    return UserError(what, "its traceback is above; use fewer --clients if files or memory ran out", "process_failed")


def in_words(row: dict[str, Any]) -> str:
    def both(name: str) -> str:
        return f"p50 {duration(row[name]['p50'])}, p99 {duration(row[name]['p99'])}"

    counted = {name: sum(row[name].values()) for name in ("leaves", "lost", "failed")}
    return (
        f"{plural(row['clients'], 'client')}, {plural(row['stages'], 'stage')}: commit {both('commit_s')} "
        f"({plural(row['steps'], 'step')} in {duration(60 * row['minutes'])}); join {both('join_s')}; status "
        f"{both('status_s')}; the coordinator used {row['coordinator_cores']:.2f} cores and "
        f"{size(row['coordinator_memory_bytes'])}; {counted['leaves']} left and were replaced, {counted['lost']} lost "
        f"their connection, {counted['failed']} calls failed"
    )
