"""Why a peer was lost, sent away or kept spare; what a run waits for; why it is paused or went back. Data, no English.

sentences.py says how each of them reads. Some are journalled (Rollback, Pause): their `kind` tells them apart there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Discriminator

from protomodels_cli.coordinator.audit_reasons import OfAudits
from protomodels_cli.coordinator.no_placement import NoPlacement
from protomodels_cli.coordinator.silences import ConnectionClosed as ConnectionClosed
from protomodels_cli.coordinator.silences import NoHeartbeat as NoHeartbeat
from protomodels_cli.coordinator.silences import NotRenewed as NotRenewed
from protomodels_cli.coordinator.snapshots.failures import PartFailure
from protomodels_cli.facts import Fact
from protomodels_cli.wire.troubles import Trouble

Bytes = int
Shared = Literal["U", "T_fixed"]  # what all stages must have alike


@dataclass(frozen=True)
class Holder:
    """Who holds a stage; no name: nobody who is here."""

    stage: int
    peer: str
    name: str = ""


# Why a peer is not in the run any more


@dataclass(frozen=True)
class AskedToLeave(Fact):
    kind: Literal["asked_to_leave"] = "asked_to_leave"


@dataclass(frozen=True)
class AskedToRest(Fact):
    until: float = 0.0
    kind: Literal["asked_to_rest"] = "asked_to_rest"


@dataclass(frozen=True)
class HashMismatch(Fact):
    """A peer uses other bytes of U or T_fixed than the run does."""

    what: Shared
    kind: Literal["hash_mismatch"] = "hash_mismatch"


@dataclass(frozen=True)
class DamagedBasis(Fact):
    """A new basis did not reach a peer whole."""

    version: int
    kind: Literal["damaged_basis"] = "damaged_basis"


@dataclass(frozen=True)
class FalseClaim(Fact):
    """A peer says that it has a stage in memory which it was never given."""

    stage: int
    kind: Literal["false_claim"] = "false_claim"


@dataclass(frozen=True)
class TooSlow(Fact):
    """A stage was not ready in time: limits.build_seconds, restore_seconds, reuse_seconds or link_seconds; or its new
    holder did not do what an honest one does in less time ("step": its first step); or all waited for it ("task")."""

    stage: int
    doing: Literal["build", "restore", "reuse", "link", "step", "task"]
    seconds: float  # the limit
    kind: Literal["too_slow"] = "too_slow"


@dataclass(frozen=True)
class PartNotProved(Fact):
    """A peer that builds a stage could not prove that it has the stage's part of a snapshot."""

    stage: int
    step: int
    kind: Literal["part_not_proved"] = "part_not_proved"


@dataclass(frozen=True)
class CameAndWent(Fact):
    """A holder opened so many sessions since the last step was decided."""

    stage: int
    times: int
    kind: Literal["came_and_went"] = "came_and_went"


@dataclass(frozen=True)
class UnsoundNumbers(Fact):
    """In so many steps in a row this stage alone had a loss or gradient that is not finite. Mostly its neighbours get
    such numbers too."""

    stage: int
    steps: int
    kind: Literal["unsound_numbers"] = "unsound_numbers"


@dataclass(frozen=True)
class PartUnreadable(Fact):
    """A peer cannot read its part of a snapshot, which is whole at the coordinator."""

    step: int
    kind: Literal["part_unreadable"] = "part_unreadable"


@dataclass(frozen=True)
class SpoiltSnapshots(Fact):
    """So many snapshots in a row were given up for a peer's part, the last for this reason."""

    stage: int
    snapshots: int
    reason: PartFailure
    kind: Literal["spoilt_snapshots"] = "spoilt_snapshots"


@dataclass(frozen=True)
class PeerReport(Fact):
    """What a peer says of itself."""

    trouble: Trouble
    kind: Literal["peer_report"] = "peer_report"


@dataclass(frozen=True)
class InvalidMessage(Fact):
    """No honest peer says this."""

    detail: str
    kind: Literal["invalid_message"] = "invalid_message"


@dataclass(frozen=True)
class TooManyMessages(Fact):
    """A peer says more than any honest one does."""

    per_second: float  # that would be fine beside answers
    kind: Literal["too_many_messages"] = "too_many_messages"


@dataclass(frozen=True)
class NotReading(Fact):
    """A peer does not read what it is sent, and sends heartbeats all the same."""

    messages: int  # that wait for it
    kind: Literal["not_reading"] = "not_reading"


@dataclass(frozen=True)
class UnprocessableMessage(Fact):
    """It broke the coordinator's machine: a bug, whose traceback is in the log."""

    event: str
    kind: Literal["unprocessable_message"] = "unprocessable_message"


@dataclass(frozen=True)
class InvalidBasis(Fact):
    detail: str
    kind: Literal["invalid_basis"] = "invalid_basis"


@dataclass(frozen=True)
class Kicked(Fact):  # by the run's owner
    kind: Literal["kicked"] = "kicked"


Talk = InvalidMessage | TooManyMessages | NotReading | UnprocessableMessage | InvalidBasis
Complaint = Kicked | PeerReport | Talk | OfAudits
# A peer with it is dismissed.
Fault = (
    Complaint
    | HashMismatch
    | DamagedBasis
    | FalseClaim
    | TooSlow
    | PartNotProved
    | PartUnreadable
    | SpoiltSnapshots
    | UnsoundNumbers
    | CameAndWent
)
Silence = NoHeartbeat | ConnectionClosed | NotRenewed
Loss = Silence | Fault | AskedToLeave | AskedToRest


# Why a peer's session ends


@dataclass(frozen=True)
class RunFinished(Fact):
    kind: Literal["run_finished"] = "run_finished"


@dataclass(frozen=True)
class RunStopped(Fact):
    """By the owner."""

    step: int  # of the newest snapshot
    kind: Literal["run_stopped"] = "run_stopped"


Dismissal = RunFinished | RunStopped | AskedToLeave | Fault


# What is missing before stages can be assigned


@dataclass(frozen=True)
class NoPeers(Fact):
    kind: Literal["no_peers"] = "no_peers"


@dataclass(frozen=True)
class StageNeed:
    stage: int
    need: Bytes  # on its device
    on_host: Bytes = 0  # besides, in the machine's own memory


@dataclass(frozen=True)
class StagesWithoutPeer(Fact):
    """A cut that stands has stages that nobody who is free has the memory for."""

    stages: tuple[StageNeed, ...]
    too_small: int = 0  # peers that are free, and have too little memory
    kind: Literal["stages_without_peer"] = "stages_without_peer"


@dataclass(frozen=True)
class HoldersDisconnected(Fact):
    """They may come back with what they have in memory."""

    stages: tuple[int, ...]
    kind: Literal["holders_disconnected"] = "holders_disconnected"


@dataclass(frozen=True)
class CoordinatorRestarted(Fact):
    """The peers from before have not reconnected yet."""

    kind: Literal["coordinator_restarted"] = "coordinator_restarted"


@dataclass(frozen=True)
class CheckpointUncut(Fact):
    """The run's first snapshot is being made from a checkpoint."""

    path: str
    kind: Literal["checkpoint_uncut"] = "checkpoint_uncut"


Missing = NoPeers | NoPlacement | StagesWithoutPeer | HoldersDisconnected | CoordinatorRestarted | CheckpointUncut


@dataclass(frozen=True)
class AllStagesHeld(Fact):
    stages: int
    kind: Literal["all_stages_held"] = "all_stages_held"


@dataclass(frozen=True)
class Resting(Fact):
    """A peer has no stage because it, or the owner, wants it so."""

    kind: Literal["resting"] = "resting"


@dataclass(frozen=True)
class StageTried(Fact):
    """To the former holder of a stage: a faster peer has it, and its first step is not done."""

    stage: int
    name: str
    kind: Literal["stage_tried"] = "stage_tried"


Spare = AllStagesHeld | StageTried | Resting | Missing


# What else a run waits for

TaskKind = Literal["build", "link", "step", "sync", "evaluation", "finish"]


@dataclass(frozen=True)
class StagesWorking(Fact):
    task: TaskKind
    step: int
    holders: tuple[Holder, ...]  # whose report has not come
    seconds: float  # so far
    kind: Literal["stages_working"] = "stages_working"


@dataclass(frozen=True)
class StoreUnreachable(Fact):
    """A stage is built from a part that only the store has."""

    stage: int
    step: int
    url: str
    detail: str
    kind: Literal["store_unreachable"] = "store_unreachable"


@dataclass(frozen=True)
class SnapshotIncomplete(Fact):
    step: int
    kind: Literal["snapshot_incomplete"] = "snapshot_incomplete"


@dataclass(frozen=True)
class SnapshotFailing(Fact):
    """A part could not be saved: the snapshot is begun again in a few seconds."""

    step: int
    reason: PartFailure
    kind: Literal["snapshot_failing"] = "snapshot_failing"


@dataclass(frozen=True)
class OwnersResume(Fact):
    """The run is paused."""

    kind: Literal["owners_resume"] = "owners_resume"


@dataclass(frozen=True)
class SubspaceReport(Fact):
    """The last stage has yet to say what becomes of the subspace after this step."""

    step: int
    kind: Literal["subspace_report"] = "subspace_report"


@dataclass(frozen=True)
class BasisNotTaken(Fact):
    version: int
    holders: tuple[Holder, ...]  # who have not confirmed it
    kind: Literal["basis_not_taken"] = "basis_not_taken"


@dataclass(frozen=True)
class Reseating(Fact):
    """The slowest stage is given to a spare that is faster, from a snapshot of the last step."""

    stage: int
    holder: str  # the names of both
    spare: str
    step_seconds: float  # as measured
    expected_seconds: float  # … with the spare
    kind: Literal["reseating"] = "reseating"


@dataclass(frozen=True)
class Coordinator(Fact):
    """Nothing but the coordinator's next move."""

    kind: Literal["coordinator"] = "coordinator"


@dataclass(frozen=True)
class CoordinatorStopped(Fact):
    """Nobody leads the run now."""

    kind: Literal["coordinator_stopped"] = "coordinator_stopped"


Blocker = SnapshotIncomplete | SnapshotFailing | OwnersResume | SubspaceReport | BasisNotTaken | Reseating
Stall = StagesWorking | SubspaceReport | BasisNotTaken  # what a new generation asks for again
Waiting = Blocker | Missing | StagesWorking | StoreUnreachable | Coordinator | CoordinatorStopped


# Why a run is paused


@dataclass(frozen=True)
class ByOwner(Fact):
    kind: Literal["by_owner"] = "by_owner"


@dataclass(frozen=True)
class NonFinite(Fact):
    """So many steps in a row, up to this one, had a loss or gradient that is not finite."""

    steps: int
    step: int
    lr: float  # optimizer.lr
    kind: Literal["non_finite"] = "non_finite"


Pause = Annotated[ByOwner | NonFinite, Discriminator("kind")]


# Why a run went back to a snapshot


@dataclass(frozen=True)
class StagesLost(Fact):
    stages: tuple[int, ...]
    step: int  # after which
    kind: Literal["stages_lost"] = "stages_lost"


@dataclass(frozen=True)
class StageDiverged(Fact):
    """A stage used other bytes of U or T_fixed than the run, as was found after this step."""

    holder: Holder
    what: Shared
    step: int
    kind: Literal["stage_diverged"] = "stage_diverged"


@dataclass(frozen=True)
class SnapshotDamaged(Fact):
    step: int
    kind: Literal["snapshot_damaged"] = "snapshot_damaged"


Rollback = Annotated[StagesLost | StageDiverged | SnapshotDamaged | NonFinite, Discriminator("kind")]
