"""Runs one case of `bench gpu`: plain torch in a process of its own, or a coordinator and its peers.

A run has no end of its own: once enough of its steps count, all its processes are killed, so that no time goes into a
last evaluation and snapshot.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from protomodels_cli.bench.gpu_cases import Case, Plan
from protomodels_cli.bench.timing import Timing
from protomodels_cli.cost.forecast import forecast
from protomodels_cli.cost.units import unit_flops
from protomodels_cli.errors import UserError
from protomodels_cli.launch.local import LocalRun, local_run, process_failed
from protomodels_cli.quantities import duration
from protomodels_cli.spec.link import parse_link
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.usage import by_stage

TOKENS = 1 << 20  # random ids on disk: windows are taken from anywhere in them
POLL_SECONDS = 0.1
ANY_SPEED = 1e12  # FLOP/s: bytes and memory of a forecast do not depend on it
TERMINATED = 128 + signal.SIGTERM

Entry = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """What all cases of an invocation are run with."""

    plan: Plan
    devices: tuple[str, ...]  # peers are dealt out over them; plain torch uses the first
    timing: Timing
    limit: float  # seconds that a case may take, its start included
    memory: float | None = None  # GiB that a peer may use


def run(bench: Bench, case: Case, work: Path, deadline: float) -> Entry:
    """A case's figures, or why there are none. `deadline`: on time.monotonic's clock."""
    folder = Path(tempfile.mkdtemp(prefix=re.sub(r"[^\w.-]", "+", f"{case.name}-"), dir=work))
    started = time.monotonic()
    try:
        found = (_plain if case.method is None else _pipeline)(bench, case, folder, deadline)
    except UserError as e:
        return {"failed": str(e).splitlines()[0], "kind": e.kind}
    took = found["step_seconds"]
    counted = bench.timing.counted(took)
    if not counted:
        passed = duration(time.monotonic() - started)
        return {"failed": f"no step to count after {passed}, {len(took)} taken to warm up", "kind": "too_slow"}
    seconds = statistics.median(took[i] for i in counted)
    rate = case.windows * bench.plan.shape.model["context"] / seconds
    flops = sum(unit_flops(bench.plan.spec(case)).values())
    return {
        **found,
        "counted": len(counted),
        "step_s": seconds,
        "tokens_per_s": rate,
        "flops_per_token": flops,
        "model_flops_per_s": rate * flops,
        "cards": min(case.stages, len(bench.devices)),
    }


def _plain(bench: Bench, case: Case, folder: Path, deadline: float) -> Entry:
    m, timing = bench.plan.shape.model, bench.timing
    shape = m | {"head_dim": m["width"] // m["heads"], "vocabulary": bench.plan.shape.vocabulary}
    options = {
        "--shape": json.dumps(shape),
        "--way": case.way,
        "--device": bench.devices[0],
        "--windows": case.windows,
        "--microbatch": bench.plan.microbatch,
        "--warm-up": timing.warm_up,
        "--steps": timing.steps,
        "--seconds": timing.seconds,
        "--json": folder / "out.json",
    }
    argv = [sys.executable, "-m", "protomodels_cli.bench.torch_plain", *(str(w) for o in options.items() for w in o)]
    with (folder / "torch.log").open("wb") as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        code = process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return {"step_seconds": []}
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # torch.compile has processes of its own
            process.wait()
    if code:
        raise process_failed("plain torch", code, folder / "torch.log")
    found: Entry = json.loads((folder / "out.json").read_text())
    return {
        "step_seconds": found["step_seconds"],
        "loss": found["losses"][-1],
        "peak_memory": None if found["peak_memory"] is None else [found["peak_memory"]],
    }


def _pipeline(bench: Bench, case: Case, folder: Path, deadline: float) -> Entry:
    spec = bench.plan.spec(case, _tokens(bench, folder))
    memory = [] if bench.memory is None else ["--memory", str(bench.memory)]
    with local_run(spec, folder / "run", device=bench.devices, join_options=memory) as running:
        try:
            rows = _wait(running, bench.timing, deadline)
        finally:
            _kill(running)
    took = [row["seconds"] for row in rows]
    counted = [rows[i] for i in bench.timing.counted(took)]
    return {"step_seconds": took, **(_figures(spec, case, counted) if counted else {})}


def _tokens(bench: Bench, folder: Path) -> Path:
    """A file of random ids, as far as its two bytes an id go; larger vocabularies have the ids above them unused."""
    path, context = folder / "tokens.bin", bench.plan.shape.model["context"]
    most = min(bench.plan.shape.vocabulary, 1 << 16)
    ids = np.random.default_rng(0).integers(0, most, size=max(TOKENS, 64 * (context + 1)), dtype=np.uint16)
    ids.tofile(path)
    return path


def _wait(running: LocalRun, timing: Timing, deadline: float) -> list[Entry]:
    """The rows of the steps once there are enough of them, or no time is left."""
    while True:
        rows = steps_in(running.folder / "metrics.jsonl")
        if timing.reached([row["seconds"] for row in rows]) or time.monotonic() >= deadline:
            return rows
        if running.coordinator.poll() is not None:
            raise running.failure()
        for name, peer in running.peers.items():
            if peer.poll() is not None:
                raise running.failure(name)
        time.sleep(POLL_SECONDS)


def steps_in(path: Path) -> list[Entry]:
    """The step rows of a file that is being written to."""
    if not path.exists():
        return []
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    steps = (row for row in map(json.loads, lines) if row["event"] == "step")
    return [row | {"stages": by_stage(row["stages"])} for row in steps]


def _kill(running: LocalRun) -> None:
    processes = (running.coordinator, *running.peers.values())
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()  # only then is its memory on the card free


def _figures(spec: RunSpec, case: Case, rows: Sequence[Entry]) -> Entry:
    tokens, link = rows[0]["tokens"], parse_link(case.link)
    stages = [[row["stages"][i] for row in rows] for i in range(case.stages)]
    expected = forecast(spec, link, ANY_SPEED)

    def a_token(leg: str, senders: Sequence[list[Entry]]) -> float:
        sent = [used[f"{leg}_bytes"] / tokens for stage in senders for used in stage]
        return statistics.mean(sent) if sent else 0.0

    return {
        "loss": rows[-1]["loss"],
        "applied": all(row["applied"] for row in rows),
        "peak_memory": [max(used["peak_memory"] for used in stage) for stage in stages],
        "forecast_memory": [max(used["forecast_memory"] for used in stage) for stage in stages],  # the peers' own
        "most_in_flight": [max(used["most_in_flight"] for used in stage) for stage in stages],
        "bytes_per_token": {
            "forward": a_token("forward", stages[:-1]),
            "backward": a_token("backward", stages[1:]),
        },
        "shares": {part: [_share(part, stage, rows) for stage in stages] for part in _parts(rows)},
        "wire_bound": tokens / expected.wire_seconds if math.isfinite(link.bits_per_second) else None,
    }


def _parts(rows: Sequence[Entry]) -> list[str]:
    """What a stage's time is split into: every duration that peers report of a step."""
    return [name for name in rows[0]["stages"][0] if name.endswith("_s") and name != "cpu_s"]


def _share(part: str, stage: Sequence[Entry], rows: Sequence[Entry]) -> float:
    return statistics.mean(used[part] / row["seconds"] for used, row in zip(stage, rows, strict=True))


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM leaves by way of every `finally`: peers are in sessions of their own and would keep the card's memory."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
