"""Why a peer cannot take part, and why it lost its coordinator. Data, no English: sentences.py says how each reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protomodels_cli.facts import Fact
from protomodels_cli.wire import troubles

Bytes = int

# Before a stage is asked for


@dataclass(frozen=True)
class NoSuchDevice(Fact):
    device: str  # as it was asked for
    detail: str
    kind: Literal["no_such_device"] = "no_such_device"


@dataclass(frozen=True)
class OtherPackage(Fact):
    """The spec uses a plug-in whose package is missing here, or has another version than the coordinator's."""

    point: str  # group and name of the entry point
    theirs: str  # the package and its version
    ours: str | None
    kind: Literal["other_package"] = "other_package"


@dataclass(frozen=True)
class SpecNotUnderstood(Fact):
    """This version of pmtrain cannot read the run's spec."""

    detail: str
    kind: Literal["spec_not_understood"] = "spec_not_understood"


@dataclass(frozen=True)
class SpecReadDifferently(Fact):
    """The two programs make different specs of the same fields."""

    kind: Literal["spec_read_differently"] = "spec_read_differently"


@dataclass(frozen=True)
class ClockSkew(Fact):
    seconds: float  # ahead of the coordinator's; below zero: behind
    kind: Literal["clock_skew"] = "clock_skew"


@dataclass(frozen=True)
class FolderNotWritable(Fact):
    path: str
    detail: str
    kind: Literal["folder_not_writable"] = "folder_not_writable"


@dataclass(frozen=True)
class DiskTooSmall(Fact):
    path: str
    free: Bytes
    need: Bytes  # of the smallest stage's snapshot
    kind: Literal["disk_too_small"] = "disk_too_small"


@dataclass(frozen=True)
class DeviceTooSmall(Fact):
    device: str
    free: Bytes
    need: Bytes  # of the smallest stage
    kind: Literal["device_too_small"] = "device_too_small"


@dataclass(frozen=True)
class HostTooSmall(Fact):
    """The machine's own memory cannot hold what codecs keep there, wherever the stage computes."""

    free: Bytes
    need: Bytes  # of the smallest stage
    kind: Literal["host_too_small"] = "host_too_small"


@dataclass(frozen=True)
class MemoryOptionTooLow(Fact):
    """--memory allows less than the smallest stage needs; the device has enough."""

    device: str
    allowed: Bytes
    free: Bytes
    need: Bytes
    kind: Literal["memory_option_too_low"] = "memory_option_too_low"


@dataclass(frozen=True)
class PortNotOpened(Fact):
    port: int
    kind: Literal["port_not_opened"] = "port_not_opened"


# Why the connection to the coordinator is lost


@dataclass(frozen=True)
class NoHeartbeat(Fact):
    seconds: float
    kind: Literal["no_heartbeat"] = "no_heartbeat"


@dataclass(frozen=True)
class AddressChanged(Fact):
    """This machine is in another network: what was connected before is dead."""

    kind: Literal["address_changed"] = "address_changed"


@dataclass(frozen=True)
class ConnectionClosed(Fact):
    """The coordinator closed the connection."""

    kind: Literal["connection_closed"] = "connection_closed"


@dataclass(frozen=True)
class NetworkFailed(Fact):
    detail: str
    kind: Literal["network_failed"] = "network_failed"


@dataclass(frozen=True)
class MessageMissing(Fact):
    """The coordinator's messages have numbers, and one did not come."""

    number: int
    kind: Literal["message_missing"] = "message_missing"


@dataclass(frozen=True)
class BasisDamaged(Fact):
    version: int
    kind: Literal["basis_damaged"] = "basis_damaged"


Loss = NoHeartbeat | AddressChanged | ConnectionClosed | NetworkFailed | MessageMissing | BasisDamaged


# Why a session ends


@dataclass(frozen=True)
class NeverConnected(Fact):
    """The first connection was lost before the coordinator had said anything."""

    reason: Loss
    kind: Literal["never_connected"] = "never_connected"


@dataclass(frozen=True)
class GaveUp(Fact):
    """The coordinator was away for longer than this peer waits."""

    seconds: float
    kind: Literal["gave_up"] = "gave_up"


@dataclass(frozen=True)
class Dismissed(Fact):
    """The coordinator sent the peer away; text and fix are the coordinator's."""

    reason: str  # its kind
    text: str
    fix: str
    exit_code: int
    kind: Literal["dismissed"] = "dismissed"


BeforeJoining = (
    NoSuchDevice
    | OtherPackage
    | SpecNotUnderstood
    | SpecReadDifferently
    | ClockSkew
    | FolderNotWritable
    | DiskTooSmall
    | DeviceTooSmall
    | HostTooSmall
    | MemoryOptionTooLow
    | PortNotOpened
)
Problem = BeforeJoining | NeverConnected | GaveUp | Dismissed | troubles.Own
