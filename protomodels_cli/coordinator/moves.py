"""One event's effect on the state, collected: the records to journal and the commands to carry out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from protomodels_cli.coordinator.events import Command, Tell, WriteRow
from protomodels_cli.coordinator.history import Record, fold
from protomodels_cli.coordinator.notices import Notice
from protomodels_cli.coordinator.reasons import TaskKind
from protomodels_cli.coordinator.state import State, Task


class Moves:
    def __init__(self, state: State, now: float):
        self.state, self.now = state, now
        self.records: list[Record] = []
        self.commands: list[Command] = []

    def record(self, record: Record) -> None:
        self.records.append(record)
        self.state = replace(self.state, history=fold(self.state.history, record))

    def set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def do(self, *commands: Command) -> None:
        self.commands += commands

    def tell(self, notice: Notice) -> None:
        self.do(Tell(notice))

    def write_row(self, event: str, step: int, **fields: Any) -> None:
        """Into the metrics. Of rows with the same event and step, those of the highest lineage count."""
        self.do(WriteRow({"event": event, "lineage": self.state.history.lineage, "step": step, **fields}))

    def begin(self, kind: TaskKind, step: int) -> Task:
        recorded = kind == "step" and self.state.is_recorded(step)
        task = Task(self.state.tasks + 1, kind, step, self.now, recorded)
        self.set(task=task, blocked=None, heard={}, waited=0.0, tasks=task.number)
        return task
