"""What the owner is told of a stage that is given to a spare that is faster."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar, Literal

from protomodels_cli.coordinator import reasons
from protomodels_cli.observe.notices import Notice as Base

WhyNot = Literal["spare_gone", "spare_needed", "not_ready", "not_saved"]


@dataclass(frozen=True)
class StageReseating(Base):
    """It begins: the run stands at this step until the spare has built the stage."""

    step: int
    seconds: float  # that this is expected to take
    reason: reasons.Reseating
    kind: Literal["stage_reseating"] = "stage_reseating"


@dataclass(frozen=True)
class StageReseated(Base):
    """The spare holds it, and who held it is a spare."""

    stage: int
    peer: str
    name: str
    before: str
    before_name: str
    kind: Literal["stage_reseated"] = "stage_reseated"


@dataclass(frozen=True)
class StageNotReseated(Base):
    """Its holder goes on with it, as if nothing had been."""

    level: ClassVar[int] = logging.WARNING
    stage: int
    holder: str
    holder_name: str
    spare: str
    spare_name: str
    why: WhyNot
    kind: Literal["stage_not_reseated"] = "stage_not_reseated"


AboutReseating = StageReseating | StageReseated | StageNotReseated
