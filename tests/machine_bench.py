"""The machine without processes: what it recorded, and stages that do as they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from protomodels_cli import timeouts
from protomodels_cli.coordinator import events as ev
from protomodels_cli.coordinator import machine, notices, reasons, sentences
from protomodels_cli.coordinator.checking import right_hashes
from protomodels_cli.coordinator.history import (
    Record,
)
from protomodels_cli.coordinator.next_task import waiting_for
from protomodels_cli.coordinator.peers import Holding, Peer
from protomodels_cli.coordinator.work import Report
from protomodels_cli.protocol.parts import Part
from protomodels_cli.protocol.steps import units
from protomodels_cli.spec import RunSpec
from protomodels_cli.wire.troubles import LinkBroken

SILENT = reasons.NoHeartbeat(5.0)
CUT_OFF = reasons.ConnectionClosed()
BROKEN = reasons.PeerReport(LinkBroken(1))
N = TypeVar("N", bound=notices.Notice)


def peer(i: int) -> Peer:
    return Peer(f"p{i}", f"name-{i}", "cpu", 1 << 34, 1e9, "127.0.0.1", 1000 + i, 0.0)


class Bench:
    """A machine, and all that came out of it."""

    def __init__(self, spec: RunSpec):
        dense = spec.subspace.form == "dense"
        self.state = machine.start(spec, "" if dense else "u0", (0, "") if dense else (1, "t"))
        self.first = self.state.history
        self.now = 0.0
        self.records: list[Record] = []
        self.commands: list[ev.Command] = []

    def tell(self, event: ev.Event) -> list[ev.Command]:
        self.now += 0.1
        self.state, records, commands = machine.apply(self.state, event, self.now)
        self.records += records
        self.commands += commands
        waits = waiting_for(self.state, self.now)
        assert (waits is None) == self.state.history.over, "every wait has a reason"
        assert waits is None or sentences.waiting(waits), "and a sentence"
        assert all(sentences.sentence(command.notice) for command in commands if isinstance(command, ev.Tell))
        return commands

    def lose(self, peer: str) -> list[ev.Command]:
        """Its process died: the connection was closed, and it does not come back."""
        commands = self.tell(ev.Left(peer, CUT_OFF))
        self.now += timeouts.SESSION_RECONNECT
        return commands + self.tell(ev.Tick())

    def join(self, *peers: int) -> None:
        for i in peers:
            self.tell(ev.Joined(peer(i)))

    def norms(self, stage: int, squared: float = 0.25) -> tuple[tuple[str, float], ...]:
        return tuple((unit, squared) for unit in units(self.state.history.layers, stage))

    def report(self, stage: int = 0) -> Report:
        return Report(
            hashes=right_hashes(self.state),
            norms=self.norms(stage),
            loss_sum=64.0,
            tokens=64,
            parameters=(("w", "h"),),
        )

    def done(self, stage: int, **changes: Any) -> list[ev.Command]:
        assert self.state.task is not None
        report = replace(self.report(stage), **changes)
        history = self.state.history
        return self.tell(ev.Done(history.holders[stage], history.generation, self.state.task.number, report))

    def answer(self) -> None:
        """Everything that an honest run owes, once."""
        state, history = self.state, self.state.history
        if not state.placed:
            return
        if state.owed is not None:
            moved = state.spec.subspace.update.interval > 0
            sha256 = "new" if moved else None
            self.tell(ev.SubspaceReported(history.holders[-1], history.generation, state.owed, {"x": 1}, sha256))
        elif history.next_basis is not None and len(state.took_basis) < state.stages:
            new = history.next_basis
            for holder in history.holders:
                self.tell(ev.BasisTaken(holder, history.generation, new.version, new.sha256))
        elif history.pending:
            mark = history.pending[0]
            parts = tuple(f"{mark.step}-{i}" for i in range(state.stages))
            self.tell(ev.SnapshotWhole(mark.lineage, mark.step, parts))
        elif state.task is not None:
            for stage in range(state.stages):
                if stage not in self.state.heard and self.state.task == state.task:
                    self.done(stage)

    def finish(self) -> None:
        self.answer_until(lambda: self.state.history.over)

    def answer_until(self, what: Callable[[], Any], answer: Callable[[], Any] | None = None) -> None:
        """Answer everything, or as told, until that is so."""
        for _ in range(500):
            if what():
                return
            (answer or self.answer)()
        raise AssertionError(f"after 500 answers it waits for {self.waits()}")

    def waits(self) -> reasons.Waiting | None:
        return waiting_for(self.state, self.now)

    def tasks(self) -> list[tuple[str, int]]:
        return [(c.task.kind, c.task.step) for c in self.commands if isinstance(c, ev.SendTurn) and c.task]


def told(commands: Iterable[ev.Command], kind: type[N]) -> list[N]:
    """Notices of this kind."""
    return [c.notice for c in commands if isinstance(c, ev.Tell) and isinstance(c.notice, kind)]


def preparing(commands: Iterable[ev.Command]) -> list[tuple[str, Part]]:
    """Who is told to prepare a stage, and from which part."""
    return [(c.peer, c.part) for c in commands if isinstance(c, ev.PrepareStage)]


def to_step(b: Bench, step: int) -> None:
    """Until that step is under way."""
    b.answer_until(lambda: b.state.task and (b.state.task.kind, b.state.task.step) == ("step", step))


def holding(b: Bench, stage: int, **changes: Any) -> Holding:
    history = b.state.history
    return replace(Holding(history.lineage, stage, history.layers, history.step), **changes)
