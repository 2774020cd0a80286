"""Why a caller is refused. Data, no English: sentences.py says how each reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protomodels_cli.facts import Fact


@dataclass(frozen=True)
class WrongToken(Fact):
    kind: Literal["wrong_token"] = "wrong_token"


@dataclass(frozen=True)
class EndedToken(Fact):
    """It did let peers join."""

    how: Literal["used", "expired", "revoked"]
    kind: Literal["token_ended"] = "token_ended"


@dataclass(frozen=True)
class NotOwner(Fact):
    kind: Literal["not_owner"] = "not_owner"


@dataclass(frozen=True)
class NotEnrolled(Fact):
    kind: Literal["not_enrolled"] = "not_enrolled"


@dataclass(frozen=True)
class CertificateExpired(Fact):
    """The peer has not renewed what it shows: whoever has a good token joins again."""

    kind: Literal["certificate_expired"] = "certificate_expired"


@dataclass(frozen=True)
class TooManyRenewals(Fact):
    seconds: float  # until another
    kind: Literal["too_many_renewals"] = "too_many_renewals"


@dataclass(frozen=True)
class Dismissed(Fact):
    """The peer was sent away for good, and may join as another."""

    kind: Literal["was_dismissed"] = "was_dismissed"


@dataclass(frozen=True)
class Kicked(Fact):
    """The owner wants this peer no more."""

    kind: Literal["was_kicked"] = "was_kicked"


@dataclass(frozen=True)
class CoolingOff(Fact):
    """A peer from the same network, that came with the same token, was sent away for sending too much."""

    seconds: float  # until another may join
    kind: Literal["cooling_off"] = "cooling_off"


@dataclass(frozen=True)
class TooManyJoins(Fact):
    """From one network, in a short time."""

    seconds: float  # until another may join
    kind: Literal["too_many_joins"] = "too_many_joins"


@dataclass(frozen=True)
class TooManyCalls(Fact):
    """From one network or of one peer: this one waited for its turn for too long, or had to make room."""

    kind: Literal["too_many_calls"] = "too_many_calls"


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


# What a peer fetches


@dataclass(frozen=True)
class NoSession(Fact):
    """The peer has no open session. One that has just broken opens again."""

    kind: Literal["no_session"] = "no_session"


@dataclass(frozen=True)
class PartNotAssigned(Fact):
    """The peer was not told to hold, build, audit or prefetch this stage."""

    stage: int
    step: int  # of the snapshot
    kind: Literal["part_not_assigned"] = "part_not_assigned"


@dataclass(frozen=True)
class AuditNotAsked(Fact):
    """The peer was not asked for this audit, or is not any more."""

    audit: int
    kind: Literal["audit_not_asked"] = "audit_not_asked"


# What the owner asked for


@dataclass(frozen=True)
class NoSuchPeer(Fact):
    name: str
    peers: int  # that have this name
    kind: Literal["no_such_peer"] = "no_such_peer"


@dataclass(frozen=True)
class RestsByItself(Fact):
    """Only its own machine wakes a peer that was put to rest there."""

    name: str
    kind: Literal["rests_by_itself"] = "rests_by_itself"


@dataclass(frozen=True)
class NoSuchToken(Fact):
    id: str
    kind: Literal["no_such_token"] = "no_such_token"


@dataclass(frozen=True)
class TooManyTokens(Fact):
    most: int
    kind: Literal["too_many_tokens"] = "too_many_tokens"


# The caller has not shown the right to call.
Denial = WrongToken | EndedToken | NotOwner | NotEnrolled | CertificateExpired | Kicked | Dismissed
NotNeeded = NoSession | PartNotAssigned | AuditNotAsked  # not now: an honest peer asks again
Mistake = NoSuchPeer | RestsByItself | NoSuchToken | TooManyTokens
Crowd = CoolingOff | TooManyJoins | TooManyRenewals | TooManyPeers | TooManyCalls  # trying again helps
Refusal = Denial | Crowd | OtherProtocol | InvalidKey | OtherSpec | NotNeeded | Mistake
