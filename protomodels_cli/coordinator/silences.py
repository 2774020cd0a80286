"""Why a peer has no session any more, as the coordinator saw it. Data, no English."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protomodels_cli.facts import Fact


@dataclass(frozen=True)
class NoHeartbeat(Fact):
    seconds: float
    kind: Literal["no_heartbeat"] = "no_heartbeat"


@dataclass(frozen=True)
class ConnectionClosed(Fact):
    kind: Literal["connection_closed"] = "connection_closed"


@dataclass(frozen=True)
class NotRenewed(Fact):
    """The peer was here and did not renew it."""

    kind: Literal["not_renewed"] = "not_renewed"
