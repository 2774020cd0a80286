"""Injects faults into a run on this machine: at random from a seed, processes are killed, stopped or cut off."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from protomodels_cli.launch.cable import Cable
from protomodels_cli.launch.local import LocalRun
from protomodels_cli.wire.pb.pmtrain_pb2 import RunStatus

LOOK_SECONDS = 0.05
FIRST_STEP = 5  # nothing happens before it
RECOVERY_SECONDS = 60.0  # a run that does not recover within these is given the next fault all the same
CALM = 2.0, 8.0  # seconds between a recovery and the next fault
AWAY = 0.5, 3.0  # seconds until a killed process is started again
SILENT = 1.0, 9.0  # seconds that a process is stopped or cut off: shorter or longer than a lease


@dataclass
class Fault:
    what: str
    at_s: float  # since the beginning
    step: int
    seconds_to_next_step: float | None = (
        None  # until another step was granted; none: stalled, or the run was over before
    )
    stalled: bool = False  # no other step was granted within RECOVERY_SECONDS


class Chaos:
    def __init__(self, seed: int, running: LocalRun, cables: dict[str, Cable], say: Callable[[str], None]):
        self._random, self._running, self._cables, self._say = random.Random(seed), running, cables, say
        self._began = time.monotonic()
        self._seen: RunStatus | None = None
        self._faults: list[Fault] = []

    def saw(self, status: RunStatus) -> None:
        """The run's status, several times a second while the coordinator answers."""
        self._seen = status

    @property
    def faults(self) -> list[dict[str, Any]]:
        return [asdict(fault) for fault in self._faults]

    async def make(self) -> None:
        """Inject one fault after another until cancelled, each after the run has recovered from the last."""
        while self._seen is None or self._seen.step < FIRST_STEP or self._seen.phase != RunStatus.RUNNING:
            await asyncio.sleep(LOOK_SECONDS)
        while True:
            await asyncio.sleep(self._random.uniform(*CALM))
            await self._trouble()

    async def _trouble(self) -> None:
        peers = sorted(self._running.peers)
        one, other = self._random.sample(peers, 2) if len(peers) > 1 else (peers[0], peers[0])
        kind = self._random.choice(["kill", "kill two", "kill coordinator", "kill both", "stop", "cut", "restart"])
        match kind:
            case "kill":
                await self._happens(f"kill -9 {one}", self._kill(one))
            case "kill two":
                await self._happens(f"kill -9 {one} and {other}", self._kill(one, other))
            case "kill coordinator":
                await self._happens("kill -9 coordinator", self._kill("coordinator"))
            case "kill both":
                await self._happens(f"kill -9 coordinator and {one}", self._kill("coordinator", one))
            case "stop":
                await self._happens(f"SIGSTOP {one}", self._stop(one))
            case "cut":
                await self._happens(f"cut {one} off", self._cut(one))
            case _:
                await self._happens(f"Ctrl-C {one}", self._restart(one))

    async def _happens(self, what: str, doing: Any) -> None:
        before = self._seen
        assert before is not None
        fault = Fault(what, time.monotonic() - self._began, before.step)
        self._faults.append(fault)
        self._say(f"step {before.step}: {what}")
        happening = asyncio.create_task(doing)
        started = time.monotonic()
        try:
            # Its effect may be slow to show, and a spare's loss has none: look again after a lease.
            while not (recovered := self._is_over(before)) and time.monotonic() - started < RECOVERY_SECONDS:
                await asyncio.sleep(LOOK_SECONDS)
            if recovered:
                fault.seconds_to_next_step = time.monotonic() - started
            fault.stalled = not recovered
            await happening
        finally:
            happening.cancel()

    def _is_over(self, before: RunStatus) -> bool:
        """Whether the run has recovered: it has granted a step since, in the new generation if there is one."""
        now = self._seen
        if now is None or now.phase != RunStatus.RUNNING:
            return False
        return now.generation > before.generation or now.step >= before.step + 2

    def _process(self, who: str) -> Any:
        return self._running.coordinator if who == "coordinator" else self._running.peers[who]

    async def _kill(self, *who: str) -> None:
        for one in who:
            self._process(one).kill()
        for one in who:
            self._process(one).wait()
            await asyncio.sleep(self._random.uniform(*AWAY))
            self._running.start_again(one)

    async def _stop(self, who: str) -> None:
        self._process(who).send_signal(signal.SIGSTOP)
        await asyncio.sleep(self._random.uniform(*SILENT))
        with contextlib.suppress(ProcessLookupError):
            self._process(who).send_signal(signal.SIGCONT)

    async def _cut(self, who: str) -> None:
        self._cables[who].cut()
        await asyncio.sleep(self._random.uniform(*SILENT))
        self._cables[who].mend()

    async def _restart(self, who: str) -> None:
        self._process(who).send_signal(signal.SIGINT)
        while self._process(who).poll() is None:
            await asyncio.sleep(LOOK_SECONDS)
        await asyncio.sleep(self._random.uniform(*AWAY))
        self._running.start_again(who)
