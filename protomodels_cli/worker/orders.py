"""What the event loop orders of the compute thread, and what the thread posts in return. Values only.

Knows neither threads nor sockets nor protobuf: the session makes orders of messages, the engine results of work.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from protomodels_cli.cost.activations import Recompute
from protomodels_cli.model.basis import Basis
from protomodels_cli.model.shape import Slice
from protomodels_cli.model.stage import Layout, Sync
from protomodels_cli.protocol.audit import Compared
from protomodels_cli.protocol.messages import Leg
from protomodels_cli.spec.schema import RunSpec
from protomodels_cli.wire.usage import Usage

# Orders, in the order in which the coordinator gave them


@dataclass(frozen=True)
class Assignment:
    """A stage in a generation, as far as computing needs to know."""

    task: int
    generation: int
    lineage: int
    step: int  # the last one decided
    limit: int  # microbatches in flight
    owed: int  # the step after which the subspace's fate is to be said again; 0: none
    recompute: Recompute = "none"


@dataclass(frozen=True)
class Build:
    """Make the stage anew: from the seed, or from this file; ahead of an assignment where the generation is below zero.
    One that was built ahead of the next one from the same is used as it is."""

    assignment: Assignment
    spec: RunSpec
    layers: Slice
    layout: Layout
    basis: Basis | None
    saved: Path | None

    @property
    def source(self) -> tuple[Slice, str | None, Path | None]:
        """What tells stages apart that are built."""
        return self.layers, None if self.basis is None else self.basis.sha256, self.saved


@dataclass(frozen=True)
class Reuse:
    """Go on with the stage that is in memory, and take the last decision if it is not known yet."""

    assignment: Assignment
    decision: Decide | None


@dataclass(frozen=True)
class Describe:
    """Say what is in memory."""


@dataclass(frozen=True)
class Decide:
    """The outcome of the step that this stage is prepared for."""

    step: int
    apply: bool
    lr: float
    clip: float


@dataclass(frozen=True)
class Run:
    """A step (leg forward) or an evaluation."""

    task: int
    leg: Leg
    step: int
    microbatches: int
    basis_version: int


@dataclass(frozen=True)
class ReportSync:
    """Hash the bytes of U and T_fixed in use, and report the hashes."""

    task: int


@dataclass(frozen=True)
class CopyState:
    """Copy the stage's whole state to the host's memory."""


@dataclass(frozen=True)
class HashWeights:
    """Hash every parameter of the stage, and report the hashes."""

    task: int


@dataclass(frozen=True)
class HoldBasis:
    """Hold this basis until a step is run with it."""

    basis: Basis


@dataclass(frozen=True)
class Audit:
    """Do this, which takes a stage's memory, and give what comes of it; nothing while there is a stage here."""

    job: Callable[[], list[Compared]]
    result: Future[list[Compared]]


@dataclass(frozen=True)
class Drop:
    """Let go of the stage."""


Order = Drop | Audit | Build | Reuse | Describe | Decide | Run | ReportSync | CopyState | HashWeights | HoldBasis


class WrongOrder(RuntimeError):
    """An order does not follow from those before it. It is raised before anything changes, and ends the peer: only a
    fault in the coordinator or here leads to it, and to guess would make this stage another than the run's."""


# What comes back


@dataclass(frozen=True)
class TaskReport:
    """A task is done: what it took and, depending on its kind, what came of it."""

    task: int
    usage: Usage
    sync: Sync | None = None
    norms: dict[str, float] = field(default_factory=dict)
    loss_sum: float = 0.0
    tokens: int = 0
    parameters: list[tuple[str, str]] = field(default_factory=list)
    step: int = 0  # of a step


@dataclass(frozen=True)
class Described:
    """The stage in memory, if any: its lineage, its last decided step, and the generation it is prepared in."""

    found: tuple[int, int, int] | None


@dataclass(frozen=True)
class PartUnusable:
    """No stage can be built from the file: nothing is in memory."""

    why: str


@dataclass(frozen=True)
class Copied:
    """The stage's whole state after this step."""

    lineage: int
    step: int
    state: dict[str, torch.Tensor]


@dataclass(frozen=True)
class SubspaceReport:
    """What a gathering of gradients came to: a row of metrics, and the new basis if U moves."""

    step: int
    row: dict[str, Any]
    basis: Basis | None


@dataclass(frozen=True)
class Taken:
    """A message was taken from its queue: its credit can go back."""

    leg: Leg


@dataclass(frozen=True)
class Failure:
    """The thread could not do what it was given."""

    error: Exception
    leg: Leg | None = None  # of the message that it came of
