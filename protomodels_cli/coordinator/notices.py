"""All that the coordinator tells the owner, one dataclass for each: the rows of events.jsonl.

sentences.py says how they read.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar, Literal

from protomodels_cli.coordinator import reasons
from protomodels_cli.coordinator.audit_notices import AboutAudits
from protomodels_cli.coordinator.reasons import Holder
from protomodels_cli.coordinator.rebuild_notices import AboutRebuilding
from protomodels_cli.coordinator.reseat_notices import AboutReseating
from protomodels_cli.coordinator.snapshots.failures import PartFailure
from protomodels_cli.observe.notices import Notice as Base

# Peers


@dataclass(frozen=True)
class PeerJoined(Base):
    peer: str
    name: str
    device: str
    person: str = ""  # whom its token was made for; empty: not said
    kind: Literal["peer_joined"] = "peer_joined"


@dataclass(frozen=True)
class PeerReturned(Base):
    peer: str
    name: str
    device: str
    person: str = ""  # whom its token was made for; empty: not said
    kind: Literal["peer_returned"] = "peer_returned"


@dataclass(frozen=True)
class PeerLost(Base):
    level: ClassVar[int] = logging.WARNING
    peer: str
    name: str
    stage: int | None
    reason: reasons.Silence
    kind: Literal["peer_lost"] = "peer_lost"


Unwanted = Literal["parts", "too_many_calls"]


@dataclass(frozen=True)
class TurnedAway(Base):
    """Calls from one network were refused: for parts of snapshots that the caller was not told to use, or because more
    of them came at a time than are served."""

    level: ClassVar[int] = logging.WARNING
    network: str
    what: Unwanted
    times: int  # by now
    peer: str = ""  # that made the last of them, where it is known
    kind: Literal["turned_away"] = "turned_away"


@dataclass(frozen=True)
class HolderAway(Base):
    """A holder is silent, and its stage stays its own until going on without it costs less."""

    peer: str
    name: str
    stage: int
    steps: int  # that a rollback would redo
    seconds: float  # … and what that would take
    kind: Literal["holder_away"] = "holder_away"


@dataclass(frozen=True)
class OutsizedMessages(Base):
    """A peer sent far larger numbers than in any of the last steps, as its neighbour says: the run diverges, or one of
    the two is wrong."""

    level: ClassVar[int] = logging.WARNING
    peer: str
    name: str
    stage: int
    reported_by: int  # the stage that got them
    step: int
    times: float
    many: int  # such reports on this peer by now
    kind: Literal["outsized_messages"] = "outsized_messages"


@dataclass(frozen=True)
class PeerLeft(Base):
    """Of its own accord."""

    peer: str
    name: str
    stage: int | None
    kind: Literal["peer_left"] = "peer_left"


@dataclass(frozen=True)
class PeerRests(Base):
    """It keeps its name and its session, and has handed over its stage, if it had one."""

    peer: str
    name: str
    stage: int | None
    until: float  # seconds since 1970; 0: until somebody wakes it
    kind: Literal["peer_rests"] = "peer_rests"


@dataclass(frozen=True)
class PeerWoke(Base):
    peer: str
    name: str
    kind: Literal["peer_woke"] = "peer_woke"


@dataclass(frozen=True)
class PeerDismissed(Base):
    level: ClassVar[int] = logging.WARNING
    peer: str
    name: str
    stage: int | None
    reason: reasons.Fault
    kind: Literal["peer_dismissed"] = "peer_dismissed"


@dataclass(frozen=True)
class NoSpareLeft(Base):
    """There was a spare for every stage, and now there is none: the next loss stops the run."""

    level: ClassVar[int] = logging.WARNING
    kind: Literal["no_spare_left"] = "no_spare_left"


# Stages


@dataclass(frozen=True)
class StagesAssigned(Base):
    generation: int
    layers: tuple[int, ...]
    holders: tuple[Holder, ...]
    kind: Literal["stages_assigned"] = "stages_assigned"


@dataclass(frozen=True)
class StagesLinked(Base):
    generation: int
    kind: Literal["stages_linked"] = "stages_linked"


@dataclass(frozen=True)
class StagePrepared(Base):
    """A spare has built a stage, in case its silent holder does not come back."""

    peer: str
    name: str
    stage: int
    step: int  # of the snapshot that it is built from; 0: the beginning
    kind: Literal["stage_prepared"] = "stage_prepared"


@dataclass(frozen=True)
class PartNotThere(Base):
    level: ClassVar[int] = logging.WARNING
    peer: str  # that said that it has this part on its disk
    name: str
    stage: int
    step: int
    kind: Literal["part_not_there"] = "part_not_there"


@dataclass(frozen=True)
class Relinking(Base):
    """A holder has trouble, which a new generation may cure."""

    level: ClassVar[int] = logging.WARNING
    peer: str
    name: str
    stage: int | None
    reason: reasons.Complaint | reasons.PartUnreadable
    kind: Literal["relinking"] = "relinking"


@dataclass(frozen=True)
class StageGivenUp(Base):
    """A holder became a spare that is asked last: for a fault of its own, or of one of two that blame each other."""

    level: ClassVar[int] = logging.WARNING
    peer: str
    name: str
    stage: int | None
    reason: reasons.Fault
    kind: Literal["stage_given_up"] = "stage_given_up"


@dataclass(frozen=True)
class Stalled(Base):
    level: ClassVar[int] = logging.WARNING
    waiting: reasons.Stall
    kind: Literal["stalled"] = "stalled"


@dataclass(frozen=True)
class RolledBack(Base):
    level: ClassVar[int] = logging.WARNING
    reason: reasons.Rollback
    to_step: int  # 0: the beginning
    redone: int  # steps
    lineage: int  # that begins there
    kind: Literal["rolled_back"] = "rolled_back"


# Snapshots


@dataclass(frozen=True)
class SnapshotComplete(Base):
    shown: ClassVar[bool] = False
    step: int
    kind: Literal["snapshot_complete"] = "snapshot_complete"


@dataclass(frozen=True)
class CheckpointCut(Base):
    """The run's first snapshot was made from a checkpoint."""

    path: str
    sha256: str  # of the checkpoint
    layers: tuple[int, ...]
    tied: bool  # its head was its embedding
    kind: Literal["checkpoint_cut"] = "checkpoint_cut"


@dataclass(frozen=True)
class SnapshotSkipped(Base):
    step: int
    uploading: int  # the step of the one that is still on its way
    kind: Literal["snapshot_skipped"] = "snapshot_skipped"


@dataclass(frozen=True)
class SnapshotWithoutRoom(Base):
    """It is not begun; the next step looks again."""

    level: ClassVar[int] = logging.WARNING
    step: int
    missing: int  # bytes on the coordinator's disk
    kind: Literal["snapshot_without_room"] = "snapshot_without_room"


@dataclass(frozen=True)
class SnapshotFailed(Base):
    level: ClassVar[int] = logging.WARNING
    step: int
    stage: int  # whose part it is
    peer: str | None  # who could not save that; None: the coordinator
    name: str
    reason: PartFailure
    kind: Literal["snapshot_failed"] = "snapshot_failed"


@dataclass(frozen=True)
class SnapshotUnusable(Base):
    level: ClassVar[int] = logging.WARNING
    step: int
    detail: str
    kind: Literal["snapshot_unusable"] = "snapshot_unusable"


@dataclass(frozen=True)
class CopyFailed(Base):
    level: ClassVar[int] = logging.WARNING
    url: str
    detail: str
    kind: Literal["copy_failed"] = "copy_failed"


@dataclass(frozen=True)
class CopyingLast(Base):
    url: str
    kind: Literal["copying_last"] = "copying_last"


@dataclass(frozen=True)
class CopyAbandoned(Base):
    level: ClassVar[int] = logging.WARNING
    kind: Literal["copy_abandoned"] = "copy_abandoned"


@dataclass(frozen=True)
class CopyUnreachable(Base):
    """A part is whole in the store alone, if at all, and that cannot be read now."""

    level: ClassVar[int] = logging.WARNING
    stage: int
    step: int
    url: str
    detail: str
    kind: Literal["copy_unreachable"] = "copy_unreachable"


@dataclass(frozen=True)
class PartRestored(Base):
    stage: int
    step: int
    url: str
    kind: Literal["part_restored"] = "part_restored"


@dataclass(frozen=True)
class PartDamaged(Base):
    """Here and in the copy."""

    level: ClassVar[int] = logging.WARNING
    stage: int
    step: int
    url: str
    kind: Literal["part_damaged"] = "part_damaged"


# The store, from which another coordinator could continue the run


@dataclass(frozen=True)
class StoreKeyMade(Base):
    """The owner has to put it somewhere else. The key itself is told nowhere."""

    file: str
    url: str
    kind: Literal["store_key_made"] = "store_key_made"


@dataclass(frozen=True)
class StoreNotDirect(Base):
    """Peers cannot be sent to the store: all parts go through the coordinator."""

    level: ClassVar[int] = logging.WARNING
    url: str
    detail: str
    kind: Literal["store_not_direct"] = "store_not_direct"


@dataclass(frozen=True)
class JournalNotCopied(Base):
    level: ClassVar[int] = logging.WARNING
    url: str
    detail: str
    kind: Literal["journal_not_copied"] = "journal_not_copied"


@dataclass(frozen=True)
class StoredUnusable(Base):
    """Something in the store that this coordinator does not continue from."""

    level: ClassVar[int] = logging.WARNING
    name: str
    detail: str
    kind: Literal["stored_unusable"] = "stored_unusable"


@dataclass(frozen=True)
class TookOver(Base):
    """This coordinator continues a run that another has led."""

    url: str
    step: int  # the last one decided, as far as the store tells
    snapshot: int  # the step of the newest whole one; 0: the beginning
    in_memory: bool  # what the stages have in memory counts, if they are at this step
    kind: Literal["took_over"] = "took_over"


# The run


@dataclass(frozen=True)
class Paused(Base):
    reason: reasons.Pause
    run: str  # its name
    kind: Literal["paused"] = "paused"


@dataclass(frozen=True)
class Resumed(Base):
    kind: Literal["resumed"] = "resumed"


@dataclass(frozen=True)
class Continuing(Base):
    """A coordinator was started again."""

    step: int
    steps: int
    snapshot: int  # the newest's step; 0: there is none
    kind: Literal["continuing"] = "continuing"


@dataclass(frozen=True)
class RunDone(Base):
    steps: int
    kind: Literal["run_done"] = "run_done"


@dataclass(frozen=True)
class RunStopped(Base):
    """By the owner."""

    step: int  # of the newest snapshot
    path: str
    kind: Literal["run_stopped"] = "run_stopped"


@dataclass(frozen=True)
class Interrupted(Base):
    """The coordinator ends, the run does not."""

    step: int
    path: str
    kind: Literal["interrupted"] = "interrupted"


@dataclass(frozen=True)
class DiskFailed(Base):
    level: ClassVar[int] = logging.ERROR
    path: str
    detail: str
    kind: Literal["disk_failed"] = "disk_failed"


@dataclass(frozen=True)
class NotifyFailed(Base):
    """The owner could not be told of something elsewhere (`--notify`); the run does not care."""

    level: ClassVar[int] = logging.WARNING
    target: str
    detail: str
    kind: Literal["notify_failed"] = "notify_failed"


@dataclass(frozen=True)
class Ended(Base):
    """The coordinator ends with an error, which the terminal and the log show as it is."""

    level: ClassVar[int] = logging.ERROR
    reason: str  # its kind, where it has one
    detail: str
    kind: Literal["ended"] = "ended"


AboutPeers = (
    PeerJoined
    | PeerReturned
    | PeerLost
    | HolderAway
    | OutsizedMessages
    | TurnedAway
    | PeerLeft
    | PeerDismissed
    | PartNotThere
    | NoSpareLeft
    | PeerRests
    | PeerWoke
)
AboutHolders = Relinking | StageGivenUp
AboutStages = StagesAssigned | StagesLinked | StagePrepared | AboutReseating | AboutHolders | Stalled | RolledBack
AboutSnapshots = (
    SnapshotComplete | CheckpointCut | SnapshotSkipped | SnapshotWithoutRoom | SnapshotFailed | SnapshotUnusable
)
AboutCopies = CopyFailed | CopyingLast | CopyAbandoned | CopyUnreachable | PartRestored | PartDamaged
AboutStore = StoreKeyMade | StoreNotDirect | JournalNotCopied | StoredUnusable | TookOver
AboutRun = Paused | Resumed | Continuing | RunDone | RunStopped | Interrupted | NotifyFailed | DiskFailed | Ended
Notice = AboutPeers | AboutStages | AboutAudits | AboutSnapshots | AboutCopies | AboutStore | AboutRun | AboutRebuilding
