"""`pmtrain join` as `bench transfers` starts it: the holder of the middle stage uploads and fetches parts beside the
steps, in one way after another (`transfers.PHASES`).

Stages sleep instead of multiplying: all peers are on one machine here, and what one computes would slow down what the
others send. Messages, parts and all else are as large as they would be, and take the same way.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import runpy
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import torch
from torch import Tensor

from protomodels_cli.bench.transfers import LAYER_SECONDS, MIDDLE, PHASES, PHASES_FILE, Phase
from protomodels_cli.cost.saving import SLOW_LINE, least_rate
from protomodels_cli.model.optim import StageOptimizer
from protomodels_cli.model.stage import InFlight, Stage
from protomodels_cli.protocol.parts import Part
from protomodels_cli.wire.client import Line
from protomodels_cli.wire.emulated import Connection
from protomodels_cli.worker import session
from protomodels_cli.worker.snapshots import transfer
from protomodels_cli.worker.snapshots.direct import StoreAccess
from protomodels_cli.worker.snapshots.exchange import SnapshotExchange
from protomodels_cli.worker.snapshots.flow import Flow, Throttle
from protomodels_cli.worker.snapshots.pacing import NO_STAGE, Pace
from protomodels_cli.worker.snapshots.part_store import PartStore

AGAIN = 0.2  # seconds until an upload goes on that the coordinator does not take yet, or that has not begun


class Busy(SnapshotExchange):
    """What is not measured goes past the emulated lines: the first snapshot, and the others' parts of all."""

    def __init__(self, spec: Any, folder: Any, line: Line, *others: Any):
        own = Line(line._addresses, line._open)
        own.lead_over(Connection(spec.wire.link))
        super().__init__(spec, folder, Line(line._addresses, line._open), *others)
        self._signs, self._activations = self._activations, NO_STAGE
        self._no_store = StoreAccess(False, self._tell)
        self._lines = {"yields": line, "own_line": own, "pushes": line}
        self._fetched = {how: PartStore(folder.with_name(f"fetched-{how}")) for how in self._lines}
        self._pending: Part | None = None
        self._paces: list[Pace] = []  # of this phase
        self._driving: asyncio.Task[None] | None = None

    def _upload(self, part: Part) -> None:
        if self._driving is None:
            super()._upload(part)
        else:
            self._pending = part

    async def keep(self, keep: Any) -> None:
        await super().keep(keep)
        holds_middle = any(part.stage == MIDDLE for part in self.parts.all())
        if self._newest and holds_middle and self._driving is None:
            self._driving = self._chore(self._drive())

    async def _drive(self) -> None:
        part, file = self._newest[MIDDLE], self.parts.folder.with_name(PHASES_FILE)
        for phase in itertools.chain.from_iterable(itertools.repeat(PHASES)):
            began, self._paces = time.time(), []
            with suppress(TimeoutError):
                async with asyncio.timeout(phase.seconds):
                    if phase.what == "fetch":
                        await self._fetch_on(phase, part)
                    elif phase.what == "upload":
                        await self._upload_on(phase)
                    else:
                        await asyncio.Event().wait()
            whole = phase.what == "fetch" and self._fetched[phase.how].path(part).exists()
            moved = sum(pace.delivered for pace in self._paces)
            row = {"began": began, "ended": time.time(), "bytes": moved, "whole": whole}
            with file.open("a") as out:
                out.write(json.dumps({"what": phase.what, "how": phase.how, **row}) + "\n")
            if whole and phase.how == "yields":
                part = self._newest[MIDDLE]  # the one before may go

    async def _fetch_on(self, phase: Phase, part: Part) -> None:
        """From where the last such phase ended."""
        parts, flow = self._fetched[phase.how], partial(self._flow, phase, SLOW_LINE / 8, self._signs.awaited)
        if parts.path(part).exists():
            parts.remove(part)
        await transfer.fetch_part(self._lines[phase.how], self._metadata, parts, part, flow, self._no_store)

    async def _upload_on(self, phase: Phase) -> None:
        while True:
            if part := self._pending:
                least = least_rate(self._spec, self.parts.path(part).stat().st_size)
                flow = partial(self._flow, phase, least, self._signs.leaving)
                with suppress(grpc.aio.AioRpcError):
                    line = self._lines[phase.how]
                    await transfer.upload_part(line, self._metadata, self.parts, part, flow, self._no_store)
                    self._pending = None
            await asyncio.sleep(AGAIN)

    def _flow(self, phase: Phase, least: float, needed: Callable[[], bool]) -> Flow:
        self._paces.append(pace := Pace(least, urgent=phase.how == "pushes"))
        return Flow(pace, needed, Throttle(None))


def run_forward(self: Stage, tokens_BT: Tensor, received: Tensor | None) -> InFlight:
    time.sleep(LAYER_SECONDS * len(self.slice.layers))
    return InFlight(tokens_BT, received, torch.zeros((*tokens_BT.shape, self.shape.width)))


def run_backward(self: Stage, flight: InFlight, gradient: Tensor) -> Tensor | None:
    time.sleep(2 * LAYER_SECONDS * len(self.slice.layers))
    return None if flight.received is None else torch.zeros_like(flight.received)


def run_loss(self: Stage, flight: InFlight, targets_BT: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:
    return torch.ones((), dtype=torch.float64), run_backward(self, flight, flight.output)


def prepare(self: StageOptimizer) -> dict[str, float]:
    return {trained.unit: 1.0 for trained in self.parameters}


def apply(self: StageOptimizer, lr: float, coefficient: float) -> None:
    """Moments are made at the first step, and are part of what is saved."""
    for trained in self.parameters:
        if not trained.state:
            trained.gradient = torch.zeros_like(trained.parameter)
            trained.own()
            trained.gradient = None
    self.applied += 1


if __name__ == "__main__":
    Stage.run_forward, Stage.run_backward, Stage.run_loss = run_forward, run_backward, run_loss  # type: ignore[method-assign]
    StageOptimizer.prepare, StageOptimizer.apply = prepare, apply  # type: ignore[method-assign]
    session.SnapshotExchange = Busy  # type: ignore[assignment, misc]
    runpy.run_module("protomodels_cli", run_name="__main__")
