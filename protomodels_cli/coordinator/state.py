"""What the coordinator knows: peers, seats, the task at hand; and the history below it.

Only the history outlives the process. Everything else is heard again from the peers when they register.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from protomodels_cli.coordinator.conduct import Conduct
from protomodels_cli.coordinator.departures import Departed
from protomodels_cli.coordinator.history import History
from protomodels_cli.coordinator.notices import Relinking
from protomodels_cli.coordinator.peers import Peers, nobody
from protomodels_cli.coordinator.reasons import Holder
from protomodels_cli.coordinator.seats import Seats
from protomodels_cli.coordinator.snapshots.saving import Saving
from protomodels_cli.coordinator.work import Blocked, Report, Task, Unplaced, Work, Working
from protomodels_cli.protocol import steps
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.usage import Usage

Standing = Literal["spare", "holder", "leaving", "resting", "away", "gone", "unknown"]  # of a peer, in the run

KEPT_SECONDS = 50  # the durations of the last steps are kept


@dataclass(frozen=True)
class Timed:
    """What a step took: from the grant on, and each stage in the model."""

    seconds: float
    compute: tuple[float, ...]


@dataclass(frozen=True)
class Measured:
    """What steps took of late."""

    decided_at: tuple[float, ...] = ()  # when the last steps were decided (protocol/throughput.py)
    step_seconds: tuple[float, ...] = ()  # what the steps of these took, from the grant on
    timed: tuple[Timed, ...] = ()  # the last steps of this generation
    linked: float | None = None  # seconds that the stages took to link last
    usage: Mapping[int, Usage] = field(default_factory=dict)  # stage → what its last step took


@dataclass(frozen=True)
class State:
    spec: RunSpec
    t_fixed: tuple[int, str]  # version and hash
    history: History
    peers: Peers = field(default_factory=nobody)  # connected ones, in the order in which they joined
    departed: Mapping[str, Departed] = field(default_factory=dict)  # peers that are gone, the last one last
    leaving: frozenset[str] = frozenset()  # holders that go when the step is done and saved
    conduct: Conduct = field(default_factory=Conduct)
    seats: Seats = field(default_factory=Seats)
    work: Work = field(default_factory=Unplaced)
    tasks: int = 0  # begun so far
    undelivered: bool = False  # the last decision has not been sent yet
    took_basis: frozenset[int] = frozenset()  # stages that have the next basis
    fetches: int = 0  # stages whose holders had to fetch a part when they were assigned
    broken: int = 0  # generations in a row that ended before a step was decided
    stalled: int = 0  # … because a task did not end
    trouble: Relinking | None = None  # the last of these generations' end, as it was told
    replaceable: bool | None = None  # whether any one holder could be lost; None: not known yet
    saving: Saving = field(default_factory=Saving)
    cutting: bool = False  # the first snapshot is being cut from a checkpoint
    measured: Measured = field(default_factory=Measured)
    stopping: bool = False  # the owner wants everything saved and ended
    stopped: bool = False  # … and it was
    home: str = ""  # the coordinator's address in the join link
    folder: str = ""  # the run directory, as the owner named it

    # What it is doing

    @property
    def placed(self) -> bool:
        """A generation is open: the history's holders have been told so, and are here or absent."""
        return not isinstance(self.work, Unplaced)

    @property
    def task(self) -> Task | None:
        return self.work.task if isinstance(self.work, Working) else None

    @property
    def heard(self) -> Mapping[int, Report]:
        """Stage → its report on the task."""
        return self.work.heard if isinstance(self.work, Working) else {}

    @property
    def waited(self) -> float:
        """Seconds of the task in which a holder was away, and came back."""
        return self.work.waited if isinstance(self.work, Working) else 0.0

    @property
    def blocked(self) -> Blocked | None:
        return self.work if isinstance(self.work, Blocked) else None

    @property
    def stages(self) -> int:
        return len(self.history.holders)

    @property
    def called(self) -> str:
        """The name under which the owner's commands find the run."""
        return self.folder.rpartition("/")[2] or self.spec.name

    @property
    def owed(self) -> int | None:
        """The step after which the last stage still owes its word on the subspace."""
        step = steps.last_report(self.spec.subspace, self.history.step)
        return step if step > self.history.reported else None

    def stage_of(self, peer: str) -> int | None:
        """The stage that this peer holds in this generation; None: it holds none."""
        return _by_holder(self.history.holders).get(peer) if self.placed else None

    def stage_at(self, peer: str) -> int | None:
        """The stage that the peer holds, or has in memory while no generation is open."""
        stage = self.stage_of(peer)
        return self.seats.holds.get(peer) if stage is None else stage

    def standing(self, peer: str) -> Standing:
        if peer not in self.peers:
            return "away" if peer in self.seats.absent else "gone" if peer in self.departed else "unknown"
        if peer in self.leaving:
            return "leaving"
        if self.stage_at(peer) is not None:
            return "holder"
        known = self.peers.get(peer)
        return "spare" if known is None or known.rest is None else "resting"

    def stage_to_build(self, peer: str, generation: int) -> int | None:
        """The stage that this peer was told to build: in this generation, or (0) ahead of one."""
        if generation == self.history.generation:
            return self.stage_of(peer)
        preparation = self.seats.preparing.get(peer)
        return preparation.part.stage if preparation is not None and generation == 0 else None

    @property
    def stands_still(self) -> bool:
        """Somebody is missing."""
        return not self.placed or bool(self.seats.absent)

    def is_recorded(self, step: int) -> bool:
        """Whether the messages of this step are kept: an audit starts from a snapshot of the step before, with the
        same basis, and such a snapshot was begun."""
        version, _ = self.history.basis_for(step)
        marks = (mark for mark in self.history.pending if mark.lineage == self.history.lineage)
        return self.spec.audit > 0 and any((m.step, m.basis_version) == (step - 1, version) for m in marks)

    @property
    def absent_stages(self) -> tuple[int, ...]:
        return tuple(stage for stage, peer in enumerate(self.history.holders) if peer in self.seats.absent)

    def holders_of(self, stages: Iterable[int]) -> tuple[Holder, ...]:
        """The holders of these stages with their names, for notices."""
        ids = self.history.holders
        return tuple(Holder(i, ids[i], self.name_of(ids[i])) for i in stages)

    def name_of(self, peer: str) -> str:
        """Also of one that is gone; empty where that is not known any more."""
        known = self.peers.get(peer) or self.departed.get(peer)
        return known.name if known is not None else ""


@lru_cache(maxsize=4)
def _by_holder(holders: tuple[str, ...]) -> Mapping[str, int]:
    """Stages by holder: asked for with every report, and for every peer of a status."""
    return {peer: stage for stage, peer in enumerate(holders)}
