"""What a run is doing: all its holders are at a task, or it waits for something. Pure. Which moves are legal: see
machine.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protomodels_cli.coordinator.reasons import Blocker, Missing, NoPeers, TaskKind
from protomodels_cli.protocol.audit import Recorded
from protomodels_cli.wire.usage import Usage


@dataclass(frozen=True)
class Task:
    number: int
    kind: TaskKind
    step: int
    started: float
    recorded: bool = False  # a step whose messages every stage keeps, in case it is audited


@dataclass(frozen=True)
class Hashes:
    """Versions and hashes of U and T_fixed: of those that a stage uses, or of those that it must use."""

    basis_version: int
    basis: str
    t_fixed_version: int
    t_fixed: str


@dataclass(frozen=True)
class Report:
    """What a stage says at the end of a task."""

    hashes: Hashes | None = None  # build, sync
    norms: tuple[tuple[str, float], ...] = ()  # step: (unit, squared norm)
    loss_sum: float = 0.0  # step, evaluation; from the last stage
    tokens: int = 0
    parameters: tuple[tuple[str, str], ...] = ()  # finish: (name, hash)
    usage: Usage = field(default_factory=Usage)  # step
    recorded: Recorded | None = None  # step that may be audited


@dataclass(frozen=True)
class Unplaced:
    """No generation is open: somebody is missing."""

    missing: Missing = field(default_factory=NoPeers)


@dataclass(frozen=True)
class Working:
    """All holders are at a task, and some have reported on it."""

    task: Task
    heard: Mapping[int, Report] = field(default_factory=dict)  # stage → its report
    waited: float = 0.0  # seconds of the task in which a holder was away, and came back
    waited_until: float = 0.0  # when the last of these came back: absences may overlap


@dataclass(frozen=True)
class Blocked:
    """Something that is not a stage's report must come before the next task."""

    on: Blocker
    since: float


@dataclass(frozen=True)
class Idle:
    """The run is over, or is stopped."""


Work = Unplaced | Working | Blocked | Idle
