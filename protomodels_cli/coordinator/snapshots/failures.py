"""Why a part of a snapshot could not be saved. Data, no English: sentences.py says how they read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protomodels_cli.facts import Fact


@dataclass(frozen=True)
class NotWritten(Fact):
    detail: str  # in the system's words
    kind: Literal["not_written"] = "not_written"


@dataclass(frozen=True)
class TooLarge(Fact):
    """A part with more bytes than its stage can have."""

    size: int
    most: int
    kind: Literal["too_large"] = "too_large"


@dataclass(frozen=True)
class NoRoom(Fact):
    """The coordinator's disk has no room for the snapshot, which is therefore not begun."""

    missing: int  # bytes
    kind: Literal["no_room"] = "no_room"


PartFailure = NotWritten | TooLarge | NoRoom
