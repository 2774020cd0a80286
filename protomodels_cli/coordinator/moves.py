"""One event's effect on the state, collected: the records to journal and the commands to carry out."""

from __future__ import annotations

from dataclasses import replace

from protomodels_cli.coordinator.conduct import Conduct
from protomodels_cli.coordinator.events import Command, Tell, WriteRow
from protomodels_cli.coordinator.history import Record, fold
from protomodels_cli.coordinator.notices import Notice
from protomodels_cli.coordinator.peers import Peer
from protomodels_cli.coordinator.reasons import TaskKind
from protomodels_cli.coordinator.seats import Seats
from protomodels_cli.coordinator.snapshots.saving import Saving
from protomodels_cli.coordinator.state import Measured, State
from protomodels_cli.coordinator.work import Task, Work, Working


class Moves:
    def __init__(self, state: State, now: float):
        self.state, self.now = state, now
        self.records: list[Record] = []
        self.commands: list[Command] = []

    # Parts of the state

    @property
    def seats(self) -> Seats:
        return self.state.seats

    @seats.setter
    def seats(self, seats: Seats) -> None:
        self.state = replace(self.state, seats=seats)

    @property
    def work(self) -> Work:
        return self.state.work

    @work.setter
    def work(self, work: Work) -> None:
        self.state = replace(self.state, work=work)

    @property
    def conduct(self) -> Conduct:
        return self.state.conduct

    @conduct.setter
    def conduct(self, conduct: Conduct) -> None:
        self.state = replace(self.state, conduct=conduct)

    @property
    def saving(self) -> Saving:
        return self.state.saving

    @saving.setter
    def saving(self, saving: Saving) -> None:
        self.state = replace(self.state, saving=saving)

    @property
    def measured(self) -> Measured:
        return self.state.measured

    @measured.setter
    def measured(self, measured: Measured) -> None:
        self.state = replace(self.state, measured=measured)

    def know(self, *peers: Peer) -> None:
        """What these connected peers say of themselves now."""
        self.state = replace(self.state, peers={**dict(self.state.peers.items()), **{peer.id: peer for peer in peers}})

    # What follows

    def record(self, record: Record) -> None:
        self.records.append(record)
        self.state = replace(self.state, history=fold(self.state.history, record))

    def do(self, *commands: Command) -> None:
        self.commands += commands

    def tell(self, notice: Notice) -> None:
        self.do(Tell(notice))

    def write_row(self, event: str, step: int, **fields: object) -> None:
        """Into the metrics. Of rows with the same event and step, those of the highest lineage count."""
        self.do(WriteRow({"event": event, "lineage": self.state.history.lineage, "step": step, **fields}))

    def begin(self, kind: TaskKind, step: int) -> Task:
        recorded = kind == "step" and self.state.is_recorded(step)
        task = Task(self.state.tasks + 1, kind, step, self.now, recorded)
        self.state = replace(self.state, work=Working(task), tasks=task.number)
        return task
