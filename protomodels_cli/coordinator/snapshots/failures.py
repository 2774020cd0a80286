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


@dataclass(frozen=True)
class NoTensors(Fact):
    """A part that is no whole safetensors file."""

    detail: str
    kind: Literal["no_tensors"] = "no_tensors"


@dataclass(frozen=True)
class WrongTensor(Fact):
    """A part with a tensor that its stage does not have, or has otherwise."""

    tensor: str
    found: str  # its type and shape; empty: it is missing
    right: str  # what they must be; empty: it does not belong there
    kind: Literal["wrong_tensor"] = "wrong_tensor"


@dataclass(frozen=True)
class Overdue(Fact):
    """A part that was not here in time, while the run went on: limits.part_seconds."""

    seconds: float
    kind: Literal["overdue"] = "overdue"


Unfit = NoTensors | WrongTensor  # the part is here, and not what its stage saves
PartFailure = NotWritten | TooLarge | NoRoom | Unfit | Overdue
