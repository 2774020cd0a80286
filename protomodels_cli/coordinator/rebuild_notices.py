"""What the owner is told of a journal that was lost or damaged."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar, Literal

from protomodels_cli.observe.notices import Notice as Base


@dataclass(frozen=True)
class JournalRefused(Base):
    level: ClassVar[int] = logging.WARNING
    detail: str
    kind: Literal["journal_refused"] = "journal_refused"


@dataclass(frozen=True)
class SnapshotSetAside(Base):
    level: ClassVar[int] = logging.WARNING
    snapshot: str  # the name of its folder
    detail: str
    kind: Literal["snapshot_set_aside"] = "snapshot_set_aside"


@dataclass(frozen=True)
class JournalRebuilt(Base):
    step: int  # from which the run continues; 0: the beginning
    lost: int  # steps
    aside: str  # where the old journal is
    kind: Literal["journal_rebuilt"] = "journal_rebuilt"


AboutRebuilding = JournalRefused | SnapshotSetAside | JournalRebuilt
