"""What the simulated programs say to one another, and what they hold: with hashes for numbers. See simulation.py."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from protomodels_cli.coordinator.history import Decided, Mark
from protomodels_cli.protocol.parts import Part

if TYPE_CHECKING:
    from simulated_peer import Process


class Violation(AssertionError):
    """A rule was broken."""


def digest(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


T_FIXED = (1, "t")


@dataclass
class StageMemory:
    """What a process has of its stage."""

    lineage: int
    stage: int
    layers: tuple[int, ...]
    applied: int
    numbers: str
    basis: tuple[int, str]
    generation: int = 0
    prepared: tuple[int, str] | None = None  # generation and gradient
    held: tuple[int, str] | None = None  # the next basis
    report: tuple[int, str] | None = None  # step, and what the subspace becomes after it
    flipped: bool = False
    # What was heard and said in this generation
    task: int = 0
    done: Any = None  # its last report
    # The step under way
    run: tuple[int, int] | None = None  # task, step
    forward: str | None = None
    frames: dict[str, deque[Frame]] = field(default_factory=lambda: {"forward": deque(), "backward": deque()})


@dataclass(frozen=True)
class Frame:
    generation: int
    lineage: int
    step: int
    content: str


@dataclass(frozen=True)
class PartFile:
    lineage: int
    step: int
    stage: int
    numbers: str
    basis: tuple[int, str]
    spoilt: bool = False

    @property
    def sha256(self) -> str:
        return digest(self.step, self.stage, self.numbers, self.basis)

    @property
    def key(self) -> tuple[int, int, int]:
        return self.lineage, self.step, self.stage


class Machine:
    """Somebody's computer: a disk, and now and then a process."""

    def __init__(self, number: int, slow: float = 1.0, claims: float = 1.0):
        self.number, self.slow, self.claims = number, slow, claims  # how slow it is, and how slow a benchmark says
        self.token = f"t{number}"
        self.disk: dict[tuple[int, int, int], PartFile] = {}
        self.process: Process | None = None
        self.frozen = self.cut = self.disk_full = False


# Words of the coordinator's, as its shell makes them of commands


@dataclass(frozen=True)
class Assignment:
    generation: int
    lineage: int
    stage: int
    layers: tuple[int, ...]
    task: int
    step: int
    reuse: bool
    decision: Decided | None
    mark: Mark
    owed: int


@dataclass(frozen=True)
class Turn:
    generation: int
    decision: Decided | None
    task: tuple[int, str, int] | None
    save: bool
    basis_version: int


@dataclass(frozen=True)
class NewBasis:
    generation: int
    version: int
    sha256: str


@dataclass(frozen=True)
class Keep:
    snapshots: frozenset[tuple[int, int]]
    begun: frozenset[tuple[int, int]]
    newest: tuple[Part, ...]
