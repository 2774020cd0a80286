"""What the coordinator knows: peers, the task at hand, what was heard; and the history below it.

Only the history outlives the process. Everything else is heard again from the peers when they register.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from protomodels_cli.coordinator.departures import Departed
from protomodels_cli.coordinator.history import History
from protomodels_cli.coordinator.notices import Relinking
from protomodels_cli.coordinator.reasons import (
    Blocker,
    Holder,
    Missing,
    NoPeers,
    Reseating,
    StoreUnreachable,
    TaskKind,
)
from protomodels_cli.coordinator.snapshots.failures import PartFailure
from protomodels_cli.coordinator.snapshots.pace import Pace
from protomodels_cli.cost.activations import Computation
from protomodels_cli.protocol import steps
from protomodels_cli.protocol.audit import Recorded
from protomodels_cli.protocol.parts import Part
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.usage import Usage

KEPT_SECONDS = 50  # the durations of the last steps are kept


@dataclass(frozen=True)
class Holding:
    """What a peer has in memory: a stage after all decisions up to `applied` of a lineage."""

    lineage: int
    stage: int
    layers: tuple[int, ...]  # of all stages
    applied: int
    prepared: int = 0  # the generation in which it said that it has the gradients of the step after that; 0: it has not
    generation: int = 0  # that it still works in, linked to its neighbours; 0: in none


@dataclass(frozen=True)
class Rest:
    """A peer wants no stage for now."""

    until: float = 0.0  # seconds since 1970; 0: until somebody wakes it
    own: bool = True  # whether it was asked for on the peer's machine; the owner does not end that


@dataclass(frozen=True)
class Peer:
    """A peer with an open session."""

    id: str
    name: str
    device: str
    memory: int  # bytes of its device's memory that the run may use
    flops: float
    address: str  # as the coordinator sees it
    port: int  # for neighbours; 0: they may not dial it
    since: float
    holding: Holding | None = None  # when it registered
    parts: frozenset[Part] = frozenset()  # on its disk, as far as it has said
    host_memory: int | None = None  # bytes of the machine's own memory; None: the device's memory is that
    computation: Computation | None = None  # how it computes; None: it has not said
    cards: tuple[str, ...] = ()  # peers with the same one share it; empty: not known
    card_memory: int = 0  # bytes that were free there, on all of them, when it joined
    reached: tuple[str, ...] = ()  # addresses at which the coordinator has dialled it
    addresses: tuple[str, ...] = ()  # of its interfaces, as it says
    machine: str = ""  # peers with the same one share a loopback interface; empty: not known
    relay_trips: tuple[tuple[str, float], ...] = ()  # relay → seconds from this peer to it and back
    outside_port: int = 0  # of `outside_host`, that leads to `port`; 0: the same
    outside_host: str = ""  # the address of its router, where that maps a port
    token: str = ""  # the id of the token that it joined with: `tokens.OWN` for the run's own
    rest: Rest | None = None
    upload: float = math.inf  # bits a second that it may send; that it may receive
    download: float = math.inf
    person: str = ""  # whom the owner made that token for; empty: not said


@dataclass(frozen=True)
class Absence:
    """Of a holder without a session, which may have its stage in memory still."""

    since: float  # its last word
    until: float | None = None  # how long it is waited for; None: as long as that costs less than going on without it


@dataclass(frozen=True)
class Preparation:
    """Of a peer that was told to build a stage: assigned to it, or a spare, in case its holder does not come back."""

    part: Part  # that it builds the stage from; without a hash: from the seed
    asked: float
    here: float | None  # since when the part is on its disk, as far as it has said
    ready: bool = False  # of a spare
    failed: int = 0  # times that it could not use the part, though that is whole
    away: StoreUnreachable | None = None  # what kept it from the part when `asked` was last put forward
    late: bool = False  # it took longer than expected, and that was counted


@dataclass(frozen=True)
class Reseat:
    """A stage is about to be given to a spare that is faster. The run stands at the step of a snapshot meanwhile."""

    holder: str
    spare: str
    snapshot: tuple[int, int]
    since: float
    why: Reseating
    names: tuple[str, ...] = ()  # of the spare and its voice, by which its turns are counted


@dataclass(frozen=True)
class Task:
    number: int
    kind: TaskKind
    step: int
    started: float
    recorded: bool = False  # a step whose messages every stage keeps, in case it is audited


@dataclass(frozen=True)
class FormerHolder:
    """It has the stage in memory still, and takes it back should the new holder not finish the first step."""

    peer: str
    stage: int


@dataclass(frozen=True)
class BrokenLink:
    """A holder said that its link to a neighbour does not work."""

    peer: str
    other: str
    at: float


@dataclass(frozen=True)
class Timed:
    """What a step took: from the grant on, and each stage in the model."""

    seconds: float
    compute: tuple[float, ...]


@dataclass(frozen=True)
class Hashes:
    """Versions and hashes of U and T_fixed: of those that a stage uses, or of those that it must use."""

    basis_version: int
    basis: str
    t_fixed_version: int
    t_fixed: str


@dataclass(frozen=True)
class Report:
    """What a stage says at the end of a task."""

    hashes: Hashes | None = None  # build, sync
    norms: tuple[tuple[str, float], ...] = ()  # step: (unit, squared norm)
    loss_sum: float = 0.0  # step, evaluation; from the last stage
    tokens: int = 0
    parameters: tuple[tuple[str, str], ...] = ()  # finish: (name, hash)
    usage: Usage = field(default_factory=Usage)  # step
    recorded: Recorded | None = None  # step that may be audited


@dataclass(frozen=True)
class State:
    spec: RunSpec
    t_fixed: tuple[int, str]  # version and hash
    history: History
    peers: Mapping[str, Peer] = field(default_factory=dict)  # in the order in which they joined
    placed: bool = False  # the history's holders have been told so in this generation, and are here or absent
    holds: Mapping[str, int] = field(default_factory=dict)  # peer → the stage that it has in memory as it must be now
    absent: Mapping[str, Absence] = field(default_factory=dict)  # holders that may come back
    departed: Mapping[str, Departed] = field(default_factory=dict)  # peers that are gone, the last one last
    replaceable: bool | None = None  # whether any one holder could be lost; None: not known yet
    returned: Mapping[str, float] = field(default_factory=dict)  # holder → its longest absence that it came back from
    waited: float = 0.0  # seconds of the task at hand in which a holder was away, and came back
    waited_until: float = 0.0  # when the last of these came back: absences may overlap
    returns: Mapping[str, int] = field(
        default_factory=dict
    )  # holder → times that it opened another session since the last step was decided
    preparing: Mapping[str, Preparation] = field(default_factory=dict)  # peer → what it was told to build
    fetches: int = 0  # stages whose holders had to fetch a part when they were assigned
    reseat: Reseat | None = None
    unready: frozenset[str] = frozenset()  # spares for which a re-seating was given up: they did not get ready in time
    cutting: bool = False  # the first snapshot is being cut from a checkpoint
    task: Task | None = None  # none: waiting for something that is not a stage's report
    blocked: tuple[Blocker, float] | None = None  # what comes before the next task, and since when
    heard: Mapping[int, Report] = field(default_factory=dict)  # stage → its report on the task
    undelivered: bool = False  # the last decision has not been sent yet
    took_basis: frozenset[int] = frozenset()  # stages that have the next basis
    leaving: frozenset[str] = frozenset()  # holders that go when the step is done and saved
    stopping: bool = False  # the owner wants everything saved and ended
    stopped: bool = False  # … and it was
    asked: tuple[int, int] = (0, 0)  # generation and step in which the stages were last asked for their parts
    whole: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # begun snapshot → the hashes of all its parts
    arrived: Mapping[tuple[int, int], frozenset[int]] = field(default_factory=dict)  # … → stages whose part is here
    due: Mapping[tuple[int, int], float] = field(default_factory=dict)  # … → until when its parts are waited for
    late: int = 0  # snapshots in a row that were given up because most parts were late
    spoilt: Mapping[str, int] = field(default_factory=dict)  # holder → … in a row that were given up for its part
    unsaved: tuple[int, PartFailure, float] | None = None  # the snapshot of this step failed: why, and when
    pace: Pace = field(default_factory=Pace)  # of snapshots
    room: int | None = None  # bytes that are free on the disk for snapshots; None: nobody has looked
    suspects: frozenset[str] = frozenset()  # peers that were seen to use other bytes of U or T_fixed, once
    quarrels: Mapping[frozenset[str], int] = field(default_factory=dict)  # two peers → how often one blamed the other
    accusers: Mapping[int, frozenset[str]] = field(default_factory=dict)  # stage → voices that accused a holder of it
    refused: Mapping[str, int] = field(default_factory=dict)  # peer → messages that no honest peer can have sent
    outsized: Mapping[str, int] = field(default_factory=dict)  # peer → reports of far larger numbers than of late
    complaints: tuple[BrokenLink, ...] = ()  # of the last hour
    parties: Mapping[str, Peer] = field(default_factory=dict)  # peers that had a quarrel or a complaint
    untried: frozenset[str] = frozenset()  # holders that built their stage, and have not finished a step with it
    former: FormerHolder | None = None  # while the stage is tried by a faster peer
    linked: float | None = None  # seconds that the stages took to link last
    turns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # peer or voice → when it gave up a stage
    unsound: tuple[str, int] = (
        "",
        0,
    )  # the only holder with numbers that are not finite, and for how many steps in a row
    broken: int = 0  # generations in a row that ended before a step was decided
    stalled: int = 0  # … because a task did not end
    trouble: Relinking | None = None  # the last of these generations' end, as it was told
    home: str = ""  # the coordinator's address in the join link
    folder: str = ""  # the run directory, as the owner named it
    missing: Missing = field(default_factory=NoPeers)  # while there is no placement: why
    tasks: int = 0
    usage: Mapping[int, Usage] = field(default_factory=dict)  # stage → what its last step took
    decided_at: tuple[float, ...] = ()  # when the last steps were decided (protocol/throughput.py)
    step_seconds: tuple[float, ...] = ()  # what the steps of these took, from the grant on
    timed: tuple[Timed, ...] = ()  # the last steps of this generation
    speeds: Mapping[str, float] = field(default_factory=dict)  # peer → operations a second, when it last held a stage

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

    def stage_to_build(self, peer: str, generation: int) -> int | None:
        """The stage that this peer was told to build: in this generation, or (0) ahead of one."""
        if generation == self.history.generation:
            return self.stage_of(peer)
        preparation = self.preparing.get(peer)
        return preparation.part.stage if preparation is not None and generation == 0 else None

    @property
    def stands_still(self) -> bool:
        """Somebody is missing."""
        return not self.placed or bool(self.absent)

    def is_recorded(self, step: int) -> bool:
        """Whether the messages of this step are kept: an audit starts from a snapshot of the step before, with the
        same basis, and such a snapshot was begun."""
        version, _ = self.history.basis_for(step)
        marks = (mark for mark in self.history.pending if mark.lineage == self.history.lineage)
        return self.spec.audit > 0 and any((m.step, m.basis_version) == (step - 1, version) for m in marks)

    @property
    def absent_stages(self) -> tuple[int, ...]:
        return tuple(stage for stage, peer in enumerate(self.history.holders) if peer in self.absent)

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
