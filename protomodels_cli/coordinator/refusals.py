"""Why a caller is refused. Data, no English: sentences.py says how each reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protomodels_cli.facts import Fact


@dataclass(frozen=True)
class WrongToken(Fact):
    kind: Literal["wrong_token"] = "wrong_token"


@dataclass(frozen=True)
class NotOwner(Fact):
    kind: Literal["not_owner"] = "not_owner"


@dataclass(frozen=True)
class NotEnrolled(Fact):
    kind: Literal["not_enrolled"] = "not_enrolled"


@dataclass(frozen=True)
class Dismissed(Fact):
    """The peer was sent away for good, and may join as another."""

    kind: Literal["was_dismissed"] = "was_dismissed"


@dataclass(frozen=True)
class CoolingOff(Fact):
    """A peer from the same network was sent away for sending too much."""

    seconds: float  # until another may join
    kind: Literal["cooling_off"] = "cooling_off"


@dataclass(frozen=True)
class OtherProtocol(Fact):
    version: str  # of pmtrain, the caller's
    protocol: int
    our_version: str
    our_protocol: int
    kind: Literal["other_protocol"] = "other_protocol"


@dataclass(frozen=True)
class TooManyPeers(Fact):
    most: int
    kind: Literal["too_many_peers"] = "too_many_peers"


@dataclass(frozen=True)
class InvalidKey(Fact):
    detail: str
    our_version: str
    kind: Literal["invalid_key"] = "invalid_key"


@dataclass(frozen=True)
class OtherSpec(Fact):
    kind: Literal["other_spec"] = "other_spec"


Denial = WrongToken | NotOwner | NotEnrolled | Dismissed  # the caller has not shown the right to call
Refusal = Denial | CoolingOff | OtherProtocol | TooManyPeers | InvalidKey | OtherSpec
