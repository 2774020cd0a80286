"""What audits find, as reasons why peers are parted or one is dismissed. Data, no English."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protomodels_cli.facts import Fact
from protomodels_cli.protocol.messages import Leg


@dataclass(frozen=True)
class MessagesDiffer(Fact):
    """The ends of a boundary report different messages of a step: one of the two lies."""

    step: int
    boundary: int
    kind: Literal["messages_differ"] = "messages_differ"


@dataclass(frozen=True)
class AuditFailed(Fact):
    """A stage sent other numbers than were recomputed from what it was sent."""

    stage: int
    step: int
    leg: Leg
    wild: int  # numbers that honest arithmetic does not explain
    numbers: int  # … of so many
    auditors: tuple[str, ...]  # names of those who recomputed them
    kind: Literal["audit_failed"] = "audit_failed"


@dataclass(frozen=True)
class FalseVerdicts(Fact):
    """An auditor that is contradicted by more of the others than can lie."""

    contradicted: int  # by so many people
    people: int  # … of so many in the run
    kind: Literal["false_verdicts"] = "false_verdicts"


OfAudits = MessagesDiffer | AuditFailed | FalseVerdicts
