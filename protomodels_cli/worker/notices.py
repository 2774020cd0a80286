"""All that a peer tells whoever runs it, one dataclass for each: the rows of its events.jsonl.

sentences.py says how they read.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar, Literal

from protomodels_cli.cost.activations import Recompute
from protomodels_cli.cost.recompute import Why
from protomodels_cli.observe import logs
from protomodels_cli.observe.notices import Notice as Base
from protomodels_cli.wire import troubles
from protomodels_cli.worker import problems

# Joining


@dataclass(frozen=True)
class CoordinatorUnreachable(Base):
    """The coordinator does not answer or has no room: the peer keeps trying."""

    level: ClassVar[int] = logging.WARNING
    detail: str
    seconds: float  # for how long
    kind: Literal["coordinator_unreachable"] = "coordinator_unreachable"


@dataclass(frozen=True)
class Joined(Base):
    run: str
    name: str
    peer: str
    device: str
    memory: int  # bytes it may use
    flops: float  # a second
    kind: Literal["joined"] = "joined"


@dataclass(frozen=True)
class RenewalFailed(Base):
    """Of this peer's certificate; it is tried again until that ends."""

    level: ClassVar[int] = logging.WARNING
    log: ClassVar[logging.Logger | None] = logs.WIRE
    detail: str
    seconds: float  # until it ends
    kind: Literal["renewal_failed"] = "renewal_failed"


@dataclass(frozen=True)
class CertificateExpired(Base):
    """This peer was away, or could not renew it, for too long: it joins again."""

    level: ClassVar[int] = logging.WARNING
    kind: Literal["certificate_expired"] = "certificate_expired"


@dataclass(frozen=True)
class Rests(Base):
    """This peer is to rest, by the wish of people at its machine; it stays in the run."""

    until: float  # seconds since 1970; 0: until it is woken
    kind: Literal["rests"] = "rests"


@dataclass(frozen=True)
class Wakes(Base):
    kind: Literal["wakes"] = "wakes"


@dataclass(frozen=True)
class Capped(Base):
    """What this peer sends and receives has a cap."""

    upload: float  # bits a second; 0: none
    download: float
    kind: Literal["capped"] = "capped"


@dataclass(frozen=True)
class PowerLimited(Base):
    watts: float  # of each of this peer's cards
    kind: Literal["power_limited"] = "power_limited"


@dataclass(frozen=True)
class PowerNotLimited(Base):
    level: ClassVar[int] = logging.WARNING
    watts: float
    detail: str
    kind: Literal["power_not_limited"] = "power_not_limited"


@dataclass(frozen=True)
class PowerNotRestored(Base):
    """The card keeps the limit that it had for the run."""

    level: ClassVar[int] = logging.WARNING
    watts: float  # that it had before
    detail: str
    kind: Literal["power_not_restored"] = "power_not_restored"


@dataclass(frozen=True)
class Reachable(Base):
    log: ClassVar[logging.Logger | None] = logs.WIRE
    address: str
    kind: Literal["reachable"] = "reachable"


@dataclass(frozen=True)
class NotReachable(Base):
    log: ClassVar[logging.Logger | None] = logs.WIRE
    host: str
    port: int
    detail: str
    kind: Literal["not_reachable"] = "not_reachable"


@dataclass(frozen=True)
class PortMapped(Base):
    """The router leads a port of its own to this machine."""

    log: ClassVar[logging.Logger | None] = logs.WIRE
    address: str  # outside
    port: int  # here
    by: str
    kind: Literal["port_mapped"] = "port_mapped"


@dataclass(frozen=True)
class PortNotMapped(Base):
    level: ClassVar[int] = logging.WARNING
    log: ClassVar[logging.Logger | None] = logs.WIRE
    port: int
    detail: str
    kind: Literal["port_not_mapped"] = "port_not_mapped"


@dataclass(frozen=True)
class LinkEmulated(Base):
    """The spec slows every peer's connection down (wire.link)."""

    log: ClassVar[logging.Logger | None] = logs.WIRE
    link: str
    kind: Literal["link_emulated"] = "link_emulated"


# What the coordinator says


@dataclass(frozen=True)
class Spare(Base):
    reason: str  # its kind
    detail: str  # in the coordinator's words
    kind: Literal["spare"] = "spare"


@dataclass(frozen=True)
class Waiting(Base):
    """The run stands still; the peer keeps the stage that it has in memory."""

    reason: str
    detail: str
    stage: int | None
    kind: Literal["waiting"] = "waiting"


@dataclass(frozen=True)
class Paused(Base):
    """The owner has paused the run, or it waits for the owner."""

    reason: str
    detail: str
    stage: int | None  # that stays in memory
    kind: Literal["paused"] = "paused"


@dataclass(frozen=True)
class Resumed(Base):
    kind: Literal["resumed"] = "resumed"


@dataclass(frozen=True)
class StageAssigned(Base):
    generation: int
    stage: int
    stages: int
    first_layer: int
    end_layer: int
    source: Literal["seed", "snapshot", "memory"]
    step: int  # the last one decided
    kind: Literal["stage_assigned"] = "stage_assigned"


@dataclass(frozen=True)
class Computing(Base):
    """How the peer computes the stage that it was assigned."""

    device: str
    dtype: str
    dtype_is_own: bool  # the peer's choice (auto), not the spec's
    compiled: bool
    recompute: Recompute
    reason: Why
    in_flight: int
    need: int  # bytes, at most
    memory: int  # bytes that it has for the stage
    kept_need: int  # bytes, if nothing were computed again
    kind: Literal["computing"] = "computing"


@dataclass(frozen=True)
class Building(Base):
    """The stage is made anew, and its operators are compiled first: nothing else is told meanwhile."""

    kind: Literal["building"] = "building"


@dataclass(frozen=True)
class NotCompiled(Base):
    level: ClassVar[int] = logging.WARNING
    detail: str
    kind: Literal["not_compiled"] = "not_compiled"


@dataclass(frozen=True)
class NotPinned(Base):
    """Some memory of the machine could not be pinned for a CUDA device. Told once."""

    level: ClassVar[int] = logging.WARNING
    detail: str
    kind: Literal["not_pinned"] = "not_pinned"


@dataclass(frozen=True)
class StepDecided(Base):
    """A step was decided. Told every few seconds; metrics.jsonl in the run directory has every step."""

    step: int
    steps: int
    loss: float
    applied: bool
    tokens_per_s: float  # of the run; 0: not known
    eta_s: float | None  # to its end
    done: int  # steps in which this peer held a stage, since it joined
    sent: int  # bytes to its neighbours, since it joined
    kind: Literal["step_decided"] = "step_decided"


@dataclass(frozen=True)
class HashMismatch(Base):
    level: ClassVar[int] = logging.WARNING
    what: Literal["U", "T_fixed"]
    stage: int
    kind: Literal["hash_mismatch"] = "hash_mismatch"


# Connections


@dataclass(frozen=True)
class ConnectionLost(Base):
    level: ClassVar[int] = logging.WARNING
    reason: problems.Loss
    stage: int | None  # in memory
    kind: Literal["connection_lost"] = "connection_lost"


@dataclass(frozen=True)
class RelayFailed(Base):
    level: ClassVar[int] = logging.WARNING
    log: ClassVar[logging.Logger | None] = logs.WIRE
    stage: int  # at the other end
    detail: str
    kind: Literal["relay_failed"] = "relay_failed"


@dataclass(frozen=True)
class LinkRelayed(Base):
    """A link that does not open directly goes through a relay."""

    log: ClassVar[logging.Logger | None] = logs.WIRE
    stage: int
    path: str
    kind: Literal["link_relayed"] = "link_relayed"


@dataclass(frozen=True)
class LinkDirect(Base):
    """A link that was relayed has found a path without."""

    log: ClassVar[logging.Logger | None] = logs.WIRE
    stage: int
    path: str
    kind: Literal["link_direct"] = "link_direct"


@dataclass(frozen=True)
class LinkNotPunched(Base):
    """A link stays relayed: its ends could not connect to each other at once."""

    log: ClassVar[logging.Logger | None] = logs.WIRE
    shown: ClassVar[bool] = False  # `status` has it
    stage: int
    why: str  # as wire/path.py has it
    kind: Literal["link_not_punched"] = "link_not_punched"


@dataclass(frozen=True)
class RelayWorks(Base):
    """A relayed link that had failed works again."""

    log: ClassVar[logging.Logger | None] = logs.WIRE
    stage: int
    kind: Literal["relay_works"] = "relay_works"


@dataclass(frozen=True)
class TroubleReported(Base):
    """The peer has told the coordinator what is wrong."""

    level: ClassVar[int] = logging.WARNING
    shown: ClassVar[bool] = False  # what follows from it is
    trouble: troubles.Trouble
    kind: Literal["trouble_reported"] = "trouble_reported"


# Snapshots


@dataclass(frozen=True)
class PartFailed(Base):
    level: ClassVar[int] = logging.WARNING
    log: ClassVar[logging.Logger | None] = logs.SNAPSHOTS
    step: int
    stage: int
    detail: str
    kind: Literal["part_failed"] = "part_failed"


@dataclass(frozen=True)
class PartUploaded(Base):
    shown: ClassVar[bool] = False
    log: ClassVar[logging.Logger | None] = logs.SNAPSHOTS
    step: int
    stage: int
    to_store: bool = False  # by this peer itself
    kind: Literal["part_uploaded"] = "part_uploaded"


@dataclass(frozen=True)
class PartRefused(Base):
    level: ClassVar[int] = logging.WARNING
    log: ClassVar[logging.Logger | None] = logs.SNAPSHOTS
    step: int
    stage: int
    detail: str  # in the coordinator's words
    kind: Literal["part_refused"] = "part_refused"


@dataclass(frozen=True)
class PartsNotDeleted(Base):
    """Parts of snapshots that are not needed any more stay on the disk."""

    level: ClassVar[int] = logging.WARNING
    log: ClassVar[logging.Logger | None] = logs.SNAPSHOTS
    path: str
    detail: str
    kind: Literal["parts_not_deleted"] = "parts_not_deleted"


@dataclass(frozen=True)
class StoreNotReached(Base):
    """This peer cannot use the store itself: its parts go through the coordinator."""

    level: ClassVar[int] = logging.WARNING
    log: ClassVar[logging.Logger | None] = logs.SNAPSHOTS
    host: str
    detail: str
    kind: Literal["store_not_reached"] = "store_not_reached"


@dataclass(frozen=True)
class Prefetched(Base):
    log: ClassVar[logging.Logger | None] = logs.SNAPSHOTS
    step: int
    kind: Literal["prefetched"] = "prefetched"


@dataclass(frozen=True)
class PrefetchFailed(Base):
    level: ClassVar[int] = logging.WARNING
    log: ClassVar[logging.Logger | None] = logs.SNAPSHOTS
    step: int
    detail: str
    kind: Literal["prefetch_failed"] = "prefetch_failed"


@dataclass(frozen=True)
class Preparing(Base):
    """A spare builds a stage: its holder is silent, or much slower."""

    stage: int
    step: int  # of the snapshot that it is built from; 0: the beginning
    kind: Literal["preparing"] = "preparing"


# Ends


@dataclass(frozen=True)
class LeavingAfterStep(Base):
    kind: Literal["leaving_after_step"] = "leaving_after_step"


@dataclass(frozen=True)
class LeavingAtOnce(Base):
    """The peer leaves without asking: it has no connection to the coordinator."""

    kind: Literal["leaving_at_once"] = "leaving_at_once"


@dataclass(frozen=True)
class Released(Base):
    """The coordinator lets the peer go, and nothing is wrong."""

    reason: str  # its kind
    detail: str  # in the coordinator's words
    kind: Literal["released"] = "released"


@dataclass(frozen=True)
class Ended(Base):
    """The peer ends with an error, which the terminal and the log show as it is."""

    level: ClassVar[int] = logging.ERROR
    reason: str  # its kind, where it has one
    detail: str
    kind: Literal["ended"] = "ended"


AboutCertificate = RenewalFailed | CertificateExpired
AboutPort = PortMapped | PortNotMapped
AboutPower = PowerLimited | PowerNotLimited | PowerNotRestored
AboutWishes = Rests | Wakes | Capped | AboutPower
AboutJoining = (
    CoordinatorUnreachable
    | Joined
    | Reachable
    | NotReachable
    | LinkEmulated
    | AboutCertificate
    | AboutPort
    | AboutWishes
)
AboutMachine = NotCompiled | NotPinned
AboutBuilding = Preparing | StageAssigned | Computing | Building
AboutStage = Spare | Waiting | Paused | Resumed | AboutBuilding | AboutMachine | StepDecided | HashMismatch
AboutConnections = (
    ConnectionLost | LinkRelayed | LinkDirect | LinkNotPunched | RelayFailed | RelayWorks | TroubleReported
)
AboutSnapshots = (
    PartFailed | PartUploaded | StoreNotReached | PartRefused | PartsNotDeleted | Prefetched | PrefetchFailed
)
AboutEnd = LeavingAfterStep | LeavingAtOnce | Released | Ended
Notice = AboutJoining | AboutStage | AboutConnections | AboutSnapshots | AboutEnd
