"""What the owner is told of audits."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar, Literal

from protomodels_cli.coordinator.audit_reasons import AuditFailed
from protomodels_cli.observe.notices import Notice as Base

WhyNot = Literal["no_spare", "no_independent", "spares_busy", "not_shown", "no_verdict"]


@dataclass(frozen=True)
class StageAudited(Base):
    """What the stage sent in this step is what a spare recomputed."""

    stage: int
    step: int
    peer: str
    name: str
    auditor: str  # its name
    kind: Literal["stage_audited"] = "stage_audited"


@dataclass(frozen=True)
class StageAccused(Base):
    """It is not, as this spare says; another one is asked, where there is one."""

    level: ClassVar[int] = logging.WARNING
    peer: str
    name: str
    reason: AuditFailed
    kind: Literal["stage_accused"] = "stage_accused"


@dataclass(frozen=True)
class AuditorsDisagree(Base):
    """A spare found a lie, and another one did not: one of the two is wrong, and others are asked."""

    level: ClassVar[int] = logging.WARNING
    peer: str
    name: str
    other: str  # the name of who found none
    reason: AuditFailed
    kind: Literal["auditors_disagree"] = "auditors_disagree"


@dataclass(frozen=True)
class HolderWatched(Base):
    """Fewer auditors accuse it than it takes to dismiss it: the owner is told, and others are asked as they come."""

    level: ClassVar[int] = logging.WARNING
    peer: str
    name: str
    reason: AuditFailed
    words: int  # people who contradict it
    needed: int
    kind: Literal["holder_watched"] = "holder_watched"


@dataclass(frozen=True)
class AuditGivenUp(Base):
    """Told once for each reason, until the stage is audited."""

    level: ClassVar[int] = logging.WARNING
    stage: int
    step: int
    why: WhyNot
    kind: Literal["audit_given_up"] = "audit_given_up"


@dataclass(frozen=True)
class NobodyAudits(Base):
    """The run begins, asks for audits, and has no spare for them, or none that is independent of a holder."""

    level: ClassVar[int] = logging.WARNING
    share: float  # the spec's `audit`
    why: WhyNot
    kind: Literal["nobody_audits"] = "nobody_audits"


AboutAudits = NobodyAudits | StageAudited | StageAccused | AuditorsDisagree | HolderWatched | AuditGivenUp
