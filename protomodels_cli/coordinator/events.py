"""What happens to a run, and what the machine has done about it: events in, commands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protomodels_cli.coordinator.history import Decided
from protomodels_cli.coordinator.state import Peer, Report, Task

# Events


@dataclass(frozen=True)
class Joined:
    peer: Peer


@dataclass(frozen=True)
class Left:
    peer: str
    why: str


@dataclass(frozen=True)
class Leaving:
    """A peer wants to go as soon as it can without harm."""

    peer: str


@dataclass(frozen=True)
class Trouble:
    """A peer cannot go on; `about` is the stage that it blames, if any."""

    peer: str
    what: str
    about: int | None = None


@dataclass(frozen=True)
class Done:
    peer: str
    task: int
    report: Report


@dataclass(frozen=True)
class BasisTaken:
    peer: str
    version: int
    sha256: str


@dataclass(frozen=True)
class SubspaceReported:
    """The last stage's word after a gathering of gradients: metrics, and a new basis where there is one."""

    peer: str
    generation: int
    step: int
    row: Mapping[str, float]
    sha256: str | None


@dataclass(frozen=True)
class SnapshotComplete:
    step: int


@dataclass(frozen=True)
class SnapshotFailed:
    """A part could not be written, or the whole not be named."""

    step: int
    why: str


@dataclass(frozen=True)
class DiskFailed:
    """Something that the run cannot do without could not be written."""

    why: str


@dataclass(frozen=True)
class Tick:
    pass


FromPeers = Joined | Left | Leaving | Trouble | Done | BasisTaken | SubspaceReported
Event = FromPeers | SnapshotComplete | SnapshotFailed | DiskFailed | Tick


# Commands


@dataclass(frozen=True)
class PlaceStage:
    peer: str
    stage: int
    task: int


@dataclass(frozen=True)
class KeepSpare:
    peer: str
    why: str


@dataclass(frozen=True)
class SendTurn:
    """To every holder: the outcome of the last step, where it is due, and the next task, where there is one."""

    decision: Decided | None
    task: Task | None


@dataclass(frozen=True)
class SendBasis:
    version: int


@dataclass(frozen=True)
class CompleteSnapshot:
    step: int


@dataclass(frozen=True)
class DropSnapshot:
    """Remove what there is of it: it would only take room."""

    step: int


@dataclass(frozen=True)
class Dismiss:
    peer: str
    why: str
    fix: str
    exit_code: int


@dataclass(frozen=True)
class WriteRow:
    """Into the metrics."""

    row: dict[str, Any]


@dataclass(frozen=True)
class Say:
    """To the owner."""

    text: str


Command = PlaceStage | KeepSpare | SendTurn | SendBasis | CompleteSnapshot | DropSnapshot | Dismiss | WriteRow | Say
