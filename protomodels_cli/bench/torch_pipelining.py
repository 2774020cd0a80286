"""The dense model under torch.distributed.pipelining, one process a rank: what pmtrain is measured against."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from protomodels_cli.bench.torch_rank import check
from protomodels_cli.data.prepare import prepare
from protomodels_cli.errors import UserError
from protomodels_cli.launch.local import process_failed
from protomodels_cli.model.shape import slices
from protomodels_cli.spec.schema import RunSpec

WARM_UP = 2  # steps that do not count: the first one meets late ranks and cold caches
POLL_SECONDS = 0.02

Process = subprocess.Popen  # of bytes


def run(
    spec: RunSpec,
    wire: str,
    steps: int,
    folder: Path,
    command: Callable[[int, list[str]], list[str]] = lambda rank, argv: argv,
    address: Callable[[int], str] = lambda rank: "127.0.0.1",
    interface: str = "lo",
    schedule: str = "1f1b",
) -> dict[str, Any]:
    """Train for some steps and say how fast. `wire` is fp32 or bf16, `schedule` 1f1b or interleaved.

    `command` may put a rank's argv on another host (a network namespace, say), where `address` is where the others
    reach that rank and `interface` is what it reaches them through."""
    check(spec)
    if steps <= WARM_UP:
        raise UserError(
            f"{steps} steps, of which the first {WARM_UP} are not measured",
            f"use at least {WARM_UP + 1} steps",
            "too_few_steps",
        )
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    prepare(spec)  # once, so that the ranks find the tokens in the cache
    spec_file, master = folder / "spec.yaml", f"{address(0)}:{_free_port()}"
    spec_file.write_text(yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False))
    files = [folder / f"torch-{rank}.json" for rank in range(len(slices(spec)))]
    processes: list[Process[bytes]] = []
    try:
        for rank, file in enumerate(files):
            argv = [sys.executable, "-m", "protomodels_cli.bench.torch_rank", "--spec", str(spec_file)]
            argv += ["--rank", str(rank), "--master", master, "--interface", interface, "--wire", wire]
            argv += ["--schedule", schedule, "--steps", str(steps), "--json", str(file)]
            processes.append(_start(command(rank, argv), _log(folder, rank)))
        _wait(processes, folder)
    finally:
        _kill(processes)
    return _summary([json.loads(file.read_text()) for file in files])


def _start(argv: list[str], log: Path) -> Process[bytes]:
    """Start a rank with its output in a file, in a process group of its own: it may have child processes."""
    with log.open("wb") as file:
        return Process(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)


def _wait(processes: list[Process[bytes]], folder: Path) -> None:
    """Wait for all ranks. Raises as soon as one fails: the others would wait for it forever."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                raise process_failed(f"torch's rank {rank}", code, _log(folder, rank))
        if None not in codes:
            return
        time.sleep(POLL_SECONDS)


def _kill(processes: list[Process[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    def median(rank: dict[str, Any]) -> float:
        return statistics.median(rank["step_seconds"][WARM_UP:])

    slowest = max(ranks, key=median)
    return {
        "tokens_per_s": slowest["tokens_per_step"] / median(slowest),
        "step_seconds": slowest["step_seconds"],
        "losses": ranks[-1]["losses"],
        "cpu_seconds": sum(rank["cpu_seconds"] for rank in ranks),
    }


def _log(folder: Path, rank: int) -> Path:
    return folder / "logs" / f"torch-{rank}.log"


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])
