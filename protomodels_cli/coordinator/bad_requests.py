"""Requests that the coordinator rejects, as data with a kind, and how each reads.

A peer or command of the right version never sends one of these; whoever debugs one that does reads the sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

from protomodels_cli.facts import Fact
from protomodels_cli.quantities import size


@dataclass(frozen=True)
class UnknownPart(Fact):
    stage: int
    kind: Literal["unknown_part"] = "unknown_part"


@dataclass(frozen=True)
class NotHolder(Fact):
    stage: int | None  # None: of any
    kind: Literal["not_holder"] = "not_holder"


@dataclass(frozen=True)
class SnapshotGivenUp(Fact):
    step: int
    kind: Literal["snapshot_given_up"] = "snapshot_given_up"


@dataclass(frozen=True)
class TooManyBytes(Fact):
    announced: int
    kind: Literal["too_many_bytes"] = "too_many_bytes"


@dataclass(frozen=True)
class OtherBytes(Fact):
    kind: Literal["other_bytes"] = "other_bytes"


@dataclass(frozen=True)
class BasisNotRequested(Fact):
    step: int
    kind: Literal["basis_not_requested"] = "basis_not_requested"


@dataclass(frozen=True)
class BasisSize(Fact):
    size: int
    right: int
    kind: Literal["basis_size"] = "basis_size"


@dataclass(frozen=True)
class InvalidBasis(Fact):
    detail: str
    kind: Literal["invalid_basis"] = "invalid_basis"


@dataclass(frozen=True)
class InvalidMetrics(Fact):
    kind: Literal["invalid_metrics"] = "invalid_metrics"


@dataclass(frozen=True)
class NoHeader(Fact):
    kind: Literal["no_header"] = "no_header"


@dataclass(frozen=True)
class InvalidOffset(Fact):
    offset: int
    kind: Literal["invalid_offset"] = "invalid_offset"


@dataclass(frozen=True)
class InvalidRegistration(Fact):
    detail: str
    kind: Literal["invalid_registration"] = "invalid_registration"


@dataclass(frozen=True)
class NotAMessage(Fact):
    """Bytes that are no message of the call, or too many for one."""

    size: int
    most: int
    kind: Literal["not_a_message"] = "not_a_message"


@dataclass(frozen=True)
class FramesNotRequested(Fact):
    kind: Literal["frames_not_requested"] = "frames_not_requested"


@dataclass(frozen=True)
class UnknownAction(Fact):
    action: int
    kind: Literal["unknown_action"] = "unknown_action"


Reason = (
    UnknownPart
    | NotHolder
    | SnapshotGivenUp
    | TooManyBytes
    | OtherBytes
    | BasisNotRequested
    | BasisSize
    | InvalidBasis
    | InvalidMetrics
    | NoHeader
    | InvalidOffset
    | InvalidRegistration
    | FramesNotRequested
    | UnknownAction
    | NotAMessage
)


class BadRequest(ValueError):
    def __init__(self, reason: Reason):
        super().__init__(sentence(reason))
        self.reason = reason


def sentence(reason: Reason) -> str:
    match reason:
        case UnknownPart(stage):
            return f"no snapshot of this run has a part with that hash for stage {stage}"
        case NotHolder(None):
            return "this peer holds no stage in the current generation"
        case NotHolder(stage):
            return f"this peer does not hold stage {stage}"
        case SnapshotGivenUp(step):
            return f"the snapshot at step {step} was given up: the upload is not needed any more"
        case TooManyBytes(announced):
            return f"the upload has more bytes than announced ({announced:,})"
        case OtherBytes():
            return "the upload does not have the size and hash that were announced (hash mismatch)"
        case BasisNotRequested(step):
            return f"the coordinator did not ask this stage for a basis after step {step}"
        case BasisSize(found, right):
            return f"a basis of this run has {size(right)}, not {size(found)}"
        case InvalidBasis(detail):
            return f"invalid basis: {detail}"
        case InvalidMetrics():
            return "the metrics of a basis must be a JSON object of numbers"
        case NoHeader():
            return "an upload must begin with a header"
        case InvalidOffset(offset):
            return f"the offset {offset:,} is beyond the end of any file"
        case InvalidRegistration(detail):
            return f"invalid registration: {detail}"
        case NotAMessage(found, most) if found > most:
            return f"a message of this call has {size(most)} at most, not {size(found)}"
        case NotAMessage():
            return "these bytes are not a message of this call"
        case FramesNotRequested():
            return "the coordinator did not ask this peer for these messages, or asks no more"
        case UnknownAction(action):
            return f"a run can be paused, resumed or stopped, and action {action} is none of these"
        case _:
            assert_never(reason)
