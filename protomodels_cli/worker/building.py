"""How a stage gets into this peer's memory: from the seed, from a part of a snapshot, or as it is there already.

For a generation, or ahead of one: a spare builds a stage in case its holder does not come back, or to replace a slower
one. If it is then assigned just that, it is not built again. It must not know links, tasks or decisions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from protomodels_cli.model.basis import Basis
from protomodels_cli.model.shape import Slice, slices
from protomodels_cli.model.stage import Layout
from protomodels_cli.protocol.audit import Compared
from protomodels_cli.protocol.parts import Part
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.parts import part_message
from protomodels_cli.wire.pb import pmtrain_pb2 as pb
from protomodels_cli.worker import notices, orders
from protomodels_cli.worker.cards import Cards
from protomodels_cli.worker.computing import Chooser
from protomodels_cli.worker.engine import Engine
from protomodels_cli.worker.messages import assigned_notice, assignment_of, decision_of, lost_message
from protomodels_cli.worker.snapshots.exchange import SnapshotExchange
from protomodels_cli.worker.telling import Tell

Chore = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


@dataclass
class Ahead:
    """A stage that is built ahead of an assignment."""

    number: int  # below zero, in place of a generation's
    assigned: pb.Assignment
    part: Part
    fetching: asyncio.Task[None] | None = None
    path: Path | None = None  # of the part, once it is here and whole


class Building:
    """Orders stages of the engine. It must not know what comes of them, but for those that are built ahead."""

    def __init__(
        self,
        spec: RunSpec,
        cards: Cards,
        engine: Engine,
        snapshots: SnapshotExchange,
        basis: Callable[[pb.Basis], Basis],
        chore: Chore,
        send: Callable[..., None],
        tell: Tell,
    ):
        self._spec, self._cards, self._engine, self._snapshots = spec, cards, engine, snapshots
        self._basis, self._chore, self._send, self._tell = basis, chore, send, tell
        self._chooser = Chooser(cards)
        self._ahead: Ahead | None = None
        self._count = 0

    def memory_used(self) -> dict[str, int]:
        return self._chooser.memory_used()

    def cut(self, assigned: pb.Assignment) -> tuple[RunSpec, Slice]:
        """The spec with the run's own cut, and the stage's layers."""
        spec = self._spec.model_copy(update={"stages": list(assigned.layers_per_stage)})
        return spec, slices(spec)[assigned.stage]

    def layout(self, spec: RunSpec, layers: Slice) -> Layout:
        """Which of the stage's layers lie on which card."""
        return self._cards.layout(spec, layers)

    def compute(self, job: Callable[[], list[Compared]]) -> Future[list[Compared]]:
        """Have the engine do this between its orders, while it has no stage; else nothing comes of it."""
        result: Future[list[Compared]] = Future()
        self._engine.order(orders.Audit(job, result))
        return result

    def take(self, assigned: pb.Assignment) -> asyncio.Task[None] | None:
        """Have the stage of an assignment; what it still takes beside the engine, if anything."""
        spec, layers = self.cut(assigned)
        self._tell(assigned_notice(assigned, layers))
        assignment = self._pick(assigned, spec, layers)
        if assigned.reuse:
            decision = decision_of(assigned.decision) if assigned.decision.step else None
            self._engine.order(orders.Reuse(assignment, decision))
            return None
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.fetching is not None:
            ahead.fetching.cancel()
        if ahead is None or ahead.part != part_to_build(assigned):
            self._engine.order(orders.Drop())  # the memory will be needed
        elif ahead.path is not None:
            self._build(assigned, assignment, None, ahead.path)
            return None
        return self._make(assigned, assignment)

    async def prepare(self, assigned: pb.Assignment) -> None:
        """Build this stage, and say so."""
        await self.drop()
        self._engine.order(orders.Drop())
        self._count += 1
        spec, layers = self.cut(assigned)
        self._ahead = Ahead(-self._count, assigned, part_to_build(assigned))
        self._tell(notices.Preparing(assigned.stage, assigned.step))
        assignment = replace(self._pick(assigned, spec, layers), generation=self._ahead.number)
        self._ahead.fetching = self._make(assigned, assignment)

    def _pick(self, assigned: pb.Assignment, spec: RunSpec, layers: Slice) -> orders.Assignment:
        picked = self._chooser.pick(spec, layers, assigned.memory)
        for notice in self._chooser.notices(spec, picked, assigned.reuse):
            self._tell(notice)
        return assignment_of(assigned, picked)

    async def drop(self) -> None:
        """What was built ahead is not needed; whoever calls this has the engine let go of it."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.fetching is not None:
            ahead.fetching.cancel()
            await asyncio.wait([ahead.fetching])

    def _make(self, assigned: pb.Assignment, assignment: orders.Assignment) -> asyncio.Task[None] | None:
        if assigned.HasField("restore"):
            return self._chore(self._restore(assigned, assignment))
        basis = self._basis(assigned.basis) if assigned.HasField("basis") else None
        self._build(assigned, assignment, basis, None)
        return None

    def _build(
        self, assigned: pb.Assignment, assignment: orders.Assignment, basis: Basis | None, saved: Path | None
    ) -> None:
        spec, layers = self.cut(assigned)
        self._engine.order(orders.Build(assignment, spec, layers, self.layout(spec, layers), basis, saved))

    async def _restore(self, assigned: pb.Assignment, assignment: orders.Assignment) -> None:
        """Build the stage from its part of a snapshot, wherever that can be had."""
        wanted = part_to_build(assigned)
        try:
            fetched = await self._snapshots.find(wanted)
        except ValueError as e:
            self._send(snapshot_lost=lost_message(assigned, str(e)))
            return
        path = self._snapshots.parts.path(wanted)
        if self._ahead is not None and assignment.generation == self._ahead.number:
            self._ahead.path = path
            if fetched:
                self._send(prefetched=part_message(wanted))
        self._build(assigned, assignment, None, path)

    def hear(self, number: int, item: Any) -> None:
        """What the engine says of a stage that is built ahead."""
        ahead = self._ahead
        if ahead is None or number != ahead.number:
            return  # of one that is not needed any more
        match item:
            case orders.TaskReport():
                self._send(ready=part_message(ahead.part))
            case orders.PartUnusable(why):
                self._send(snapshot_lost=lost_message(ahead.assigned, why))


def part_to_build(assigned: pb.Assignment) -> Part:
    """What the stage is built from; without a hash: the seed."""
    restore = assigned.restore
    return Part(restore.lineage, restore.step, assigned.stage, restore.sha256)
