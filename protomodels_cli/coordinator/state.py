"""What the coordinator knows: peers, the task at hand, what was heard; and the history below it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from protomodels_cli.coordinator.history import History
from protomodels_cli.spec.schema import RunSpec

Kind = Literal["place", "link", "step", "sync", "evaluation", "save", "finish"]


@dataclass(frozen=True)
class Peer:
    """A peer with an open session."""

    id: str
    name: str
    device: str
    memory: int
    flops: float
    address: str  # as the coordinator sees it
    host: str  # where neighbours can dial it; empty: nowhere
    port: int
    since: float


@dataclass(frozen=True)
class Task:
    number: int
    kind: Kind
    step: int
    started: float


@dataclass(frozen=True)
class Hashes:
    """Of the bytes of U and T_fixed that a stage uses, or must use."""

    basis_version: int
    basis: str
    t_fixed_version: int
    t_fixed: str


@dataclass(frozen=True)
class Report:
    """What a stage says at the end of a task."""

    hashes: Hashes | None = None  # place, sync
    norms: tuple[tuple[str, float], ...] = ()  # step: (unit, squared norm)
    loss_sum: float = 0.0  # step, evaluation; from the last stage
    tokens: int = 0
    parameters: tuple[tuple[str, str], ...] = ()  # finish: (name, hash)
    not_saved: str = ""  # save: why its part was not written
    usage: Mapping[str, float] = field(default_factory=dict)  # step


@dataclass(frozen=True)
class State:
    spec: RunSpec
    t_fixed: tuple[int, str]  # version and hash
    history: History
    peers: Mapping[str, Peer] = field(default_factory=dict)  # in the order in which they joined
    task: Task | None = None  # none: waiting for something that is not a stage's report
    heard: Mapping[int, Report] = field(default_factory=dict)  # stage → its report on the task
    undelivered: bool = False  # the last decision has not been sent yet
    owed: int | None = None  # the step after which the last stage still owes its word on the subspace
    took_basis: frozenset[int] = frozenset()  # stages that have the next basis
    leaving: frozenset[str] = frozenset()  # holders that go when the step is done and saved
    unsaved: tuple[int, str, float] | None = None  # the snapshot of this step failed: why, and when
    relay_all: bool = False  # direct links failed: send everything through the door
    missing: str = "no peer has joined"  # while there is no placement: why
    tasks: int = 0
    usage: Mapping[int, Report] = field(default_factory=dict)  # stage → its newest report on a step
    decided_at: tuple[tuple[float, int], ...] = ()  # (when, step) of the last decisions

    @property
    def placed(self) -> bool:
        return bool(self.history.holders) and not self.history.over

    @property
    def stages(self) -> int:
        return len(self.history.holders)

    def stage_of(self, peer: str) -> int | None:
        return self.history.holders.index(peer) if peer in self.history.holders else None
