"""What happens to a run, and what the machine has done about it: events in, commands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protomodels_cli.coordinator import reasons
from protomodels_cli.coordinator.history import Decided
from protomodels_cli.coordinator.lanes import Lane
from protomodels_cli.coordinator.notices import Notice
from protomodels_cli.coordinator.peers import Peer, Rest
from protomodels_cli.coordinator.snapshots.failures import PartFailure
from protomodels_cli.coordinator.work import Report, Task
from protomodels_cli.protocol.audit import Compared
from protomodels_cli.protocol.parts import Part

# Events


@dataclass(frozen=True)
class Joined:
    """A peer has registered: for the first time, or again after its connection broke."""

    peer: Peer


@dataclass(frozen=True)
class Left:
    """A peer's connection ended, or no heartbeat came for a lease."""

    peer: str
    why: reasons.Silence


@dataclass(frozen=True)
class Leaving:
    """A peer wants to go as soon as it can without harm."""

    peer: str


@dataclass(frozen=True)
class Rests:
    """A peer is to rest as soon as it can without harm; without a rest, it is awake."""

    peer: str
    rest: Rest | None


@dataclass(frozen=True)
class Trouble:
    """A peer cannot go on; `about` is the stage that it cannot work with, or none: the fault is its own."""

    peer: str
    what: reasons.Complaint
    about: int | None = None
    generation: int = 0


@dataclass(frozen=True)
class Done:
    peer: str
    generation: int
    task: int
    report: Report


@dataclass(frozen=True)
class BasisTaken:
    peer: str
    generation: int
    version: int
    sha256: str


@dataclass(frozen=True)
class SubspaceReported:
    """The last stage's word after a gathering of gradients: metrics, and a new basis where there is one."""

    peer: str
    generation: int
    step: int
    row: Mapping[str, float]
    sha256: str | None


@dataclass(frozen=True)
class PartFailed:
    """A part of a snapshot could not be written: by this peer, or (none) here."""

    peer: str | None
    lineage: int
    step: int
    stage: int
    why: PartFailure


@dataclass(frozen=True)
class PartsArrived:
    """These stages' parts of a snapshot are here and verified, so far."""

    lineage: int
    step: int
    stages: frozenset[int]


@dataclass(frozen=True)
class SnapshotWhole:
    """All parts of a snapshot are here and verified."""

    lineage: int
    step: int
    parts: tuple[str, ...]


@dataclass(frozen=True)
class CheckpointCut:
    """The checkpoint that the run starts from lies here as its first snapshot."""

    layers: tuple[int, ...]
    parts: tuple[str, ...]
    source: str  # hash of the checkpoint
    tied: bool  # its head was its embedding


@dataclass(frozen=True)
class SnapshotLost:
    """A part of a complete snapshot cannot be read back, by a peer that needs it."""

    peer: str
    generation: int
    lineage: int
    step: int
    why: str
    whole_here: bool = False  # the coordinator has looked, and its own is right


@dataclass(frozen=True)
class StoreAway:
    """A peer needs a part that only the store has, and the coordinator cannot reach that either."""

    peer: str
    lineage: int
    step: int
    stage: int
    detail: str


@dataclass(frozen=True)
class Prefetched:
    """A spare has this part on its disk, should it be asked to hold that stage."""

    peer: str
    part: Part


@dataclass(frozen=True)
class Lacking:
    """A peer does not have a part that it said it has on its disk: it says so itself, or could not prove it."""

    peer: str
    part: Part
    disproved: bool = False


@dataclass(frozen=True)
class Proof:
    """A peer's answer when it was asked to prove that it has a part. The machine hears of it where it is wrong."""

    peer: str
    part: Part
    nonce: bytes
    sha256: str


@dataclass(frozen=True)
class Verdict:
    """What a spare found when it recomputed a stage's messages. The machine hears of it where they were a lie."""

    peer: str
    audit: int
    compared: tuple[Compared, ...]
    failed: str = ""  # why there is none


@dataclass(frozen=True)
class Ready:
    """A spare has built the stage of this part, as it was told to. The machine hears of it once the spare has proved
    that it has the part."""

    peer: str
    part: Part


@dataclass(frozen=True)
class Accused:
    """The coordinator has heard these voices accuse the holder of a stage."""

    stage: int
    voices: frozenset[str]


@dataclass(frozen=True)
class PauseRun:
    pass


@dataclass(frozen=True)
class ResumeRun:
    pass


@dataclass(frozen=True)
class StopRun:
    pass


@dataclass(frozen=True)
class Tick:
    room: int | None = None  # bytes that are free on the coordinator's disk; None: not known


OfParts = SnapshotLost | StoreAway | Prefetched | Lacking | Ready
FromPeers = Joined | Left | Leaving | Rests | Trouble | Done | BasisTaken | SubspaceReported | OfParts
FromOwner = PauseRun | ResumeRun | StopRun
Aside = Proof | Verdict  # what the machine does not hear of
Event = FromPeers | FromOwner | Accused | PartFailed | PartsArrived | SnapshotWhole | CheckpointCut | Tick


# Commands


@dataclass(frozen=True)
class CutCheckpoint:
    """Make the first snapshot from the checkpoint, with so many layers in each part; CheckpointCut follows."""

    layers: tuple[int, ...]


@dataclass(frozen=True)
class AssignStage:
    """Hold this stage. `reuse`: as it is in this peer's memory; otherwise as it is in the newest snapshot."""

    peer: str
    stage: int
    task: int
    reuse: bool
    lane: Lane
    layers: tuple[int, ...]  # of all stages
    lineage: int
    step: int
    owed: int  # the step on whose subspace the last stage still owes its word; 0: none
    memory: int  # bytes of its device that are for this stage
    decision: Decided | None  # where it reuses the stage: the last one, which it may not have heard
    restore: Part | None  # where it does not: what to build the stage from; None: the seed


@dataclass(frozen=True)
class MakeSpare:
    """Hold nothing, and wait."""

    peer: str
    why: reasons.Spare


@dataclass(frozen=True)
class Wait:
    """Keep what is in memory, drop the links, and wait."""

    peer: str
    why: reasons.Missing | reasons.StageTried


@dataclass(frozen=True)
class GoOn:
    """To a holder that is back in its generation: the last turn once more, and whatever else it may have missed."""

    peer: str
    stage: int
    decision: Decided | None
    task: Task | None
    save: bool
    basis: tuple[int, str]  # version and hash of U that the task is done with
    new_basis: int | None  # a newer version, which it has not got yet
    step: int  # the last one decided
    lane: Lane


@dataclass(frozen=True)
class PrepareStage:
    """To a spare: fetch this part and build its stage, which it may soon be asked to hold; Prefetched follows where it
    had to be fetched, then Ready. A part without a hash: build it from the seed."""

    peer: str
    part: Part
    layers: tuple[int, ...]  # of all stages
    memory: int  # bytes of its device that are for this stage


@dataclass(frozen=True)
class SendTurn:
    """To every holder: the outcome of the last step, where it is due; whether to upload what it is after that; and
    the next task, where there is one."""

    decision: Decided | None
    task: Task | None
    save: bool
    basis: tuple[int, str]  # version and hash of U that the task is done with
    lane: Lane


@dataclass(frozen=True)
class SendBasis:
    version: int
    holders: tuple[str, ...]


@dataclass(frozen=True)
class KeepSnapshots:
    """Whatever is neither complete nor begun is not needed any more, here or on a peer's disk."""

    holders: tuple[str, ...]
    others: tuple[str, ...]  # connected peers without a stage: they hear of it in their turn, as it is then


@dataclass(frozen=True)
class TellPause:
    """To all peers: the run is paused, or goes on."""

    why: reasons.Pause | None
    holders: tuple[str, ...]
    others: tuple[str, ...]  # connected peers without a stage: they hear of it in their turn


@dataclass(frozen=True)
class Dismiss:
    peer: str
    why: reasons.Dismissal
    exit_code: int = 0


@dataclass(frozen=True)
class WriteRow:
    """Append this row to metrics.jsonl."""

    row: dict[str, object]


@dataclass(frozen=True)
class Tell:
    """Show this notice to the owner, log it, and append it to events.jsonl."""

    notice: Notice


@dataclass(frozen=True)
class Quit:
    """End the coordinator's process; `pmtrain coordinator --resume` continues the run."""


ToPeers = AssignStage | MakeSpare | Wait | GoOn | PrepareStage | SendTurn | SendBasis | TellPause | Dismiss
Command = ToPeers | CutCheckpoint | KeepSnapshots | WriteRow | Tell | Quit
